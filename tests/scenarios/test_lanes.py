"""Transfers over several sockets: each carries its share, and each is expected.

Lanes that stall or break: the simulator, and tests/driver.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

import kvwire
from kvwire.limits import KIB
from kvwire_tcp.lane import LaneSocket
from tests.support import inside
from tests.support.caches import LARGE, Memory, same
from tests.support.lanes import NEVER_S, lane_pause
from tests.support.pairs import until
from tests.support.world import World, world

LANES = 3
# 32 MiB in 512 chunks: no lane is through before another has begun.
BLOCKS = range(8)
CHUNK = 64 * KIB


# A lane that breaks is opened again long after its scenario.
_stays_down = lane_pause(NEVER_S, autouse=True)


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


async def test_every_socket_carries_its_share(w: World) -> None:
    out, inc = begin(w, "shared")
    assert (await inc).complete
    assert (await out).complete
    assert same(w.source, BLOCKS, w.target, BLOCKS)
    for lane in lanes_of(w.pull_side):
        assert lane.received_bytes > w.source.nbytes // LANES // 4


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
