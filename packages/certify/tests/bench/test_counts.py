"""The ceilings of what operations cost."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import pytest

from kvwire.memory import pieces
from kvwire_certify.bench.command import operations
from kvwire_certify.bench.work import ARENA, GET
from packages.certify.tests.bench.counting import count

# Python calls and frames of an operation, both sides, over tcp and with Python 3.11:
# others inline other calls. With a compiled copy.
# What makes one dearer is named here, with its reason in the commit; what makes it
# cheaper lowers its line. The last word of a transfer has a frame of its own where the
# next transfer comes late.
CEILINGS: Final = {
    "connect": (1444, 7),
    "pull, 64 KiB, 16 layers": (414, 5),
    "pull, 256 KiB, 16 layers": (482, 5),
    "push, 256 KiB, 16 layers": (499, 5),
    "push, 4 MiB, 32 layers": (762, 9),
    "ready of a layer, 64 KiB": (80, 2),
    "round trip, 64 B": (89, 2),
    "send, 64 KiB": (171, 3),
    "send, 1 MiB": (171, 3),
    "put, 64 KiB": (151, 3),
    "get, 64 KiB": (121, 2),
    "get, 64 KiB, 16 layers": (128, 2),
    "get, 256 KiB, 16 layers": (129, 2),
}
_WINDOWS: Final = [n for n, w in operations().items() if w.verb == GET and w.layers]
# Of gets from a window whose memory is mapped, or read by one system call. Some of them
# complete in the loop's next turn, so that other tasks have theirs.
IN_PLACE: Final = 34
# So many calls more copy the pieces of an operation where nothing is compiled.
_NOT_COMPILED: Final = 22
# A ping, and a wake-up more or less.
_MARGIN: Final = 1.03
# A busy machine adds wake-ups, and takes none away: the least of some runs counts.
_RUNS: Final = 6


def test_every_operation_has_its_ceiling() -> None:
    assert list(operations()) == list(CEILINGS)


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the ceilings are those of Python 3.11"
)
@pytest.mark.parametrize("name", CEILINGS)
def test_an_operation_is_no_dearer_than_it_was(name: str) -> None:
    calls, frames = (most * _MARGIN for most in CEILINGS[name])
    if pieces.compiled is None:
        calls += _NOT_COMPILED
    for _ in range(_RUNS):
        counts = asyncio.run(count(operations()[name], "tcp"))
        if counts.calls <= calls and sum(counts.frames.values()) <= frames:
            break
    assert counts.calls <= calls, f"{name}: Python calls"
    assert sum(counts.frames.values()) <= frames, f"{name}: frames"
    assert any("/connection_driver.py ConnectionDriver." in f for f in counts.functions)


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the ceilings are those of Python 3.11"
)
@pytest.mark.skipif(pieces.compiled is None, reason="nothing is compiled here")
@pytest.mark.parametrize("memory", ["", ARENA])
@pytest.mark.parametrize("name", _WINDOWS)
def test_a_window_is_read_in_place_without_the_owner(name: str, memory: str) -> None:
    """By few calls, no frames, and nothing that the owner does."""
    counts = asyncio.run(count(operations()[name], "local", memory))
    assert counts.calls <= IN_PLACE * _MARGIN
    assert not counts.frames
