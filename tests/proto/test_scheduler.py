"""Turns: as many bytes for each, new ones first, nobody starves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ConnectionLost
from kvwire.limits import REQUESTS_MAX
from kvwire.proto.records import RequestRecord
from kvwire.proto.scheduler import Mover, Scheduler
from kvwire.proto.state import RequestStage
from tests.proto.flowing import CHUNK, Side


@pytest.fixture
def side() -> Side:
    return new_side()


def new_side() -> Side:
    side = Side()
    side.chunks.on_segment_sent = lambda segment: None
    return side


def send(side: Side, piece: int = CHUNK) -> Mover:
    """Let whose turn it is send one piece; returns whose it was."""
    chunk = side.chunks.next_chunk(lambda buffer: piece)
    assert chunk is not None
    side.chunks.chunk_sent(chunk)
    return chunk.mover


def turns_of(side: Side) -> Scheduler:
    return side.chunks._scheduler


def queued(turns: Scheduler) -> int:
    return sum(len(level.new) + len(level.old) for level in turns._levels)


# --- who is next


def test_a_higher_priority_goes_first(side: Side) -> None:
    """And the lower one goes on when there is nothing else."""
    low = side.segment(25, priority=1)
    assert send(side) is low
    high, plain = side.segment(15, priority=200), side.put(5)
    order = [send(side) for _ in range(5)]
    assert order == [high, high, low, low, plain]
    assert side.chunks.next_chunk() is None


def test_who_is_new_waits_for_nobody_who_is_not(side: Side) -> None:
    """However many there are, and however long they go on."""
    for _ in range(8):
        side.put(1000)
    for _ in range(20):
        send(side)
    short = side.put(CHUNK)
    assert send(side) is short


def test_between_two_new_ones_an_old_one_has_its_turn(side: Side) -> None:
    """So that short ones without end cannot stop the long ones."""
    long = [side.put(1000), side.put(1000)]
    assert [send(side) for _ in range(3)] == [*long, long[0]]
    short = [side.put(5) for _ in range(4)]
    order = [send(side) for _ in range(7)]
    assert order[::2] == short
    assert order[1::2] == [long[1], long[0], long[1]]


# --- transfers


def test_a_transfer_has_one_turn_however_many_its_segments(side: Side) -> None:
    """They go in the order of their marks; a turn is so many bytes of any of them."""
    first = side.segment(15, priority=0, number=1)
    second = side.segment_of(first.request, 5, 2)
    short = side.put(15)
    third = side.segment_of(first.request, 5, 3)
    order = [send(side) for _ in range(6)]
    assert order == [first, short, first, second, short, third]
    assert not side.chunks.sending
    fourth = side.segment_of(first.request, 5, 4)
    assert send(side) is fourth


def test_a_layer_that_comes_later_is_new_again(side: Side) -> None:
    """Somebody waits for it, and its transfer has not held up anybody meanwhile."""
    for _ in range(4):
        side.put(1000)
    layer = side.segment(5, priority=0)
    while send(side) is not layer:
        pass
    for number in range(2, 9):
        send(side)
        layer = side.segment_of(layer.request, 5, number)
        assert send(side) is layer


def test_segments_of_a_transfer_that_is_over_leave_together(side: Side) -> None:
    """Whether their turn comes, or so many have piled up that they are looked for."""
    turns = turns_of(side)
    for piled in (False, True):
        first = side.segment(5, priority=0)
        side.segment_of(first.request, 5, 2)
        side.requests.fail(first.request, ConnectionLost("x"), code=None)
        if piled:
            turns._count_max = 1
            side.put(5)
            assert not turns._segments
            send(side)
        assert side.chunks.next_chunk() is None
        assert not turns._segments


# --- fairness


@given(st.lists(st.sampled_from([1, 2, 3, 7, 40]), min_size=2, max_size=9))
def test_everybody_sends_as_many_bytes(pieces: list[int]) -> None:
    """Whatever a lane takes of each at once: nobody gains more than that on another."""
    side = new_side()
    requests = {side.put(100_000): CHUNK * count for count in pieces}
    by_buffer = {r.buffer: nbytes for r, nbytes in requests.items()}
    before = dict.fromkeys(requests, 0)
    for number in range(250):
        if number == 50:  # each of them has begun
            before = {request: request.moved for request in requests}
        chunk = side.chunks.next_chunk(lambda buffer: by_buffer[buffer])
        assert chunk is not None
        side.chunks.chunk_sent(chunk)
    gained = [request.moved - before[request] for request in requests]
    assert max(gained) - min(gained) <= 2 * max(requests.values()) + CHUNK


@given(st.integers(0, 2**32))
def test_everything_is_sent_once(seed: int) -> None:
    """By any mixture of requests, transfers, priorities, pieces and ends."""
    chance, side = random.Random(seed), new_side()
    turns, movers = turns_of(side), list[Mover]()
    for _ in range(60):
        if chance.random() < 0.4:
            movers += begin(side, chance)
        elif movers and chance.random() < 0.2:
            request = request_of(chance.choice(movers))
            if not request.over:
                side.requests.fail(request, ConnectionLost("x"), code=None)
        elif side.chunks.sending:
            chunk = side.chunks.next_chunk(lambda buffer: chance.randrange(60))
            if chunk is not None:
                side.chunks.chunk_sent(chunk)
        assert turns.count == queued(turns)
    while (chunk := side.chunks.next_chunk()) is not None:
        side.chunks.chunk_sent(chunk)
    for mover in movers:
        cut_short = request_of(mover).state is RequestStage.FAILED
        assert cut_short or mover.moved == mover.nbytes
    assert (turns.count, len(turns._segments)) == (0, 0)


def begin(side: Side, chance: random.Random) -> list[Mover]:
    """A request, or a transfer of some segments."""
    nbytes = chance.randrange(1, 90)
    if chance.random() < 0.5:
        return [side.put(nbytes)]
    priority = chance.randrange(3)
    first = side.segment(nbytes, priority)
    others = range(2, chance.randrange(2, 6))
    return [first, *(side.segment_of(first.request, 7, n, priority) for n in others)]


def request_of(mover: Mover) -> RequestRecord:
    return mover if isinstance(mover, RequestRecord) else mover.request


# --- bounds


def test_asking_and_cancelling_without_end(side: Side) -> None:
    """While the link takes nothing, requests that are over do not pile up."""
    kept = [side.put(5), side.segment(5, priority=9)]
    for _ in range(3 * REQUESTS_MAX):
        request = side.put(5)
        side.requests.fail(request, ConnectionLost("x"), code=None)
        side.done()
        assert queued(turns_of(side)) <= REQUESTS_MAX
    assert [send(side), send(side)] == kept[::-1]


def test_many_that_are_alive_are_not_looked_through_for_each_that_comes(
    monkeypatch: pytest.MonkeyPatch, side: Side
) -> None:
    """A peer may have more open than are looked through at once."""
    looked: list[int] = []
    drop_dead = Scheduler._drop_dead

    def counted(turns: Scheduler) -> None:
        looked.append(turns.count)
        drop_dead(turns)

    monkeypatch.setattr(Scheduler, "_drop_dead", counted)
    for count in range(1, REQUESTS_MAX + 1):
        side.chunks.begin_send(side.served(2 * count))
    for _ in range(2 * REQUESTS_MAX):
        request = side.put(5)
        side.requests.fail(request, ConnectionLost("x"), code=None)
        side.done()
    assert sum(looked) <= 4 * REQUESTS_MAX


def test_nobody_sends_after_the_end(side: Side) -> None:
    """What waited for its turn is forgotten, and so is what waited behind it."""
    first = side.segment(5, priority=3)
    side.segment_of(first.request, 5, 2)
    turns_of(side).clear()
    assert turns_of(side).head() is None
    assert (turns_of(side).count, len(turns_of(side)._segments)) == (0, 0)
