"""Codecs of stored blocks, found by name."""
