"""The splitter: the same frames for every segmentation of the same bytes."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.backend import Landing, Link
from kvwire.limits import HEADER_BYTES, KIB
from kvwire.memory.buffers import MID_PAGE_BYTES
from kvwire.memory.copy import address_of
from kvwire_tcp.link import TcpLink
from kvwire_tcp.reader import SCRATCH_BYTES, FrameReader
from kvwire_tcp.wire import PlainWire
from tests.backends.kvwire_tcp.recorder import (
    BRING,
    DROP,
    PIECES,
    VIEW,
    Recorder,
    header,
)

Frame = tuple[int, bytes]
KINDS = (VIEW, PIECES, DROP, BRING)
NO_LINK = TcpLink.__new__(TcpLink)  # only passed on


def transcript(frames: list[Frame]) -> bytes:
    """The bytes of frames; a frame is how its payload is taken, and its payload."""
    return b"".join(
        header(len(body), number, kind) + body
        for number, (kind, body) in enumerate(frames)
    )


def expected(frames: list[Frame]) -> list[tuple[int, bytes | None]]:
    return [
        (n, None if kind == DROP or (kind == BRING and not body) else body)
        for n, (kind, body) in enumerate(frames)
    ]


class Wire:
    """A reader at the end of a socket pair, which gets one segment at a time."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.reader = FrameReader(NO_LINK, self.recorder)
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)
        self._wire = PlainWire(self._far)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._near.close()
        self._far.close()

    def pass_on(self, segment: bytes) -> None:
        """Let the reader receive this, by as many calls as it takes."""
        self._near.sendall(segment)
        left = len(segment)
        while left:
            count = self.reader.receive(self._wire)
            left -= count
            self.reader.deliver(count)
            if self.reader.stopped:
                return
        with pytest.raises(BlockingIOError):
            self.reader.receive(self._wire)


# Every kind, empty payloads first, last and in a row, and a payload across a header.
SMALL: list[Frame] = [
    (VIEW, b""),
    (VIEW, b"abc"),
    (DROP, b""),
    (PIECES, b""),
    (DROP, b"defgh"),
    (PIECES, b"0123456789"),
    (VIEW, b"ij"),
    (DROP, b""),
]


LENGTHS = st.one_of(
    st.just(0),
    st.integers(1, 40),
    st.integers(SCRATCH_BYTES - 2 * HEADER_BYTES, SCRATCH_BYTES + HEADER_BYTES),
    st.integers(1, 3 * SCRATCH_BYTES),
)


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), LENGTHS), min_size=1, max_size=12),
    st.lists(st.floats(0, 1), max_size=6),
)
def test_random_frames_in_random_segments(
    shapes: list[tuple[int, int]], cuts: list[float]
) -> None:
    frames = [(kind, os.urandom(length)) for kind, length in shapes]
    whole = transcript(frames)
    places = sorted(int(cut * len(whole)) for cut in cuts)
    with Wire() as wire:
        for begin, end in itertools.pairwise([0, *places, len(whole)]):
            wire.pass_on(whole[begin:end])
        assert wire.recorder.frames == expected(frames)
        # Nothing that was handed over has changed since.
        held = [(one.number, one.content) for one in wire.recorder.landings]
        assert held == expected(frames)


def test_a_burst_of_small_frames_takes_one_system_call() -> None:
    count = SCRATCH_BYTES // (HEADER_BYTES + 64)
    near, far = socket.socketpair()
    with near, far:
        recorder = Recorder()
        reader = FrameReader(NO_LINK, recorder)
        near.sendall(transcript([(VIEW, bytes(64))] * count))
        reader.deliver(reader.receive(PlainWire(far)))
    assert len(recorder.frames) == count
    assert reader.drained


