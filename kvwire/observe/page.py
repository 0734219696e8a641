"""Sizes as people say them."""

from __future__ import annotations

from kvwire.limits import GIB, KIB, MIB, TIB


def in_bytes(count: int) -> str:
    """Return a size as people say it: "64 KiB", "1.5 GiB"."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"
