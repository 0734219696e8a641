"""Carry KV caches: offer, match, send, receive, settle. Internal."""
