"""One regression test for each known trap of bulk data over sockets in Python.

Their numbers are those of the project's list of traps; what each is, the tests say.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from kvwire.errors import ConnectionLost, UsageError
from kvwire.limits import HEADER_BYTES, KIB, MIB, WAKEUP_BYTES
from kvwire_tcp.options import tune
from kvwire_tcp.reader import SCRATCH_BYTES
from tests.backends.kvwire_tcp.recorder import (
    DROP,
    PIECES,
    VIEW,
    against_a_socket,
    header,
    linked,
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
async def test_trap_31_a_huge_send_is_not_copied_and_does_not_block() -> None:
    """asyncio's transports of CPython 3.11 copy what they cannot send: 0.7 s here."""
    async with against_a_socket() as (link, recorder, _):
        body = np.zeros(256 * MIB, np.uint8).data
        before = resident_bytes()
        link.send(header(len(body)), body, "bulk")
        link.flush()
        queued = link.queued_bytes
        # One wake-up's bytes and no more: a loop blocked for about a millisecond.
        assert HEADER_BYTES + len(body) - queued <= 2 * WAKEUP_BYTES
        while link._waiting and link.queued_bytes > 240 * MIB:
            link._on_writable()
            if link.queued_bytes == queued:
                break
            queued = link.queued_bytes
        assert link.queued_bytes >= 200 * MIB, "the peer never reads"
        assert resident_bytes() - before < 32 * MIB
        assert recorder.sent == []


@pytest.mark.parametrize("kind", [VIEW, PIECES, DROP])
async def test_trap_32_empty_payloads_at_every_position(kind: int) -> None:
    """A buffer of 0 bytes, given to a loop or to recv, looks like the end of file."""
    lengths = (0, 0, 5, SCRATCH_BYTES + 1)
    orders = sorted(set(itertools.permutations(lengths)))
    async with linked() as pair:
        expected: list[tuple[int, bytes | None]] = []
        for order in orders:
            for length in order:
                body, number = os.urandom(length), len(expected)
                expected.append((number, None if kind == DROP else body))
                pair.near.send(header(length, number, kind), memoryview(body), number)
            pair.near.flush()
        await pair.at_far.received(len(expected))
        assert pair.at_far.frames == expected
        pair.near.close()
        assert await pair.at_far.end() is None


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.complex128, np.int8])
async def test_trap_33_views_of_other_formats_are_never_truncated(
    dtype: type[np.generic],
) -> None:
    """sock_sendall compares bytes with len(view): uvloop truncates, asyncio hangs."""
    async with linked() as pair:
        values = np.arange(300 * KIB).astype(np.uint8).view(dtype)
        with pytest.raises(UsageError, match="cast"):
            pair.near.send(header(values.nbytes, 1), values.data, "token")
        assert pair.near.queued_bytes == 0
        pair.near.send(header(values.nbytes, 2), values.data.cast("B"), "token")
        few = values[: 64 // values.itemsize]
        pair.near.send(header(few.nbytes, 3), few.data)
        pair.near.flush()
        await pair.at_far.received(2)
        assert pair.at_far.frames == [(2, values.tobytes()), (3, few.tobytes())]


async def test_trap_34_a_frame_cut_by_abort_is_an_error_and_never_a_frame() -> None:
    """What follows a frame that was given up half-way is read as the rest of it."""
    async with linked() as pair:
        for number in range(3):
            body = memoryview(bytes(8 * MIB))
            pair.near.send(header(len(body), number), body, number)
        pair.near.flush()
        assert pair.near.queued_bytes
        pair.near.abort()
        error = await pair.at_far.end()
        assert isinstance(error, ConnectionLost)
        assert len(pair.at_far.frames) < 3
        assert all(content == bytes(8 * MIB) for _, content in pair.at_far.frames)


async def test_trap_34_a_frame_cut_by_close_is_sent_to_its_end() -> None:
    async with linked() as pair:
        body = memoryview(os.urandom(24 * MIB))
        pair.near.send(header(len(body), 1), body, "bulk")
        pair.near.flush()
        assert pair.near.queued_bytes
        pair.near.close()
        assert await pair.at_far.end() is None
        assert pair.at_far.frames == [(1, bytes(body))]


async def test_trap_35_buffer_sizes_are_left_to_the_kernel() -> None:
    """Setting SO_RCVBUF switches autotuning off, at less than it would reach."""
    options: list[tuple[int, ...]] = []

    class Noting(socket.socket):
        def setsockopt(self, *args: int) -> None:  # type: ignore[override]
            options.append(args)
            super().setsockopt(*args)

    with Noting(socket.AF_INET, socket.SOCK_STREAM) as noting:
        tune(noting, "127.0.0.1")
    names = {option[:2] for option in options}
    assert (socket.IPPROTO_TCP, socket.TCP_NODELAY) in names
    for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        assert (socket.SOL_SOCKET, name) not in names
    async with against_a_socket() as (link, _, peer):
        for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            ours = link._sock.getsockopt(socket.SOL_SOCKET, name)
            assert ours >= peer.getsockopt(socket.SOL_SOCKET, name) // 2


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
