"""Checks that are the same for links and for lanes."""
