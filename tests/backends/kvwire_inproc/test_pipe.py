"""One direction of a link within a process: order, counts, and whose memory it is."""

from __future__ import annotations

from threading import RLock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ConnectionLost
from kvwire.limits import HEADER_BYTES
from kvwire.memory.copy import as_fragments
from kvwire_inproc.pipe import InprocPipe, PipeEnd, PipeFrame

HEADER = bytes(HEADER_BYTES)
PAYLOAD = bytes(range(200))


def frame(length: int = 0, token: object = None) -> PipeFrame:
    return PipeFrame(HEADER, memoryview(PAYLOAD)[:length] if length else None, token)


@pytest.fixture
def way() -> InprocPipe:
    return InprocPipe(RLock())


def take(
    way: InprocPipe, into: memoryview | None = None, piece_bytes: int = 1 << 20
) -> PipeFrame:
    """Deliver the head whole."""
    head = way.head()
    assert head is not None
    while head.moved < head.payload_bytes:
        assert way.move(head, into, piece_bytes)
    way.done(head)
    return head


def test_frames_come_in_order_and_each_stays_first_until_it_is_done(
    way: InprocPipe,
) -> None:
    frames = [frame(10), frame(), frame(200)]
    way.put(frames[:2])
    way.put(frames[2:])
    assert way.head() is way.head() is frames[0]
    assert [take(way) for _ in frames] == frames
    assert way.head() is None
    assert way.drained


def test_a_payload_of_nothing_is_no_payload() -> None:
    empty = PipeFrame(HEADER, memoryview(b""), None)
    assert empty.payload is None
    assert empty.nbytes == HEADER_BYTES


@given(
    lengths=st.lists(st.integers(0, len(PAYLOAD)), min_size=1, max_size=8),
    piece_bytes=st.integers(1, len(PAYLOAD) + 1),
    cut=st.booleans(),
)
def test_every_byte_arrives_once_and_is_queued_until_then(
    lengths: list[int], piece_bytes: int, cut: bool
) -> None:
    """However it is cut; ``queued_bytes`` falls with each piece, and ends at 0."""
    way = InprocPipe(RLock())
    way.put([frame(length) for length in lengths])
    queued_bytes = sum(lengths) + HEADER_BYTES * len(lengths)
    for length in lengths:
        assert way.queued_bytes == queued_bytes
        into = memoryview(bytearray(length))
        head = way.head()
        assert head is not None
        landing = as_fragments(into) if cut and length else into
        while head.moved < length:
            moved = way.move(head, landing, piece_bytes)
            assert 0 < moved <= piece_bytes
            queued_bytes -= moved
            assert way.queued_bytes == queued_bytes
        way.done(head)
        queued_bytes -= HEADER_BYTES
        assert into == PAYLOAD[:length]
    assert way.queued_bytes == 0


def test_what_is_dropped_counts_as_delivered(way: InprocPipe) -> None:
    way.put([frame(200, "token")])
    take(way, into=None)
    assert way.queued_bytes == 0
    assert way.take_sent() == ["token"]


def test_a_token_comes_back_once_and_only_when_its_frame_is_done(
    way: InprocPipe,
) -> None:
    way.put([frame(100, "first"), frame(0), frame(100, "second")])
    head = way.head()
    assert head is not None
    way.move(head, None, 100)
    assert way.take_sent() == []
    way.done(head)
    assert way.take_sent() == ["first"]
    take(way)
    take(way)
    assert way.take_sent() == ["second"]
    assert way.take_sent() == []


def test_a_clean_end_waits_for_what_was_sent_before(way: InprocPipe) -> None:
    way.put([frame(100)])
    way.finish()
    assert way.outcome() is None
    take(way)
    assert way.outcome() == PipeEnd(None)


def test_after_an_end_the_sender_s_memory_is_not_read(way: InprocPipe) -> None:
    """Even by a receiver that is in the middle of a payload, and has it in hand."""
    way.put([frame(200, "token"), frame(10)])
    head = way.head()
    assert head is not None
    into = memoryview(bytearray(200))
    way.move(head, into, 50)
    error = ConnectionLost("aborted")
    way.end(error)
    assert way.move(head, into, 150) == 0
    assert bytes(into[50:]) == bytes(150)
    way.done(head)
    assert way.take_sent() == []
    assert way.head() is None
    assert way.queued_bytes == 0
    assert way.outcome() == PipeEnd(error)


def test_the_first_end_counts_and_nothing_follows_it(way: InprocPipe) -> None:
    error = ConnectionLost("aborted")
    way.end(error)
    way.end(None)
    way.put([frame(10)])
    way.finish()
    assert way.outcome() == PipeEnd(error)
    assert way.drained


def test_a_receiver_that_is_gone_takes_nothing_more(way: InprocPipe) -> None:
    way.put([frame(10, "token")])
    way.retire()
    way.put([frame(20)])
    assert way.drained
    assert way.queued_bytes == 0
    assert way.take_sent() == []
    way.finish()
    assert way.outcome() == PipeEnd(None)
