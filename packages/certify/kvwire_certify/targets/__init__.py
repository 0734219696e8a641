"""Adapters for transports that come with kvwire; each imports its own library."""
