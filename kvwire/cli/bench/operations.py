"""Operations of kvwire on one connection: the work, and both sides of it.

The blocks of a cache lie scattered: a side's memory is a pool with twice the blocks
that travel. Which of them travel, and in what order, is drawn at random for each side,
and no two of them lie side by side, so that nobody can merge two fragments into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.backend import registry
from kvwire.cli.bench.side import (
    HOST,
    BenchSide,
    Bytes,
    Positive,
    Work,
    digest,
    each_timed,
    setups_timed,
)
from kvwire.kv.fragments import Fragments
from kvwire.limits import KV_LAYERS_MAX
from kvwire.memory.arena import Arena
from kvwire.types import in_bytes

PULL: Final = "pull"
PUSH: Final = "push"
SETUP: Final = "setup"
READY: Final = "ready"
ROUND_TRIP: Final = "round trip"
SEND: Final = "send"
PUT: Final = "put"
GET: Final = "get"

# Memory that the other side can map.
ARENA: Final = "arena"
# The left and the right side have their blocks in different places.
LEFT: Final = 1
RIGHT: Final = 2
# 2 components x 16 tokens x 8 heads of 2 bytes: what is left of a block are its dims.
_TOKENS: Final = 16
_HEADS: Final = 8

_BESIDE: Final = 0xA5
_GO: Final = 1
_DONE: Final = 2
_DATA: Final = 3
_BACK: Final = 4
# Ends that the right side has ready before they are asked for.
_AHEAD: Final = 2
# A layer is computed meanwhile, so that each travels by itself.
_GAP_S: Final = 1e-3

End = kvwire.Incoming | kvwire.Outgoing


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsWork(Work):
    """``count`` operations of ``nbytes``: one after the other, or ``in_flight``.

    A ``setup`` is a new connection, a pull and another one; ``ready`` is a push whose
    layers are marked one by one.
    """

    # Of the cache; 0 where there is none.
    layers: Annotated[int, msgspec.Meta(ge=0, le=KV_LAYERS_MAX)] = 0
    # That travel in an operation.
    blocks: Positive = 1
    # Every other block of the pool, so that none that travel are neighbours. With 1 all
    # of them travel, as they lie side by side.
    spread: Annotated[int, msgspec.Meta(ge=1, le=2)] = 2
    # A block has all layers side by side, so that it is one fragment; otherwise each
    # layer of a block is one.
    cross_layer: bool = False

    @property
    def name(self) -> str:
        """Name it as it is shown."""
        if self.verb == READY:
            return f"ready of a layer, {in_bytes(self.nbytes // self.layers)}"
        layers = f", {self.layers} layers" if self.layers else ""
        return f"{self.verb}, {in_bytes(self.nbytes)}{layers}"

    @property
    def fragments(self) -> int:
        """Fragments of an operation."""
        return self.blocks * (1 if self.cross_layer else self.layers)

    @property
    def layer_bytes(self) -> int:
        """Count the bytes of one layer of one block."""
        return self.nbytes // (self.layers * self.blocks)

    @property
    def layout(self) -> str:
        """Name it as it is shown."""
        return "cross-layer" if self.cross_layer else "per-layer"

    @property
    def memory_bytes(self) -> int:
        """Memory of each side: that of a pool, or of what is in flight."""
        return self.nbytes * (self.spread if self.layers else self.in_flight)


class Pool:
    """Holds the memory of one side as the cache of a work."""

    def __init__(self, memory: Bytes, work: OpsWork, side: int) -> None:
        self.memory = memory
        self._side = side
        pool_blocks = work.spread * work.blocks
        self.cache: kvwire.PagedCache = paged(
            memory, work.layers, pool_blocks, cross_layer=work.cross_layer
        )
        blocks = np.arange(work.blocks) * work.spread
        if work.spread > 1:
            np.random.default_rng(side).shuffle(blocks)
        # Those that travel, and where their fragments lie, layer after layer.
        self.blocks: list[int] = blocks.tolist()
        first = np.arange(1 if work.cross_layer else work.layers) * pool_blocks
        self.rows: npt.NDArray[np.int64] = (first[:, None] + blocks).ravel()
        self._fragments = memory.reshape(work.spread * work.fragments, -1)
        # What lies between those that travel must stay as it is.
        self._beside = np.delete(np.arange(len(self._fragments)), self.rows)

    def __str__(self) -> str:
        return "left side" if self._side == LEFT else "right side"

    @property
    def chosen(self) -> tuple[kvwire.PagedCache, list[int]]:
        """Return the cache and the blocks that travel, as a transfer is told them."""
        return self.cache, self.blocks

    @property
    def lent(self) -> Fragments:
        """Return the memory of those that travel, in the same order."""
        size = self._fragments.shape[1]
        return Fragments.uniform(
            np.uint64(self.memory.ctypes.data) + self.rows.astype(np.uint64) * size,
            size,
            owner=self.memory,
            writable=True,
        )

    def mark_beside(self) -> None:
        """Write what :attr:`intact` finds again to all that does not travel."""
        self._fragments[self._beside] = _BESIDE

    @property
    def intact(self) -> bool:
        """Tell whether nothing was written beside what travels."""
        return bool((self._fragments[self._beside] == _BESIDE).all())

    def fragments(self) -> Bytes:
        """Copy the fragments that travel, layer after layer."""
        return self._fragments[self.rows]


def paged(
    memory: Bytes, layers: int, blocks: int, *, cross_layer: bool = False
) -> kvwire.PagedCache:
    """Make a cache of memory: blocks of 16 tokens, or of one if they are tiny.

    In one that is ``cross_layer`` a block has all layers side by side.
    """
    nbytes = memory.size // (layers * blocks)
    whole = nbytes % (4 * _TOKENS * _HEADS) == 0
    tokens, heads = (_TOKENS, _HEADS) if whole else (1, 1)
    dim = nbytes // (4 * tokens * heads)
    spec = kvwire.KVSpec(
        layers=layers,
        kv_heads=heads,
        head_dim=dim,
        block_tokens=tokens,
        dtype="float16",
    )
    numbers, block = memory.view(np.float16), (2, tokens, heads, dim)
    if cross_layer:
        return kvwire.PagedCache(spec, numbers.reshape(blocks, layers, *block))
    return kvwire.PagedCache(spec, list(numbers.reshape(layers, blocks, *block)))


class OpsSide(BenchSide[OpsWork]):
    """Does the operations on the left, and is the other end of each on the right.

    Options are the ``transport``, which is that of the link with ``by_link`` if it has
    links, and otherwise a lane beside one over TCP; and ``endpoints``, of which each
    side has so many, each connected to each. An operation goes over the first
    connection.
    """

    work_type: ClassVar[type[Work]] = OpsWork
    pool: Pool
    # Of each operation in flight, and the other side's.
    _parts: Sequence[Bytes | Fragments]
    _grants: Sequence[kvwire.Grant]

    def __init__(
        self,
        options: Mapping[str, str],
        communicator: kvwire.Communicator | None = None,
        connection: kvwire.Connection | None = None,
    ) -> None:
        super().__init__(options)
        # Those that there are already, of a side that is not to connect.
        self.communicators = [communicator] if communicator else []
        self.connections = [connection] if connection else []
        self._addresses: Sequence[str] = ()
        # Of the last transfer: both sides count alike.
        self._number = 0
        self._arenas: list[Arena] = []
        # The works of all rounds have the same, so that no page is missing in any.
        self._room: Bytes = np.zeros(0, np.uint8)
        self._work: OpsWork | None = None
        # What the other side puts into and gets from.
        self._region: kvwire.Region | None = None

    @property
    def communicator(self) -> kvwire.Communicator:
        """Return the first one."""
        return self.communicators[0]

    @property
    def connection(self) -> kvwire.Connection:
        """Return the first one."""
        return self.connections[0]

    async def listen(self) -> list[str]:
        await self._open("right")
        transport = self.options["transport"]
        by_link = (
            "by_link" in self.options and registry.load(transport).capabilities.links
        )
        where = f"{transport if by_link else 'tcp'}://{HOST}:0"
        return [str(await one.listen(where)) for one in self.communicators]

    async def accept(self) -> None:
        for one in self.communicators:
            for _ in self.communicators:
                self.connections.append(await one.accept())

    async def connect(self, address: Any) -> dict[str, Any]:
        await self._open("left")
        self._addresses, transport = address, self.options["transport"]
        for where in address:
            for one in self.communicators:
                self.connections.append(await one.connect(where, transport=transport))
        loop = type(asyncio.get_running_loop()).__module__
        return {
            "kvwire": kvwire.__version__,
            "python": platform.python_version(),
            "loop": loop.partition(".")[0],
            "transport": str(self.connection.transport_report),
            "connections": len(self.connections),
        }

    async def one_more(self) -> kvwire.Connection:
        """Left: make a connection."""
        where, transport = self._addresses[0], self.options["transport"]
        return await self.communicator.connect(where, transport=transport)

    async def _open(self, side: str) -> None:
        for _ in range(int(self.options.get("endpoints", 1))):
            self.communicators.append(await kvwire.open(name=f"bench-{side}"))

    def next_id(self) -> int:
        """Return the id of the next transfer."""
        self._number += 1
        return self._number

    async def prepare(self, work: OpsWork) -> str:
        await self.take_back()
        # Pages take seconds on a busy machine, in which the peer must be answered.
        await asyncio.to_thread(self.have, work, RIGHT)
        if work.verb not in (PUT, GET):
            return ""
        lent = self._parts[0] if work.layers else self.memory
        self._region = self.communicator.register(lent, access="readwrite")
        return self._region.grant(self.connection).to_bytes().hex()

    async def take_back(self) -> None:
        """Right: end the grant of the last work."""
        if self._region is not None:
            await self._region.close()
            self._region = None

    async def use(self, work: OpsWork, given: str) -> None:
        await asyncio.to_thread(self.have, work, LEFT)
        if given:
            grant = kvwire.Grant.from_bytes(bytes.fromhex(given))
            starts = range(0, len(grant), work.nbytes)
            self._grants = [grant[at : at + work.nbytes] for at in starts]

    async def fill(self, work: OpsWork) -> None:
        await super().fill(work)
        if work.layers:
            self.pool.mark_beside()

    async def digest(self, work: OpsWork) -> str:
        if not work.layers:
            return digest(self.memory[: work.nbytes])
        found = digest(self.pool.fragments())
        # The other side never says the same, so that it is seen.
        return found if self.pool.intact else f"{found} and more on the {self.pool}"

    async def drive(self, work: OpsWork) -> Sequence[float]:
        connection = self.connection
        await connection.recv(_GO)
        if work.verb == READY:
            return await self._mark_layers(work)
        if work.verb == SETUP:
            return await setups_timed(
                work.count,
                self.one_more,
                lambda new: self._begin(work, new),
                lambda new: new.close(),
            )
        if work.in_flight == 1:
            seconds = await each_timed(
                work.count, lambda _: self._begin(work, connection)
            )
        else:
            began = time.perf_counter()
            await _keep_busy(work, lambda at: self._begin(work, connection, at))
            if work.verb == SEND:
                # All are there.
                await connection.recv(_DONE)
            seconds = [time.perf_counter() - began]
        if work.verb in (PUT, GET):
            await connection.send(_DONE, b"")
        return seconds

    async def serve(self, work: OpsWork) -> None:
        connection, parts = self.connection, self._parts
        if work.layers and work.verb not in (PUT, GET):
            await self._serve_transfers(work)
            return
        await connection.send(_GO, b"")
        if work.verb in (PUT, GET):
            await connection.recv(_DONE)
        elif work.verb == SEND:
            await _keep_busy(work, lambda at: connection.recv(_DATA, parts[at]))
            if work.in_flight > 1:
                await connection.send(_DONE, b"")
        elif work.verb == ROUND_TRIP:
            for _ in range(work.count):
                await connection.recv(_DATA, parts[0])
                await connection.send(_BACK, parts[0])

    async def close(self) -> None:
        for communicator in self.communicators:
            communicator.abort()
            await communicator.close()
        self.forget()
        for arena in self._arenas:
            # Transfers may still have arrays in it, which keep it mapped.
            with contextlib.suppress(kvwire.UsageError):
                arena.close()

    def have(self, work: OpsWork, side: int) -> None:
        """Have the memory of a work, as a cache where it has one."""
        if self._work == work:
            return
        self.take(work.memory_bytes)
        self._parts = np.split(self.memory, work.in_flight)
        if work.layers:
            self.pool = Pool(self.memory, work, side)
            self._parts = [self.pool.lent]
        self._work = work

    def take(self, nbytes: int) -> None:
        """Have so much memory; never an old one and a new one at once."""
        if self._room.size < nbytes:
            self.forget()
            if self.options.get("memory") == ARENA:
                self._arenas.append(Arena(nbytes, populate=True))
                self._room = self._arenas[-1].buffer(nbytes)
            else:
                self._room = np.empty(nbytes, np.uint8)
            # Written to, so that no page is missing when it is timed.
            self._room[:] = 1
        self.memory = self._room[:nbytes]

    def forget(self) -> None:
        """Let go of the memory."""
        self._work, self._parts = None, ()
        self._room = self.memory = np.zeros(0, np.uint8)
        vars(self).pop("pool", None)

    # --- left -------------------------------------------------------------------------

    def _begin(
        self, work: OpsWork, connection: kvwire.Connection, at: int = 0
    ) -> Awaitable[object]:
        """Begin one operation, by its number among those in flight."""
        match work.verb:
            case "pull" | "setup":
                return over(connection.pull(self.next_id(), *self.pool.chosen))
            case "push":
                pushed = connection.push(self.next_id(), *self.pool.chosen)
                return over(mark_all(pushed))
            case "put":
                return connection.put(self._parts[0], self._grants[at])
            case "get":
                return connection.get(self._grants[at], into=self._parts[at])
            case "send":
                return connection.send(_DATA, self._parts[0])
            case _:
                return self._there_and_back(connection)

    async def _there_and_back(self, connection: kvwire.Connection) -> None:
        await connection.send(_DATA, self._parts[0])
        await connection.recv(_BACK, self._parts[0])

    async def _mark_layers(self, work: OpsWork) -> Sequence[float]:
        """Time each ``ready`` of a layer but the first."""
        end = self.connection.push(self.next_id(), *self.pool.chosen, group_bytes=1)
        clock, seconds = time.perf_counter, []
        for layer in range(work.layers):
            began = clock()
            end.ready(layer)
            seconds.append(clock() - began)
            await asyncio.sleep(_GAP_S)
        end.finish()
        await over(end)
        return seconds[1:]

    # --- right ------------------------------------------------------------------------

    async def _serve_transfers(self, work: OpsWork) -> None:
        count = work.count * (2 if work.verb == SETUP else 1)
        ends = [self._offer(work) for _ in range(min(_AHEAD, count))]
        try:
            await self.connection.send(_GO, b"")
            for number in range(count):
                end = ends[0]
                if work.verb == READY:
                    assert isinstance(end, kvwire.Incoming)
                    for layer in range(work.layers):
                        await end.layer(layer)
                await over(end)
                del ends[0]
                if number + _AHEAD < count:
                    ends.append(self._offer(work))
        finally:
            for end in ends:
                end.abort("the other side has gone")
                await end.drained()

    def _offer(self, work: OpsWork) -> End:
        number, chosen = self.next_id(), self.pool.chosen
        if work.verb in (PUSH, READY):
            return self.communicator.expect(number, *chosen)
        return mark_all(self.communicator.publish(number, *chosen))


async def over(end: End) -> None:
    """Wait for the outcome of a transfer, which is complete, and for its memory."""
    require_complete(await end)
    await end.drained()


def require_complete(outcome: kvwire.Outcome) -> None:
    """Refuse an outcome that lacks something."""
    if not outcome.complete:
        reasons = "; ".join(outcome.missing.reasons)
        raise RuntimeError(f"{len(outcome.missing)} blocks are missing: {reasons}")


def mark_all(outgoing: kvwire.Outgoing) -> kvwire.Outgoing:
    """Have all of a transfer ready at once."""
    outgoing.ready()
    outgoing.finish()
    return outgoing


async def _keep_busy(work: OpsWork, begin: Callable[[int], Awaitable[object]]) -> None:
    """Do the work with ``in_flight`` operations begun at any time."""
    pending: deque[Awaitable[object]] = deque()
    for number in range(work.count):
        if len(pending) == work.in_flight:
            await pending.popleft()
        pending.append(begin(number % work.in_flight))
    for request in pending:
        await request
