"""Operations of kvwire on one connection: the work, and both sides of it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.cli.bench.fragments import LEFT, RIGHT, FragmentWork, Pool
from kvwire.cli.bench.pair import Work
from kvwire.cli.bench.report import size_name
from kvwire.cli.bench.side import (
    ConnectedSide,
    End,
    digest,
    fill,
    mark_all,
    over,
    require_complete,
    require_same,
    serve_store,
)
from kvwire.limits import KIB

PULL: Final = "pull"
PUSH: Final = "push"
SETUP: Final = "setup"
READY: Final = "ready"
ROUND_TRIP: Final = "round trip"
SEND: Final = "send"
PUT: Final = "put"
GET: Final = "get"
STORE_PUT: Final = "store put"
STORE_GET: Final = "store get"
STORES: Final = (STORE_PUT, STORE_GET)

_GO: Final = 1
_DONE: Final = 2
_DATA: Final = 3
_BACK: Final = 4
# Ends that the right side has ready before they are asked for.
_AHEAD: Final = 2
# A layer is computed meanwhile, so that each travels by itself.
_GAP_S: Final = 1e-3
# What is got is not in the memory in front of the server, and still in the server's.
_FRONT_BLOCKS: Final = 4
_GOT_BLOCKS: Final = 16
_SERVED_BLOCKS: Final = 256
_HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsWork(Work):
    """``count`` operations of ``nbytes``: one after the other, or ``in_flight``."""

    # Of the cache; 0 where there is none.
    layers: int = 0
    # Of a transfer; they do not lie side by side.
    blocks: int = 1
    # On a connection of their own each; its making is timed too if it is SETUP.
    fresh: int = 0

    @property
    def transfer(self) -> FragmentWork:
        """One operation as fragments."""
        count = self.layers * self.blocks
        nbytes = self.nbytes // count
        return FragmentWork(verb=PUSH, nbytes=nbytes, count=count, layers=self.layers)

    @property
    def name(self) -> str:
        """As it is shown."""
        whole = self.nbytes >= KIB
        size = size_name(self.nbytes) if whole else f"{self.nbytes} B"
        if self.verb == READY:
            return f"ready of a layer, {size_name(self.nbytes // self.layers)}"
        if self.verb not in (PULL, PUSH):
            return f"{self.verb}, {size}"
        return f"{'first ' * bool(self.fresh)}{self.verb}, {size}, {self.layers} layers"


class Meter:
    """Adds up the CPU seconds of the parts of a round that count."""

    def __init__(self) -> None:
        self.cpu_s: float = 0.0
        self._began_s = 0.0

    def start(self) -> None:
        """From here on it counts."""
        self._began_s = time.process_time()

    def stop(self) -> None:
        """Up to here."""
        self.cpu_s += time.process_time() - self._began_s


class OpsSide(ConnectedSide[OpsWork]):
    """Operations one by one: the left side does them, the right one is the other end.

    A ``meter`` is made to measure each round.
    """

    work_type: ClassVar[type[Work]] = OpsWork
    _pool: Pool
    # Memory of each operation in flight, and the other side's.
    _parts: list[npt.NDArray[np.uint8]]
    _grants: list[kvwire.Grant]

    def __init__(
        self, options: Mapping[str, str], meter: Callable[[], Meter] = Meter
    ) -> None:
        super().__init__(options)
        self._new_meter = meter
        self.meter: Meter = meter()
        self._open = AsyncExitStack()
        self._shape: tuple[object, ...] = ()
        self._memory = np.zeros(0, np.uint8)
        self._stores: dict[int, kvwire.BlockStore] = {}
        self._hashes: list[bytes] = []
        # Digest of what is put into a store.
        self._put_digest = ""

    async def prepare(self, work: OpsWork) -> dict[str, str]:
        self._have(work, RIGHT)
        if work.verb in STORES:
            size, slab = work.nbytes * _SERVED_BLOCKS, work.nbytes * _GOT_BLOCKS
            tier = f"memory:{size}B?slab={slab}B"
            return {"store": await serve_store(self._open, tier)}
        if work.verb not in (PUT, GET):
            return {}
        region = self.communicator.register(self._memory, access="readwrite")
        return {"grant": region.grant(self.connection).to_bytes().hex()}

    async def use(self, work: OpsWork, given: dict[str, str]) -> None:
        self._have(work, LEFT)
        if "grant" in given:
            grant = kvwire.Grant.from_bytes(bytes.fromhex(given["grant"]))
            starts = range(0, len(grant), work.nbytes)
            self._grants = [grant[at : at + work.nbytes] for at in starts]
        if "store" in given and work.nbytes not in self._stores:
            front = work.nbytes * _FRONT_BLOCKS
            tiers = [f"memory:{front}B?slab={front}B", f"kvwire://{given['store']}"]
            opening = kvwire.BlockStore.open(tiers)
            self._stores[work.nbytes] = await self._open.enter_async_context(opening)

    async def fill(self, work: OpsWork) -> None:
        await fill(self._memory)
        self._hashes = []
        self._put_digest = self._digest(work)

    async def digest(self, work: OpsWork) -> str:
        return "" if work.verb in STORES else self._digest(work)

    async def verify(self, work: OpsWork) -> None:
        """Compare what a store gives back; the first round of all has bytes to tell."""
        if work.verb in STORES and self._put_digest:
            self._memory[:] = 0
            await self._store_get(work)
            require_same(self._digest(work), self._put_digest)

    async def drive(self, work: OpsWork) -> dict[str, Any]:
        self.meter = meter = self._new_meter()
        await self.connection.recv(_GO)
        if work.verb == STORE_GET and not self._hashes:
            for _ in range(_GOT_BLOCKS):
                await self._store_put(work)
        if work.in_flight > 1:
            values = await self._in_flight(work)
        elif work.fresh:
            values = await self._fresh(work)
        else:
            one_by_one = self._mark_layers if work.verb == READY else self._one_by_one
            values = await one_by_one(work)
            await self.connection.send(_DONE, b"")
        return {"values": values, "cpu_s": meter.cpu_s}

    async def serve(self, work: OpsWork) -> dict[str, Any]:
        """Right: the CPU is of all operations, with their connections if fresh."""
        self.meter = meter = self._new_meter()
        if work.verb == READY:
            await self._see_layers(work)
        else:
            meter.start()
            await self._answer(work)
            meter.stop()
        return {"cpu_s": meter.cpu_s}

    async def close(self) -> None:
        await self._open.aclose()
        await super().close()

    def _have(self, work: OpsWork, side: int) -> None:
        """Have the memory of a work, as a cache where it has one."""
        shape = work.verb, work.nbytes, work.layers, work.blocks, work.in_flight
        if self._shape == shape:
            return
        self._shape, self._hashes, self._put_digest = shape, [], ""
        nbytes = work.transfer.pool_bytes if work.layers else work.nbytes
        self._memory = np.ones(nbytes * work.in_flight, np.uint8)
        self._parts = np.split(self._memory, work.in_flight)
        if work.layers:
            self._pool = Pool(self._memory, work.transfer, side)

    def _digest(self, work: OpsWork) -> str:
        return self._pool.digest() if work.layers else digest(self._parts[0])

    # --- left -------------------------------------------------------------------------

    async def _one_by_one(self, work: OpsWork) -> list[float]:
        """Leave the first one uncounted, so that the last one's tail need not be."""
        clock, values, connection = time.perf_counter, [], self.connection
        await self._once(work, connection)
        self.meter.start()
        for _ in range(work.count):
            began = clock()
            await self._once(work, connection)
            values.append(clock() - began)
        self.meter.stop()
        return values

    async def _fresh(self, work: OpsWork) -> list[float]:
        clock, values = time.perf_counter, []
        for _ in range(work.count):
            times = [clock()]
            connection = await self.one_more()
            self.meter.start()
            times.append(clock())
            for _ in range(work.fresh):
                await self._once(work, connection)
                times.append(clock())
            self.meter.stop()
            await connection.close()
            values += np.diff(times).tolist()[work.verb != SETUP :]
        await self.connection.send(_DONE, b"")
        return values

    async def _in_flight(self, work: OpsWork) -> list[float]:
        """Return the rate; that of messages ends with the word that all are there."""
        connection, parts = self.connection, self._parts
        begin: dict[str, Callable[[int], kvwire.Request[int]]] = {
            SEND: lambda i: connection.send(_DATA, parts[0]),
            PUT: lambda i: connection.put(parts[0], self._grants[i]),
            GET: lambda i: connection.get(self._grants[i], into=parts[i]),
        }
        self.meter.start()
        began = time.perf_counter()
        await _keep_busy(work, begin[work.verb])
        if work.verb == SEND:
            await connection.recv(_DONE)
        elapsed_s = time.perf_counter() - began
        self.meter.stop()
        if work.verb != SEND:
            await connection.send(_DONE, b"")
        return [work.moved_bytes / elapsed_s]

    async def _once(self, work: OpsWork, connection: kvwire.Connection) -> None:
        match work.verb:
            case "pull" | "setup":
                blocks = self._pool.cache, self._pool.blocks
                await over(connection.pull(self.next_id(), *blocks))
            case "push":
                blocks = self._pool.cache, self._pool.blocks
                await over(mark_all(connection.push(self.next_id(), *blocks)))
            case "put":
                await connection.put(self._memory, self._grants[0])
            case "get":
                await connection.get(self._grants[0], into=self._memory)
            case "store put":
                await self._store_put(work)
            case "store get":
                await self._store_get(work)
            case _:
                await connection.send(_DATA, self._memory)
                if work.verb == ROUND_TRIP:
                    await connection.recv(_BACK, self._memory)

    async def _store_put(self, work: OpsWork) -> None:
        store, name = self._stores[work.nbytes], secrets.token_bytes(_HASH_BYTES)
        self._hashes.append(name)
        require_complete(await store.put([name], self._pool.cache, self._pool.blocks))
        await store.flush()

    async def _store_get(self, work: OpsWork) -> None:
        name = self._hashes.pop(0)
        self._hashes.append(name)
        store, pool = self._stores[work.nbytes], self._pool
        require_complete(await store.get([name], pool.cache, pool.blocks))

    async def _mark_layers(self, work: OpsWork) -> list[float]:
        pool = self._pool
        end = self.connection.push(
            self.next_id(), pool.cache, pool.blocks, group_bytes=1
        )
        end.ready(0)
        await asyncio.sleep(_GAP_S)
        clock, values = time.perf_counter, []
        self.meter.start()
        for layer in range(1, work.layers):
            began = clock()
            end.ready(layer)
            values.append(clock() - began)
            await asyncio.sleep(_GAP_S)
        self.meter.stop()
        end.finish()
        await over(end)
        return values

    # --- right ------------------------------------------------------------------------

    async def _answer(self, work: OpsWork) -> None:
        connection, memory = self.connection, self._memory
        await connection.send(_GO, b"")
        if work.in_flight > 1 and work.verb == SEND:
            parts = self._parts
            await _keep_busy(work, lambda i: connection.recv(_DATA, parts[i]))
            await connection.send(_DONE, b"")
            return
        count = work.count * work.fresh if work.fresh else work.count + 1
        if work.verb in (PULL, PUSH, SETUP):
            ends = [self._offer(work) for _ in range(min(_AHEAD, count))]
            for number in range(count):
                await over(ends.pop(0))
                if number + _AHEAD < count:
                    ends.append(self._offer(work))
        elif work.verb in (ROUND_TRIP, SEND):
            for _ in range(count):
                await connection.recv(_DATA, memory)
                if work.verb == ROUND_TRIP:
                    await connection.send(_BACK, memory)
        await connection.recv(_DONE)

    async def _see_layers(self, work: OpsWork) -> None:
        end = self._offer(work)
        await self.connection.send(_GO, b"")
        assert isinstance(end, kvwire.Incoming)
        await end.layer(0)
        self.meter.start()
        for layer in range(1, work.layers):
            await end.layer(layer)
        self.meter.stop()
        await over(end)
        await self.connection.recv(_DONE)

    def _offer(self, work: OpsWork) -> End:
        number, pool = self.next_id(), self._pool
        if work.verb not in (PUSH, READY):
            return mark_all(self.communicator.publish(number, pool.cache, pool.blocks))
        return self.communicator.expect(number, pool.cache, pool.blocks)


async def _keep_busy(
    work: OpsWork, begin: Callable[[int], kvwire.Request[int]]
) -> None:
    """Do the work with ``in_flight`` operations begun at any time."""
    pending: deque[kvwire.Request[int]] = deque()
    for number in range(work.count):
        if len(pending) == work.in_flight:
            await pending.popleft()
        pending.append(begin(number % work.in_flight))
    for request in pending:
        await request
