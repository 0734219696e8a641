"""A server that shares a store with other machines, and its client. Internal."""
