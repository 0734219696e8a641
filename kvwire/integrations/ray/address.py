"""The address that an actor of Ray listens at."""

from __future__ import annotations

import os

from kvwire.config import Config
from kvwire.extras import needed_by


def listen_address() -> str:
    """Say where an actor listens: at the address that Ray knows its node by.

    On loopback where there is neither a key nor certificates; ``KVWIRE_RAY_LISTEN``
    names another address.
    """
    if listen := os.environ.get("KVWIRE_RAY_LISTEN"):
        return listen
    if Config.load().trust == "loopback":
        return "127.0.0.1:0"
    with needed_by("kvwire.integrations.ray", extra="ray"):
        import ray  # noqa: PLC0415
    return f"{ray.util.get_node_ip_address()}:0"
