"""The tiers that keep blocks: memory, disks, objects, store servers. Internal."""
