"""Logs each message that no receive takes, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from kvwire.limits import WAITING_LOG_S

Seen: TypeAlias = "dict[int, tuple[object, float | None]]"
"""The oldest message of each tag, and since when it is that; None once reported."""


def overdue(seen: Seen, oldest: Mapping[int, object], now: float) -> list[int]:
    """Return the tags whose oldest message is overdue; report each message once.

    Args:
        seen: The state kept between calls; it is updated.
        oldest: The oldest message of each tag.
        now: The time, in seconds.
    """
    named = []
    for tag in seen.keys() - oldest.keys():
        del seen[tag]
    for tag, message in oldest.items():
        was, since = seen.get(tag, (None, None))
        if was is not message:
            since = now
        elif since is not None and now - since >= WAITING_LOG_S:
            named.append(tag)
            since = None
        seen[tag] = message, since  # bounded: by the credit of the core
    return named
