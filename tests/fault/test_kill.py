"""Goal R8: a process is killed at every boundary between two frames of a transfer.

Either side, pulling and pushing, connecting and listening. The other side gets an
outcome or a documented error within a bound, its memory drains, what it was told has
landed is right, and a new process on the same port has a whole transfer with it, in the
same blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from dataclasses import dataclass, replace

import pytest

import kvwire
from tests.fault.kill_victim import (
    BLOCKS,
    CHUNK_BYTES,
    EVERY,
    LAYERS,
    NEVER,
    SPEC,
    Child,
    Nursery,
    Order,
    take_part,
)
from tests.support import inside
from tests.support.caches import Memory, same
from tests.support.depth import parameters

# The survivor is told at once; on a busy machine that, and two processes, take a while.
BOUND_S = 120.0
# How long a survivor that listens waits for a peer that will not come back; and for one
# that has come, and may be slow.
LEASE_S, LEASE_AGAIN_S = 2.0, 10.0
# Runs at once; most of their time is spent on waiting.
LANES = 8
# What a whole run writes at least: the handshake, a question or an answer, for each
# layer a mark and two chunks or a request for the next one, and the commit or the
# settlement. 160 in all eight cases. How many acknowledgements go together depends on
# the clock, so some runs write a few frames more than others.
FRAMES_MIN = {True: 2 + 1 + 3 * LAYERS + 1, False: 2 + 1 + LAYERS + 1}
SALT, SALT_AGAIN = 1, 2


@dataclass(slots=True)
class Survivor:
    """This process's side of one run."""

    nursery: Nursery
    comm: kvwire.Communicator
    memory: Memory

    async def meet(
        self, order: Order, child: Child | None = None
    ) -> tuple[Child, kvwire.Connection | None, Order]:
        """Have a child born and a connection with it; None if it died before."""
        if child is None:
            child = await self.nursery.bear(order)
        if order.listens:
            port = await child.port()
            assert port is not None, "it listens before it writes a frame"
            order = replace(order, address=f"127.0.0.1:{port}")
            try:
                return child, await self.comm.connect(order.address), order
            except (kvwire.KVWireError, OSError):
                return child, None, order
        accepting = asyncio.create_task(self.comm.accept())
        await child.ended_before(accepting)
        if accepting.done():
            return child, accepting.result(), order
        accepting.cancel()
        return child, None, order

    async def play(
        self, order: Order, conn: kvwire.Connection
    ) -> kvwire.Outgoing | kvwire.Incoming | None:
        """Take the other part; the end, once its outcome is known and memory free."""
        mine = replace(order, produces=not order.produces)
        lease_s = LEASE_AGAIN_S if order.frame == NEVER else LEASE_S
        try:
            end = await take_part(mine, self.comm, conn, self.memory, lease_s=lease_s)
        except kvwire.ConnectionClosed:
            return None  # documented: a connection that is gone takes no question
        await end
        await end.drained()
        return end

    async def play_again(self, order: Order, heir: Child | None) -> None:
        """On the same port, in the same blocks; its bytes are other ones."""
        if order.produces:
            assert self.memory.free(EVERY), "written to after it had drained"
        heir, conn, order = await self.meet(order, heir)
        assert conn is not None
        end = await self.play(order, conn)
        assert end is not None
        assert end.outcome is not None
        assert end.outcome.complete
        if isinstance(end, kvwire.Incoming):
            self.check_landed(end, SALT_AGAIN)
        await conn.close()
        assert await heir.ended() == 0

    def check_landed(self, end: kvwire.Incoming, salt: int) -> None:
        """What has landed is what was sent; then the blocks are free."""
        assert end.outcome is not None
        landed = end.outcome.landed.ids().tolist()
        source = Memory(SPEC, BLOCKS)
        source.stamp(EVERY, salt)
        assert same(source, landed, self.memory, landed, range(LAYERS))
        for tensor in self.memory.tensors:
            tensor[:] = -1


async def run(nursery: Nursery, order: Order) -> Child:
    """One victim, killed or not, and its successor, which is not."""
    async with (
        asyncio.timeout(BOUND_S),
        kvwire.open(name="survivor", chunk_bytes=CHUNK_BYTES) as comm,
    ):
        survivor = Survivor(nursery, comm, Memory(SPEC, BLOCKS))
        if not order.listens:
            where = await comm.listen("127.0.0.1:0")
            order = replace(order, address=str(where))
        victim, conn, order = await survivor.meet(order)
        again = replace(
            order, number=nursery.number(), id=2, salt=SALT_AGAIN, frame=NEVER
        )
        heir = None
        if conn is not None:
            playing = asyncio.create_task(survivor.play(order, conn))
            await victim.ended_before(playing)
            if not playing.done():
                # It comes back while this side waits for it, and is somebody else.
                heir = await nursery.bear(again)
            end = await playing
            await conn.close()
            assert not len(inside.buffers(comm))
            if isinstance(end, kvwire.Incoming):
                survivor.check_landed(end, SALT)
        status = await victim.ended()
        assert status == (-signal.SIGKILL if victim.frames is None else 0)
        await survivor.play_again(again, heir)
    assert not inside.registry(comm).live
    assert not len(inside.buffers(comm))
    return victim


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
# The loop makes no difference to who dies when, and the matrix is long.
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize(
    ("listens", "pull", "produces"),
    parameters(itertools.product([True, False], repeat=3), every=8),
)
async def test_r8_killed_before_every_frame(
    produces: bool, pull: bool, listens: bool
) -> None:
    """Until a run is not killed any more, which then has to be a whole transfer."""
    killed: list[int] = []

    async def lane(first: int) -> int:
        for frame in range(first, NEVER, LANES):
            order = Order(
                number=nursery.number(),
                produces=produces,
                pull=pull,
                listens=listens,
                address="127.0.0.1:0",
                frame=frame,
            )
            victim = await run(nursery, order)
            if victim.frames is not None:
                return victim.frames
            killed.append(frame)
        raise AssertionError("it writes frames for ever")

    async with Nursery() as nursery:
        written = await asyncio.gather(*map(lane, range(LANES)))
    assert len(set(killed)) == len(killed)
    assert set(killed) >= set(range(FRAMES_MIN[produces]))
    assert all(frames >= FRAMES_MIN[produces] for frames in written)
