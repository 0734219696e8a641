"""Operations one by one: the left side does them, the right one is the other end."""

from __future__ import annotations

import asyncio
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Final

import numpy as np

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.fragment_work import LEFT, RIGHT
from kvwire.cli.bench.ops_work import (
    GET,
    PULL,
    PUSH,
    PUT,
    READY,
    ROUND_TRIP,
    SEND,
    STORE_GET,
    STORE_PUT,
    STORES,
    OpsWork,
)
from kvwire.cli.bench.sides.fragments_half import Pool
from kvwire.cli.bench.sides.half import HOST, Half, digest, fill

GO: Final = 1
DONE: Final = 2
DATA: Final = 3
BACK: Final = 4
# Ends that the right side has ready before they are asked for.
_AHEAD: Final = 2
# A layer is computed meanwhile, so that each travels by itself.
_GAP_S: Final = 1e-3
# What is got is not in the memory in front of the server, and still in the server's.
_FRONT_BLOCKS: Final = 4
_GOT_BLOCKS: Final = 16
_SERVED_BLOCKS: Final = 256
_HASH_BYTES: Final = 32


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


class OpsHalf(Half):
    """One communicator of each side, and a store with a server if that is asked for.

    Args:
        transport: Its name.
        meter: Makes what measures a round.

    Attributes:
        meter: Of the last round.
    """

    work_type: ClassVar[type[Work]] = OpsWork
    _communicator: kvwire.Communicator
    _connection: kvwire.Connection
    _pool: Pool
    _region: kvwire.Region
    _grant: kvwire.Grant

    def __init__(self, transport: str, meter: Callable[[], Meter] = Meter) -> None:
        self._transport = transport
        self._new_meter = meter
        self.meter: Meter = meter()
        self._open = AsyncExitStack()
        self._work: OpsWork | None = None
        self._memory = np.zeros(0, np.uint8)
        self._stores: dict[int, kvwire.BlockStore] = {}
        self._hashes: list[bytes] = []
        self._address = ""
        self._number = 0

    # --- the calls --------------------------------------------------------------------

    async def listen(self) -> dict[str, Any]:
        """See Half."""
        await self._begin("right")
        return {"address": str(await self._communicator.listen(f"tcp://{HOST}:0"))}

    async def accept(self) -> dict[str, Any]:
        """See Half."""
        self._connection = await self._communicator.accept()
        return {}

    async def connect(self, address: Any) -> dict[str, Any]:
        """See Half."""
        await self._begin("left")
        self._address = address
        self._connection = await self._connect()
        return {
            "kvwire": kvwire.__version__,
            "python": platform.python_version(),
            "transport": str(self._connection.transport_report),
        }

    async def prepare(self, work: Work) -> dict[str, Any]:
        """See Half."""
        work = self._have(work, RIGHT)
        if work.verb in STORES:
            return {"store": await self._serve_store(work)}
        if work.verb not in (PUT, GET):
            return {}
        self._region = self._communicator.register(self._memory, access="readwrite")
        return {"grant": self._region.grant(self._connection).to_bytes().hex()}

    async def use(self, work: Work, given: dict[str, Any]) -> dict[str, Any]:
        """See Half."""
        work = self._have(work, LEFT)
        if "grant" in given:
            self._grant = kvwire.Grant.from_bytes(bytes.fromhex(given["grant"]))
        if "store" in given and work.nbytes not in self._stores:
            front = work.nbytes * _FRONT_BLOCKS
            tiers = [f"memory:{front}B?slab={front}B", f"kvwire://{given['store']}"]
            opening = kvwire.BlockStore.open(tiers)
            store = await self._open.enter_async_context(opening)
            self._stores[work.nbytes] = store
        return {}

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half; what a store gives back is compared here."""
        work = self._have(work, LEFT)
        sent = "" if work.verb in (PULL, GET) else self._fill()
        self._hashes = []
        await self.drive(work)
        if work.verb == STORE_PUT:
            self._memory[:] = 0
            await self._store_get(work, self._connection)
        found = self._digest()
        if work.verb not in STORES:
            return {"digest": found}
        if found != sent:
            raise RuntimeError("what was got are not the bytes that were put")
        return {"digest": ""}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        work = self._have(work, RIGHT)
        if work.verb in (PULL, GET):
            self._fill()
        await self.serve(work)
        return {"digest": "" if work.verb in STORES else self._digest()}

    async def drive(self, work: Work) -> dict[str, Any]:
        """Left: ``values`` are seconds of each operation, ``cpu_s`` is of all."""
        work = self._have(work, LEFT)
        self.meter = meter = self._new_meter()
        await self._connection.recv(GO)
        if work.verb == STORE_GET and not self._hashes:
            await self._fill_store(work)
        if work.verb == READY:
            values = await self._mark_layers(work)
        else:
            values = await self._one_by_one(work)
        await self._connection.send(DONE, b"")
        return {"values": values, "cpu_s": meter.cpu_s}

    async def serve(self, work: Work) -> dict[str, Any]:
        """Right: ``cpu_s`` is of all operations, with their connections if fresh."""
        work = self._have(work, RIGHT)
        self.meter = meter = self._new_meter()
        if work.verb == READY:
            await self._see_layers(work)
        else:
            meter.start()
            await self._answer(work)
            meter.stop()
        return {"cpu_s": meter.cpu_s}

    async def close(self) -> None:
        """See Half."""
        await self._open.aclose()
        if hasattr(self, "_communicator"):
            self._communicator.abort()
            await self._communicator.close()

    # --- left -------------------------------------------------------------------------

    async def _one_by_one(self, work: OpsWork) -> list[float]:
        """The first one is not counted, so that the last one's tail need not be."""
        once = {
            PULL: self._pull,
            PUSH: self._push,
            ROUND_TRIP: self._round_trip,
            SEND: self._send,
            PUT: self._put,
            GET: self._get,
            STORE_PUT: self._store_put,
            STORE_GET: self._store_get,
        }[work.verb]
        clock, values, meter = time.perf_counter, [], self.meter
        connection = self._connection
        if not work.fresh:
            await once(work, connection)
            meter.start()
        for _ in range(work.count):
            if work.fresh:
                connection = await self._connect()
                meter.start()
            began = clock()
            await once(work, connection)
            values.append(clock() - began)
            if work.fresh:
                meter.stop()
                await connection.close()
        if not work.fresh:
            meter.stop()
        return values

    async def _pull(self, work: OpsWork, connection: kvwire.Connection) -> None:
        await _over(connection.pull(self._next(), self._pool.cache, self._pool.blocks))

    async def _push(self, work: OpsWork, connection: kvwire.Connection) -> None:
        end = connection.push(self._next(), self._pool.cache, self._pool.blocks)
        end.ready()
        end.finish()
        await _over(end)

    async def _round_trip(self, work: OpsWork, connection: kvwire.Connection) -> None:
        await connection.send(DATA, self._memory)
        await connection.recv(BACK, self._memory)

    async def _send(self, work: OpsWork, connection: kvwire.Connection) -> None:
        await connection.send(DATA, self._memory)

    async def _put(self, work: OpsWork, connection: kvwire.Connection) -> None:
        await connection.put(self._memory, self._grant)

    async def _get(self, work: OpsWork, connection: kvwire.Connection) -> None:
        await connection.get(self._grant, into=self._memory)

    async def _store_put(self, work: OpsWork, connection: kvwire.Connection) -> None:
        store, name = self._stores[work.nbytes], secrets.token_bytes(_HASH_BYTES)
        self._hashes.append(name)
        _check(await store.put([name], self._pool.cache, self._pool.blocks))
        await store.flush()

    async def _store_get(self, work: OpsWork, connection: kvwire.Connection) -> None:
        name = self._hashes.pop(0)
        self._hashes.append(name)
        store = self._stores[work.nbytes]
        _check(await store.get([name], self._pool.cache, self._pool.blocks))

    async def _fill_store(self, work: OpsWork) -> None:
        for _ in range(_GOT_BLOCKS):
            await self._store_put(work, self._connection)

    async def _mark_layers(self, work: OpsWork) -> list[float]:
        end = self._connection.push(
            self._next(), self._pool.cache, self._pool.blocks, group_bytes=1
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
        await _over(end)
        return values

    # --- right ------------------------------------------------------------------------

    async def _answer(self, work: OpsWork) -> None:
        connection, memory = self._connection, self._memory
        await connection.send(GO, b"")
        count = work.count + (not work.fresh)
        if work.verb in (PULL, PUSH):
            ends = [self._offer(work) for _ in range(min(_AHEAD, count))]
            for number in range(count):
                await _over(ends.pop(0))
                if number + _AHEAD < count:
                    ends.append(self._offer(work))
        elif work.verb in (ROUND_TRIP, SEND):
            for _ in range(count):
                await connection.recv(DATA, memory)
                if work.verb == ROUND_TRIP:
                    await connection.send(BACK, memory)
        await connection.recv(DONE)

    async def _see_layers(self, work: OpsWork) -> None:
        end = self._communicator.expect(
            self._next(), self._pool.cache, self._pool.blocks
        )
        await self._connection.send(GO, b"")
        await end.layer(0)
        self.meter.start()
        for layer in range(1, work.layers):
            await end.layer(layer)
        self.meter.stop()
        await _over(end)
        await self._connection.recv(DONE)

    def _offer(self, work: OpsWork) -> kvwire.Incoming | kvwire.Outgoing:
        number, pool = self._next(), self._pool
        if work.verb == PUSH:
            return self._communicator.expect(number, pool.cache, pool.blocks)
        end = self._communicator.publish(number, pool.cache, pool.blocks)
        end.ready()
        end.finish()
        return end

    async def _serve_store(self, work: OpsWork) -> str:
        size, slab = work.nbytes * _SERVED_BLOCKS, work.nbytes * _GOT_BLOCKS
        opening = kvwire.BlockStore.open([f"memory:{size}B?slab={slab}B"])
        store = await self._open.enter_async_context(opening)
        serving = kvwire.StoreServer(store, f"{HOST}:0")
        server = await self._open.enter_async_context(serving)
        return f"{server.address.host}:{server.address.port}"

    # --- both -------------------------------------------------------------------------

    def _have(self, work: Work, side: int) -> OpsWork:
        """The memory of a work, as a cache where it has one."""
        assert isinstance(work, OpsWork)
        if self._work is not None and self._shape(self._work) == self._shape(work):
            return work
        self._work = work
        self._hashes = []
        if work.layers:
            transfer = work.transfer
            self._memory = np.ones(transfer.pool_bytes, np.uint8)
            self._pool = Pool(self._memory, transfer, side)
        else:
            self._memory = np.ones(work.nbytes, np.uint8)
        return work

    @staticmethod
    def _shape(work: OpsWork) -> tuple[object, ...]:
        return work.verb, work.nbytes, work.layers, work.blocks

    def _fill(self) -> str:
        fill(self._memory.data)
        return self._digest()

    def _digest(self) -> str:
        assert self._work is not None
        return self._pool.digest() if self._work.layers else digest(self._memory.data)

    def _next(self) -> int:
        """Both sides count alike."""
        self._number += 1
        return self._number

    async def _connect(self) -> kvwire.Connection:
        return await self._communicator.connect(
            self._address, transport=self._transport
        )

    async def _begin(self, name: str) -> None:
        self._communicator = await kvwire.open(name=f"bench-{name}")


async def _over(end: kvwire.Incoming | kvwire.Outgoing) -> None:
    _check(await end)
    await end.drained()


def _check(outcome: kvwire.Outcome) -> None:
    if not outcome.complete:
        raise RuntimeError(f"an operation did not end well: {outcome!r}")
