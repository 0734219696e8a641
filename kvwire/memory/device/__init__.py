"""Devices: their streams and events, and staging their memory through the host."""
