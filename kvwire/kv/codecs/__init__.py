"""Codecs of KV blocks: bytes of a block's image, stored or sent as fewer."""
