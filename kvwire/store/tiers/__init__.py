"""Keep blocks: in memory, on disks, in objects, on a store server. Internal."""
