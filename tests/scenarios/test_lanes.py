"""Transfers over several sockets: each carries its share, one stalls, or is slow.

The control link lives on, so none of this is a lost connection, and memory is free when
the lane is quiet. Lanes that break: tests/driver.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

import kvwire
from kvwire.aio import Upkeep
from kvwire.limits import KIB
from kvwire_tcp.lane import LaneSocket
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