def test_after_a_large_payload_the_next_one_is_received_in_place() -> None:
    """The next header comes with the call that ends the payload; nothing more does."""
    sizes = [SCRATCH_BYTES + 1, 3 * SCRATCH_BYTES]
    near, far = socket.socketpair()
    with near, far:
        recorder = Recorder()
        reader = FrameReader(NO_LINK, recorder)
        near.sendall(transcript([(VIEW, bytes(size)) for size in sizes]))
        reader.deliver(reader.receive(PlainWire(far)))
        assert recorder.headers == 1
        reader.deliver(reader.receive(PlainWire(far)))
        assert recorder.headers == 2
        assert reader.position == f"0 of {sizes[1]} payload bytes"
        assert reader.receive(PlainWire(far)) == sizes[1]


def test_after_a_payload_of_any_place_the_next_one_comes_with_its_header() -> None:
    near, far = socket.socketpair()
    with near, far:
        recorder = Recorder()
        reader = FrameReader(NO_LINK, recorder)
        wire = PlainWire(far)
        frames = [(BRING, os.urandom(size)) for size in (64 * KIB, 65 * KIB, 64 * KIB)]
        for number, calls in ((0, 2), (1, 1), (2, 1)):
            near.sendall(transcript(frames[number : number + 1]))
            for _ in range(calls):
                assert len(recorder.frames) == number
                reader.deliver(reader.receive(wire))
            assert reader.drained
    assert [body for _, body in recorder.frames] == [body for _, body in frames]


def test_payloads_smaller_than_one_before_are_handed_over_in_place_again() -> None:
    """The first is copied; the others are behind their headers, in smaller memory."""
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 * KIB)
        recorder = Recorder()
        reader = FrameReader(NO_LINK, recorder)
        wire = PlainWire(far)
        for size in (128 * KIB, 32 * KIB, 32 * KIB, 32 * KIB):
            near.sendall(transcript([(BRING, bytes(size))]))
            reader.drained = False
            while not reader.drained:
                reader.deliver(reader.receive(wire))
    payloads: list[Any] = [one.payload for one in recorder.landings]
    places = [address_of(one) % MID_PAGE_BYTES for one in payloads]
    assert places == [0, 0, HEADER_BYTES, HEADER_BYTES]


def test_payloads_of_any_place_keep_at_most_twice_their_bytes_alive() -> None:
    """Small ones arrive in memory for a large one; a peer's window counts their bytes.

    Without this, 64 of them would each keep what was left of that memory.
    """
    small = 5 * KIB
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 * KIB)
        recorder = Recorder()
        reader = FrameReader(NO_LINK, recorder)
        wire = PlainWire(far)
        for sizes in ([64 * KIB], [small] * 8):
            near.sendall(transcript([(BRING, bytes(size)) for size in sizes]))
            reader.drained = False
            while not reader.drained:
                reader.deliver(reader.receive(wire))
        payloads: list[Any] = [one.payload for one in recorder.landings]
        memory = {id(one.obj.base): one.obj.base for one in payloads}
    assert len(payloads) == 9
    page_bytes = 4 * KIB
    assert sum(one.nbytes for one in memory.values()) <= sum(
        2 * one.nbytes + page_bytes for one in payloads
    )


def test_position_says_where_the_stream_stands() -> None:
    with Wire() as wire:
        assert wire.reader.position == ""
        wire.pass_on(header(9)[:5])
        assert wire.reader.position == "5 of 32 header bytes"
        wire.pass_on(header(9)[5:])
        assert wire.reader.position == "0 of 9 payload bytes"
        wire.pass_on(b"1234")
        assert wire.reader.position == "4 of 9 payload bytes"
        wire.pass_on(b"56789")
        assert wire.reader.position == ""


@pytest.mark.parametrize("first", [b"abc", bytes(2 * SCRATCH_BYTES)])
@pytest.mark.parametrize("callback", ["header_received", "body_received"])
def test_nothing_is_delivered_after_a_callback_stopped_the_reader(
    callback: str, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Wire() as wire:
        told = getattr(wire.recorder, callback)

        def stop(link: Link, argument: memoryview | Landing) -> object:
            wire.reader.stop()
            return told(link, argument)

        monkeypatch.setattr(wire.recorder, callback, stop)
        wire.pass_on(transcript([(VIEW, first), *SMALL]))
        assert wire.recorder.headers == 1
        assert len(wire.recorder.frames) == (callback == "body_received")
