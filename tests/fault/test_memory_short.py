"""Memory that a peer names, and memory that there is not.

A number costs address space at most; pages come with bytes. What does not fit into this
process fails the one request that wanted it, on both sides.
"""

from __future__ import annotations

import asyncio
import mmap
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire.limits import CHUNK_BYTES, MESSAGE_BYTES, MIB
from kvwire.wire.control import Announce
from kvwire.wire.header import FrameType
from tests.fault.stranger import dial
from tests.support import inside
from tests.support.pairs import Pair, until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="/proc/self/statm is Linux's"
)
TAG8 = (7).to_bytes(8, "little")
LARGE_BYTES = 200 * MIB
COUNT = 4


def memory_bytes() -> tuple[int, int]:
    """Of this process: its address space, and what of it is resident."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * mmap.PAGESIZE, int(pages[1]) * mmap.PAGESIZE


@contextmanager
def little_memory(room_bytes: int) -> Iterator[None]:
    """Let this process have so much more address space, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes()[0] + room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def without_gaps(nbytes: int) -> list[npt.NDArray[np.uint8]]:
    """Take what the heap has room for as it is: a limit bounds what it grows by."""
    held: list[npt.NDArray[np.uint8]] = []
    while True:
        before = memory_bytes()[0]
        block = np.empty(nbytes, np.uint8)
        if memory_bytes()[0] - before >= nbytes // 2:
            return held
        held.append(block)


async def test_memory_comes_with_bytes_and_not_with_a_number(pair: Pair) -> None:
    """A GiB is announced and received: a chunk of each costs a chunk of each."""
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        before = memory_bytes()[1]
        receives = [there.recv(7) for _ in range(COUNT)]
        largest = Announce(TAG8, MESSAGE_BYTES)
        numbers = range(1, 2 * COUNT, 2)
        await stranger.say(
            *(stranger.control(FrameType.ANNOUNCE, largest, request=n) for n in numbers)
        )
        for _ in numbers:
            assert (await stranger.hear()).header.type == FrameType.READY
        assert memory_bytes()[1] - before < 8 * MIB
        for number in numbers:
            chunk = stranger.payload(
                FrameType.DATA, b"x" * CHUNK_BYTES, request=number, offset=CHUNK_BYTES
            )
            await stranger.say(chunk)
        await until(lambda: all((c := inside.record(r)) and c.moved for r in receives))
        grown = memory_bytes()[1] - before
        assert COUNT * CHUNK_BYTES <= grown < 8 * MIB + 2 * COUNT * CHUNK_BYTES
    await there.wait_closed()
    assert not len(inside.buffers(pair.far))


async def test_a_message_that_there_is_no_memory_for(pair: Pair) -> None:
    """Both sides learn it, nothing else ends, and a smaller message is received."""
    sending = pair.left.send(1, mmap.mmap(-1, LARGE_BYTES))
    held = without_gaps(LARGE_BYTES)
    with (
        little_memory(LARGE_BYTES // 2),
        pytest.raises(kvwire.MessageTooLarge, match="has no memory for a message"),
    ):
        await pair.right.recv(1)
    held.clear()
    with pytest.raises(kvwire.MessageTooLarge, match="receiver has no memory"):
        await sending
    await sending.released()
    asked = pair.right.recv(1)
    await asyncio.gather(pair.left.send(1, bytes(MIB)), asked)
    assert asked.result() == bytes(MIB)
    assert not len(inside.buffers(pair.far))
