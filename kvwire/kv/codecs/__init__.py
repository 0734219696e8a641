"""Codecs of transfers, which send KV as fewer bytes."""
