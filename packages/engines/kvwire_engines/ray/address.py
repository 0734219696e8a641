"""The address on which a Ray actor listens."""

from __future__ import annotations

import os

from kvwire.config import Config
from kvwire.extras import needed_by


def listen_address() -> str:
    """Return the address on which an actor listens: Ray's address for its node.

    Without a key or a certificate this is loopback. ``KVWIRE_RAY_LISTEN`` overrides
    it.
    """
    if listen := os.environ.get("KVWIRE_RAY_LISTEN"):
        return listen
    if Config.load().trust == "loopback":
        return "127.0.0.1:0"
    with needed_by("kvwire_engines.ray", extra="ray", distribution="kvwire-engines"):
        import ray  # noqa: PLC0415
    return f"{ray.util.get_node_ip_address()}:0"
