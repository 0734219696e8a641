"""Limits of the core made so small that a hundred steps reach them.

The code under test is the same; only the numbers differ. Chunks of a few lines let one
message cross many frames without moving megabytes, and tables of a few rows fill up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

from kvwire.proto import (
    chunks,
    lanes,
    messages,
    regions,
    requests,
    scheduler,
    transfers,
    windows,
)
from kvwire.wire import handshake_messages as hello

SMALL_CHUNK_BYTES: Final = 64

_Change = tuple[ModuleType, str, int]
_ALWAYS: Final[tuple[_Change, ...]] = ((hello, "CHUNK_BYTES_MIN", SMALL_CHUNK_BYTES),)
_SMALL_TABLES: Final[tuple[_Change, ...]] = (
    (requests, "REQUESTS_MAX", 6),
    (messages, "REQUESTS_MAX", 6),
    (scheduler, "REQUESTS_MAX", 6),
    (chunks, "LINK_CHUNKS_MAX", 6),
    (lanes, "LANE_PAYLOADS_MAX", 3),
    (regions, "GRANTS_MAX", 4),
    (transfers, "TRANSFERS_WAITING_MAX", 3),
    (transfers, "LANDED_MAX", 2),
    (transfers, "SETTLED_MAX", 2),
    (windows, "WINDOWS_OPEN_MAX", 2),
)


def requests_max() -> int:
    """How many requests a side may have open now."""
    return int(vars(requests)["REQUESTS_MAX"])


def grants_max() -> int:
    """How many grants a connection may have now."""
    return int(vars(regions)["GRANTS_MAX"])


@contextmanager
def scaled(*, small_tables: bool) -> Iterator[None]:
    """Run with small chunks, and with small tables if asked for."""
    changes = _ALWAYS + (_SMALL_TABLES if small_tables else ())
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for change in before:
            setattr(*change)
