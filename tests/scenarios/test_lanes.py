"""Transfers over several sockets: one of them breaks, stalls, or is slow.

The control link lives on, so none of this is a lost connection: what a lane has not
brought comes another way, once, and memory is free when the lane is quiet.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

import kvwire
from kvwire.aio import Upkeep
from kvwire.limits import KIB
from kvwire_tcp.lane import LaneSocket
from kvwire_tcp.options import reset_on_close
from tests.scenarios.world import World, held, world
from tests.support import inside
from tests.support.caches import LARGE, Memory, same
from tests.support.pairs import until
from tests.support.proxy import Direction, Latency, Proxy, Slice

LANES = 3
# 32 MiB in 512 chunks: no lane is through before another has begun.
BLOCKS = range(8)
CHUNK = 64 * KIB


@pytest.fixture(autouse=True)
def _stays_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that breaks is opened again long after its scenario."""
    monkeypatch.setattr(Upkeep, "pause_s", lambda _: 1e6)


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with world("tcp", lanes=LANES, chunk_bytes=CHUNK) as made:
        made.source, made.target = (
            Memory(LARGE, len(BLOCKS)),
            Memory(LARGE, len(BLOCKS)),
        )
        made.source.stamp(BLOCKS)
        await made.until(lambda: len(lanes_of(made.push_side)) == LANES - 1)
        yield made


def lanes_of(connection: kvwire.Connection) -> list[LaneSocket]:
    """The sockets of the lanes that are up beside the control link."""
    found: list[Any] = [endpoint.lane for endpoint in inside.lanes(connection).open]
    return [lane._socket for lane in found]


def begin(w: World, id: str) -> tuple[kvwire.Outgoing, kvwire.Incoming]:
    out = w.p.publish(id, w.source.cache, BLOCKS)
    inc = w.pull_side.pull(id, w.target.cache, BLOCKS)
    out.ready()
    out.finish()
    return out, inc


def freeze(lane: LaneSocket) -> Callable[[], None]:
    """Stop a lane from receiving; call the result to let it go on."""
    lane._loop.remove_reader(lane._sock)
    lane._paused = False  # it would go on by itself
    return lambda: lane._loop.add_reader(lane._sock, lane._on_readable)


async def under_way(w: World, lane: LaneSocket) -> None:
    """Wait until a lane of the consumer has brought some chunks."""
    await w.turns_until(lambda: lane.received_bytes > 3 * CHUNK)


async def test_every_socket_carries_its_share(w: World) -> None:
    out, inc = begin(w, "shared")
    assert (await inc).complete
    assert (await out).complete
    assert same(w.source, BLOCKS, w.target, BLOCKS)
    for lane in lanes_of(w.pull_side):
        assert lane.received_bytes > w.source.nbytes // LANES // 4


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("how", ["reset", "shutdown"])
@pytest.mark.parametrize("broken", [1, LANES - 1])
async def test_lanes_that_break_on_the_way(
    w: World, side: str, how: str, broken: int
) -> None:
    """One of them, and all of them: the transfer goes on, on the same connection."""
    out, inc = begin(w, "broken")
    lanes = lanes_of(w.pull_side)
    await under_way(w, lanes[0])
    victims = lanes if side == "consumer" else lanes_of(w.push_side)
    for lane in victims[:broken]:
        if how == "reset":
            reset_on_close(lane._sock)
        lane._sock.shutdown(socket.SHUT_RDWR)
    outcome = await inc
    assert outcome.complete, outcome
    assert (await out).complete
    await inc.drained()
    await out.drained()
    assert same(w.source, BLOCKS, w.target, BLOCKS)
    for end in (w.pull_side, w.push_side):
        await w.until(partial(_has_lanes, end, LANES - 1 - broken))
    assert list(w.d.live_connections) == [w.pull_side]
    assert await w.moves("again", list(BLOCKS), list(BLOCKS))


