"""The soak of two communicators in one process, for :mod:`tests.sim.transfers`."""

from __future__ import annotations

import asyncio
import random

import kvwire
from tests.soak.stamps import (
    BLOCKS_EACH_MAX,
    NUM_BLOCKS,
    ROUND_TIMEOUT_S,
    TRANSFERS_AT_ONCE,
    StampedCache,
    Tally,
    prefill,
    take_blocks,
)


class Soak:
    """Moves stamped blocks until enough bytes have landed."""

    def __init__(
        self,
        *,
        seed: int,
        goal_bytes: int,
        drop_s: float,
        listen: str,
        spec: kvwire.KVSpec,
        chunk_bytes: int,
    ) -> None:
        self.tally = Tally()
        self._listen = listen
        self._chunk_bytes = chunk_bytes
        self._random = random.Random(seed)
        self._goal_bytes = goal_bytes
        self._drop_s = drop_s
        self._producer = StampedCache(spec)
        self._consumer = StampedCache(spec)
        self._free_out = list(range(NUM_BLOCKS))
        self._free_in = list(range(NUM_BLOCKS))
        self._number = 0

    async def run(self) -> None:
        """Run to the goal.

        Cancel safety: safe, connections are aborted.
        """
        # A short lease: what a cut leaves behind must not hold up the next round.
        config = kvwire.Config(lease_s=2.0, chunk_bytes=self._chunk_bytes)
        async with (
            kvwire.open(config, name="soak-p") as p,
            kvwire.open(config, name="soak-c") as c,
        ):
            address = await p.listen(self._listen)
            conn = await c.connect(address)
            dropper = asyncio.create_task(self._drop(p, c))
            try:
                while self.tally.nbytes < self._goal_bytes and not self.tally.failed:
                    conn = await self._connected(c, conn, address)
                    await self._round(p, c, conn)
            finally:
                dropper.cancel()
                await asyncio.gather(dropper, return_exceptions=True)

    async def _round(
        self, p: kvwire.Communicator, c: kvwire.Communicator, conn: kvwire.Connection
    ) -> None:
        async with asyncio.timeout(ROUND_TIMEOUT_S), asyncio.TaskGroup() as group:
            for _ in range(TRANSFERS_AT_ONCE):
                group.create_task(self._transfer(p, c, conn))

    async def _transfer(
        self, p: kvwire.Communicator, c: kvwire.Communicator, conn: kvwire.Connection
    ) -> None:
        self._number += 1
        number, count = self._number, self._random.randint(1, BLOCKS_EACH_MAX)
        source = take_blocks(self._free_out, count, self._random)
        target = take_blocks(self._free_in, count, self._random)
        self.tally.late_bytes += self._consumer.poisoned(target)
        try:
            if self._random.random() < 0.5:
                out = p.publish(number, self._producer.cache, source)
                inc = conn.pull(number, self._consumer.cache, target)
            else:
                inc = c.expect(number, self._consumer.cache, target)
                back = next(
                    x for x in p.live_connections if x.peer.incarnation == c.incarnation
                )
                out = back.push(number, self._producer.cache, source)
        except (kvwire.ConnectionClosed, StopIteration):
            self.tally.counts["not begun: connection lost"] += 1
            for side in (p, c):
                side._state.registry.end(number, "soak: not begun")
            self._free_out += source
            self._free_in += target
            return
        cut = await prefill(out, self._producer, number, source, self._random)
        self.tally.counts["in several chunks"] += cut
        outcome = await inc
        claimed = await out
        self.tally.false_reports += claimed.complete and not outcome.complete
        self.tally.counts["complete" if outcome.complete else "partial"] += 1
        self._consumer.check(number, target, outcome, self.tally)
        await inc.drained()
        await out.drained()
        self._consumer.poison(target)
        self._free_out += source
        self._free_in += target

    async def _drop(self, p: kvwire.Communicator, c: kvwire.Communicator) -> None:
        """Cut connections, at either end, at random moments."""
        while self._drop_s:
            await asyncio.sleep(self._random.expovariate(1 / self._drop_s))
            side = self._random.choice((p, c))
            for connection in side.live_connections:
                connection.abort("soak: cut")
                self.tally.counts["connections cut"] += 1

    async def _connected(
        self,
        c: kvwire.Communicator,
        conn: kvwire.Connection,
        address: kvwire.Address,
    ) -> kvwire.Connection:
        """A connection to work over; one that is being made may be cut too."""
        while conn.closed:
            await conn.wait_closed()
            try:
                conn = await c.connect(address)
            except (kvwire.ConnectionClosed, kvwire.BackendUnavailable):
                self.tally.counts["cut while connecting"] += 1
        return conn
