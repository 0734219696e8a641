"""Memory is overwritten when it is its owner's again, as by who reuses a KV block."""

from __future__ import annotations

from typing import Final, Protocol

from kvwire.testing.conformance.content import Memory

POISON: Final = 0xEE


class Owned(Protocol):
    """A token, or a landing: what knows the memory of one payload."""

    memory: Memory | None


def poison(owned: Owned) -> None:
    """Overwrite memory that is its owner's again; there may be none."""
    if owned.memory is not None:
        owned.memory.poison(POISON)
