"""Chunks: each of them once, wherever it comes from; memory is held exactly so long."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ConnectionLost, MalformedFrame, UnexpectedFrame
from kvwire.proto.chunks import LINK_CHUNKS_MAX
from kvwire.proto.records import ChunkPlace
from kvwire.proto.state import RequestKind, RequestStage
from kvwire.wire.header import FrameType, decode_header
from tests.proto.flowing import CHUNK, Side, data, pieces

# --- sending


@given(st.integers(1, 95), st.integers(0, 50))
def test_a_request_is_cut_into_chunks(nbytes: int, base: int) -> None:
    """Each byte once; position in the request, offset in the buffer."""
    side = Side()
    request = side.put(nbytes, base)
    chunks = []
    while (chunk := side.chunks.next_chunk()) is not None:
        assert chunk.buffer == request.buffer
        assert (chunk.request, chunk.number) == (request, 0)
        assert chunk.offset == base + chunk.position
        chunks.append(chunk)
    assert [(c.position, c.length) for c in chunks] == pieces(nbytes)
    assert not side.chunks.sending
    for chunk in chunks:
        assert request.state is RequestStage.MOVING
        side.chunks.chunk_sent(chunk)
    assert request.state is RequestStage.WAITING


def test_what_is_due_is_the_rest_of_what_has_its_turn() -> None:
    side = Side()
    assert side.chunks.due_bytes == 0
    side.put(25)
    assert side.chunks.due_bytes == 25
    chunk = side.chunk()
    assert side.chunks.due_bytes == 25 - CHUNK
    side.chunks.chunk_missed(chunk)
    assert side.chunks.due_bytes == CHUNK


def test_a_link_that_reports_nothing_gets_no_more() -> None:
    """And goes on with the first chunk that it has sent."""
    side = Side()
    side.put((LINK_CHUNKS_MAX + 1) * CHUNK)
    leaving = [side.chunks.next_chunk() for _ in range(LINK_CHUNKS_MAX)]
    assert None not in leaving
    sending = [side.chunks.sending]
    assert side.chunks.next_chunk() is None
    assert leaving[7] is not None
    side.chunks.chunk_sent(leaving[7])
    sending.append(side.chunks.sending)
    assert sending == [False, True]
    assert side.chunks.next_chunk() is not None


# --- chunks on lanes that break


@pytest.mark.parametrize("room", [30, 40])
def test_a_span_that_was_lost_goes_as_chunks(room: int) -> None:
    """What carries it now may take no more at once; the last ends where it ended."""
    side = Side()
    request = side.put(35)
    burst = side.chunks.next_chunk(lambda buffer: room)
    assert burst is not None
    side.chunks.chunk_missed(burst)
    again = [side.chunk() for _ in range(4)]
    assert [(c.position, c.length) for c in again] == pieces(35)
    assert request.in_flight == 4
    for chunk in again:
        side.chunks.chunk_sent(chunk)
    assert request.state is RequestStage.WAITING


def test_what_is_too_short_for_a_lane_is_cut_into_chunks() -> None:
    side = Side()
    side.put(35)
    whole = side.chunks.next_chunk(lambda buffer: 20, 20)
    rest = side.chunks.next_chunk(lambda buffer: 20, 20)
    assert [c and c.length for c in (whole, rest)] == [20, 10]


def test_a_lost_span_of_a_request_that_is_over_is_not_sent() -> None:
    """Its memory is given back instead."""
    side = Side()
    request = side.put(35)
    burst = side.chunks.next_chunk(lambda buffer: 30)
    assert burst is not None
    side.requests.fail(request, ConnectionLost("x"), code=None)
    side.chunks.chunk_missed(burst)
    assert side.chunks.next_chunk() is None
    assert side.holds.drained == [request.buffer]
    assert request.in_flight == 0


def test_a_lost_chunk_of_a_request_that_is_over_does_not_stop_the_next() -> None:
    side = Side()
    over, lives = side.put(5), side.put(5)
    for chunk in [side.chunk(), side.chunk()]:
        side.chunks.chunk_missed(chunk)
    side.requests.fail(over, ConnectionLost("x"), code=None)
    assert side.chunk().request is lives
    assert side.holds.drained == [over.buffer]


def test_a_span_arrives_as_its_chunks() -> None:
    for offset, length in [(0, 20), (10, 25), (30, 5), (0, 35)]:
        side = Side()
        request = side.get(35)
        burst = msgspec.structs.replace(
            data(request.wire_id, offset, length), type=FrameType.LANE_DATA
        )
        arrival = side.chunks.data_header(burst)
        assert list(side.chunks.numbers(arrival)) == list(
            range(offset // CHUNK, -(-(offset + length) // CHUNK))
        )
        with pytest.raises(UnexpectedFrame, match="came twice"):
            side.chunks.data_header(data(request.wire_id, offset, min(CHUNK, length)))
        side.chunks.missed(arrival)
        assert side.chunks.data_header(burst).length == length


def test_what_is_no_span_is_refused() -> None:
    for kind, offset, length in [
        (FrameType.DATA, 0, 20),
        (FrameType.LANE_DATA, 5, 10),
        (FrameType.LANE_DATA, 0, 15),
        (FrameType.LANE_DATA, 0, 40),
        (FrameType.LANE_DATA, 40, 10),
    ]:
        side = Side()
        request = side.get(35)
        header = msgspec.structs.replace(
            data(request.wire_id, offset, length), type=kind
        )
        with pytest.raises(MalformedFrame, match="KVW-DT-02"):
            side.chunks.data_header(header)


def test_a_lost_arrival_of_a_segment_may_come_again() -> None:
    """Its chunk counts as one that has not come."""
    side = Side()
    segment = side.segment(25, priority=0)
    segment.arrived = bytearray([1, 1, 1])
    assert segment.buffer is not None
    arrival = side.chunks.land(data(1, 10, 10), segment.buffer, 10, segment=segment)
    side.chunks.missed(arrival)
    assert list(segment.arrived) == [1, 0, 1]


# --- receiving


@pytest.mark.rule("KVW-DT-01", "KVW-DT-02", "KVW-DT-03", "KVW-DT-04", "keeps")
def test_chunks_in_any_order() -> None:
    """Each lands at its own place, and the last one ends it."""
    for nbytes in [1, 9, 10, 11, 20, 95]:
        for kind in [RequestKind.GET, RequestKind.SERVE_PUT]:
            side = Side()
            request = side.get(nbytes, base=100, kind=kind)
            order = pieces(nbytes)
            random.Random(nbytes).shuffle(order)
            for offset, length in order:
                assert side.done() == []
                arrival = side.chunks.data_header(data(request.wire_id, offset, length))
                assert (arrival.place, arrival.buffer) == (
                    ChunkPlace.BUFFER,
                    request.buffer,
                )
                assert (arrival.offset, arrival.length) == (100 + offset, length)
                side.chunks.data_landed(arrival, intact=True)
            (done,) = side.done()
            assert (done.error, done.nbytes) == (None, nbytes)
            said = [decode_header(header).type for header, _ in side.outbox.frames]
            assert said == ([FrameType.FIN] if kind is RequestKind.SERVE_PUT else [])
            # A region's memory is not the request's to give back.
            drained = [] if kind is RequestKind.SERVE_PUT else [request.buffer]
            assert side.holds.drained == drained


@pytest.mark.rule("KVW-DT-01", "breaks")
def test_payload_for_what_does_not_receive() -> None:
    """A put of ours, and a receive that has no memory yet."""
    side = Side()
    put, receive = side.put(5), side.request(RequestKind.RECV, 5)
    side.requests.match(receive, side.requests.admit(2))
    for request in (put, receive):
        with pytest.raises(UnexpectedFrame, match=request.state.value) as caught:
            side.chunks.data_header(data(request.wire_id, 0, 5))
        assert caught.value.rule == "KVW-DT-01"


# --- the end


def test_a_link_that_is_gone_holds_nothing() -> None:
    """What left, what landed, and what waited for its turn."""
    side = Side()
    put, get, waiting = side.put(25), side.get(25), side.put(25)
    leaving = side.chunk()
    side.chunks.data_header(data(get.wire_id, 0, 10))
    for request in (put, get, waiting):
        side.requests.fail(request, ConnectionLost("x"), code=None)
    assert side.holds.drained == [waiting.buffer]
    side.chunks.link_gone()
    assert set(side.holds.drained) == {put.buffer, get.buffer, waiting.buffer}
    assert leaving.mover.in_flight == 0
    assert not side.chunks.sending
    assert not side.chunks._scheduler.count
    assert len(side.holds) == 0
    side.chunks.link_gone()
