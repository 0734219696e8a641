"""One regression test for each known trap of bulk data over sockets in Python.

Their numbers are those of the project's list of traps; what each is, the tests say.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from kvwire.limits import HEADER_BYTES, MIB, WAKEUP_BYTES
from kvwire_tcp.options import tune
from tests.backends.kvwire_tcp.recorder import (
    against_a_socket,
    header,
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
