"""Codecs of KV blocks, which store or send a block's bytes as fewer bytes."""