async def test_lanes_come_back_while_a_transfer_goes_on(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them break again and again, on either side; not a byte is lost."""
    monkeypatch.setattr(Upkeep, "pause_s", lambda _: 0.0)
    out, inc = begin(w, "again")
    for rounds, end in enumerate((w.pull_side, w.push_side, w.pull_side), 1):
        for lane in lanes_of(end):
            lane.abort()
        await w.until(partial(_restored, w, rounds * (LANES - 1)))
    assert (await inc).complete
    assert (await out).complete
    await inc.drained()
    await out.drained()
    assert same(w.source, BLOCKS, w.target, BLOCKS)
    for end in (w.pull_side, w.push_side):
        await w.until(partial(_has_lanes, end, LANES - 1))
    assert list(w.d.live_connections) == [w.pull_side]
    assert await w.moves("on the new ones", list(BLOCKS), list(BLOCKS))
    assert all(lane.received_bytes for lane in lanes_of(w.pull_side))


async def test_a_lane_that_stalls_holds_its_own_chunks_only(w: World) -> None:
    out, inc = begin(w, "stalled")
    lane = lanes_of(w.pull_side)[0]
    await under_way(w, lane)
    thaw = freeze(lane)
    others = lanes_of(w.pull_side)[1:]
    before = [other.received_bytes for other in others]
    # What is missing in the end is what the stalled lane holds: less than its window.
    await w.until(lambda: settled(w))
    assert [other.received_bytes for other in others] > before
    assert inc.outcome is None
    thaw()
    assert (await inc).complete
    assert (await out).complete
    assert same(w.source, BLOCKS, w.target, BLOCKS)


def settled(w: World) -> bool:
    """Whether nothing is queued any more but on lanes."""
    link: Any = inside.link(w.push_side)
    return not inside.core(w.push_side).sending and not link.queued_bytes


@pytest.mark.parametrize("ends", ["resume", "abort"])
async def test_memory_of_a_stalled_lane_is_not_free_before_it_is_quiet(
    w: World, ends: str
) -> None:
    out, inc = begin(w, "held")
    lane = lanes_of(w.pull_side)[0]
    await under_way(w, lane)
    thaw = freeze(lane)
    await w.turns_until(lambda: lane._reader.position)  # it has memory to fill
    inc.abort("enough")
    assert not (await inc).complete
    drained = asyncio.create_task(inc.drained())
    assert not (await out).complete
    # A whole exchange with the peer later it still is not.
    await w.pull_side.send(1, b"ping")
    assert await w.push_side.recv(1) == b"ping"
    assert held(w.d)
    assert not drained.done()
    if ends == "resume":
        thaw()
    else:
        lane.abort()
    await drained
    await out.drained()
    assert not held(w.d)


async def test_lanes_through_a_bad_network() -> None:
    """They dial what the connection has dialled, a proxy in between included."""
    delays = [Latency(way, 0.001, 0.002) for way in Direction]
    cut = Slice(Direction.TO_CLIENT, 9000)
    async with (
        kvwire.open(lanes=LANES, chunk_bytes=CHUNK) as p,
        kvwire.open(lanes=LANES, chunk_bytes=CHUNK) as d,
        Proxy(await p.listen("127.0.0.1:0"), *delays, cut, seed=5) as proxy,
    ):
        pull_side = await d.connect(proxy.address)
        w = World(p, d, pull_side, await p.accept(), proxy.address)
        await w.until(partial(_has_lanes, pull_side, LANES - 1))
        blocks = list(range(32))
        assert await w.moves("far", blocks, blocks[::-1])
        assert all(lane.received_bytes for lane in lanes_of(pull_side))


def _restored(w: World, count: int) -> bool:
    return min(w.p.counters.lanes_restored, w.d.counters.lanes_restored) >= count


def _has_lanes(connection: kvwire.Connection, count: int) -> bool:
    return len(lanes_of(connection)) == count


async def test_a_lane_that_arrives_is_no_stranger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log neither refuses it nor shows its first bytes, which are a secret's."""
    caplog.set_level(logging.DEBUG)
    async with (
        kvwire.open(name="far", lanes=3) as far,
        kvwire.open(name="near", lanes=3) as near,
    ):
        where = await far.listen("127.0.0.1:0")
        connection = await near.connect(where, transport="tcp")
        await until(lambda: near.counters.lanes_raised == 2)
        await connection.close()
    assert "KVWIRE+L" not in caplog.text
    assert not [row for row in caplog.records if row.levelno > logging.DEBUG]
    assert caplog.text.count("a lane of a connection has arrived") == 2
