"""Serve a store to other machines, and ask one. Internal."""
