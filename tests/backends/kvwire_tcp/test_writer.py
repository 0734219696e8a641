"""The send queue: any frames, any short writes, the same bytes and the right tokens."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.backend import Payload
from kvwire.errors import UsageError
from kvwire.limits import HEADER_BYTES, WAKEUP_BYTES
from kvwire_tcp.wire import PlainWire
from kvwire_tcp.writer import JOINED_BYTES_MAX, VIEWS_MAX, SendQueue
from tests.backends.kvwire_tcp.recorder import gathered, header, pieces_of

LENGTHS = st.one_of(
    st.integers(0, 20), st.integers(JOINED_BYTES_MAX - 2, JOINED_BYTES_MAX + 40)
)
FRAMES = st.lists(st.tuples(LENGTHS, st.booleans(), st.booleans()), max_size=12)


class Sender:
    """A queue before a socket pair, whose small buffer makes most writes short."""

    def __init__(self, buffer_bytes: int = 4096) -> None:
        self.queue = SendQueue()
        self.sock, self.peer = socket.socketpair()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.sock.setblocking(False)
        self.wire = PlainWire(self.sock)
        self.peer.setblocking(False)
        self.queued = b""
        self.received = b""
        self.borders: dict[object, int] = {}
        self.tokens: list[object] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self.peer.close()

    def push(self, length: int, *, as_pieces: bool, lent: bool) -> bytearray:
        arena = bytearray(os.urandom(2 * length))
        payload: Payload = memoryview(arena)[:length]
        body = bytes(arena[:length])
        if as_pieces:
            payload, body = pieces_of(arena, length), gathered(arena, length)
        token = len(self.queued) if lent else None
        head = header(length, len(self.queued))
        self.queue.push(head, payload, token)
        self.queued += head + body
        if lent:
            self.borders[token] = len(self.queued)
        assert self.queue.nbytes == len(self.queued) - self.queue.sent_bytes
        return arena

    def transmit(self) -> None:
        """One system call, after which the tokens are checked."""
        try:
            count = self.queue.transmit(self.wire)
        except BlockingIOError:
            self.received += self.peer.recv(1 << 20)
            return
        self.tokens += self.queue.taken(count)
        sent = self.queue.sent_bytes
        assert self.queue.nbytes == len(self.queued) - sent
        assert self.tokens == [t for t, end in self.borders.items() if end <= sent]

    def drain(self) -> None:
        while self.queue.nbytes:
            self.transmit()
        while len(self.received) < len(self.queued):
            self.received += self.peer.recv(1 << 20)


@given(FRAMES, st.integers(0, 8))
def test_any_frames_and_short_writes_give_the_same_bytes(
    frames: list[tuple[int, bool, bool]], early: int
) -> None:
    with Sender() as sender:
        for length, as_pieces, lent in frames:
            sender.push(length, as_pieces=as_pieces, lent=lent)
            for _ in range(early):
                if sender.queue.nbytes:
                    sender.transmit()
        sender.drain()
        assert sender.received == sender.queued
        assert sender.tokens == list(sender.borders)


def test_one_call_takes_many_frames_but_not_all_of_too_many() -> None:
    with Sender(1 << 20) as sender:
        for _ in range(2 * VIEWS_MAX + 1):
            sender.push(0, as_pieces=False, lent=False)
        for views in (VIEWS_MAX, VIEWS_MAX, 1):
            count = sender.queue.transmit(sender.wire)
            assert count == views * HEADER_BYTES
            sender.queue.taken(count)


def test_one_call_offers_no_more_than_a_wakeup_may_move() -> None:
    queue = SendQueue()
    queue.push(header(WAKEUP_BYTES), memoryview(bytes(WAKEUP_BYTES)), 1)
    queue.push(header(0), None, None)
    offered: list[int] = []

    class Greedy:
        def sendmsg(self, views: list[bytes | memoryview]) -> int:
            offered.append(sum(len(view) for view in views))
            return offered[-1]

    while queue.nbytes > HEADER_BYTES:
        queue.taken(queue.transmit(Greedy()))  # type: ignore[arg-type]
    assert offered == [WAKEUP_BYTES, 2 * HEADER_BYTES]


@pytest.mark.parametrize(
    "view",
    [
        lambda data: data.cast("i"),
        lambda data: data.cast("B", (2, len(data) // 2)),
        lambda data: data[::2],
        lambda data: data.cast("b"),
    ],
    ids=["int32", "2-D", "strided", "signed"],
)
def test_a_large_view_of_anything_but_bytes_is_refused(
    view: Callable[[memoryview], memoryview],
) -> None:
    queue = SendQueue()
    data = memoryview(bytes(4 * JOINED_BYTES_MAX))
    with pytest.raises(UsageError, match="1-D contiguous view of bytes"):
        queue.push(header(0), view(data), "token")
    assert queue.nbytes == 0
