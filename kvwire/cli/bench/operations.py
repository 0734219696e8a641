"""kvwire's operations between two sides: their work, memory and program.

A cache's blocks are scattered: each side's memory is a pool with twice as many blocks
as travel. Which blocks travel, and in which order, is drawn at random on each side. No
two of them are adjacent, so no transport can merge two fragments into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import platform
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.backend import registry
from kvwire.cli.bench.limits import BENCH_CALL_BYTES_MAX
from kvwire.cli.bench.side import (
    GONE,
    HOST,
    Bench,
    BenchError,
    Bytes,
    Channel,
    Positive,
    Seconds,
    Work,
    digest,
    each_timed,
    fill,
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
# 2 components x 16 tokens x 8 heads x 2 bytes; the rest of a block's size are its dims.
_TOKENS: Final = 16
_HEADS: Final = 8

_BESIDE: Final = 0xA5
_DATA: Final = 3
_BACK: Final = 4
# The name of the window that the left side reads.
_WINDOW: Final = "bench"
# What the two sides send each other beside the measured operations, on two hosts.
_TAG: Final = 100
# The version of these messages; raised with every change.
PROFILE: Final = {"kvwire.bench": "1"}
# How many ends the right side prepares before the left side needs them.
_AHEAD: Final = 2
# The compute time per layer, so that each layer travels by itself.
_GAP_S: Final = 1e-3

End = kvwire.Incoming | kvwire.Outgoing


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsWork(Work):
    """``count`` operations of ``nbytes``, with up to ``in_flight`` at a time.

    A ``setup`` is a new connection and two pulls; ``ready`` is a push whose layers are
    marked one by one; a ``get`` of a work with layers reads from a window.
    """

    # The number of layers of the cache; 0 without a cache.
    layers: Annotated[int, msgspec.Meta(ge=0, le=KV_LAYERS_MAX)] = 0
    # The number of blocks that travel in an operation.
    blocks: Positive = 1
    # Every other block of the pool travels, so no two are adjacent. With 1, all of them
    # travel, side by side.
    spread: Annotated[int, msgspec.Meta(ge=1, le=2)] = 2
    # Whether a block has all its layers side by side and is one fragment; otherwise
    # each layer of a block is one fragment.
    cross_layer: bool = False

    @property
    def name(self) -> str:
        """The work's name in the output."""
        if self.verb == READY:
            return f"ready of a layer, {in_bytes(self.nbytes // self.layers)}"
        layers = f", {self.layers} layers" if self.layers else ""
        return f"{self.verb}, {in_bytes(self.nbytes)}{layers}"

    @property
    def fragments(self) -> int:
        """The number of fragments in an operation."""
        return self.blocks * (1 if self.cross_layer else self.layers)

    @property
    def layer_bytes(self) -> int:
        """The bytes of one layer of one block."""
        return self.nbytes // (self.layers * self.blocks)

    @property
    def layout(self) -> str:
        """The layout's name in the output."""
        return "cross-layer" if self.cross_layer else "per-layer"

    @property
    def memory_bytes(self) -> int:
        """The bytes of each side's memory: its pool, or the operations in flight."""
        return self.nbytes * (self.spread if self.layers else self.in_flight)


class Pool:
    """One side's memory, as the cache of a work."""

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
        # The blocks that travel, and the places of their fragments, layer after layer.
        self.blocks: list[int] = blocks.tolist()
        first = np.arange(1 if work.cross_layer else work.layers) * pool_blocks
        self.rows: npt.NDArray[np.int64] = (first[:, None] + blocks).ravel()
        self._fragments = memory.reshape(work.spread * work.fragments, -1)
        # The memory between them must stay unchanged.
        self._beside = np.delete(np.arange(len(self._fragments)), self.rows)

    def __str__(self) -> str:
        return "left side" if self._side == LEFT else "right side"

    @property
    def chosen(self) -> tuple[kvwire.PagedCache, list[int]]:
        """Return the cache and the blocks that travel, as arguments for a transfer."""
        return self.cache, self.blocks

    @property
    def lent(self) -> Fragments:
        """The memory of the travelling blocks, in the same order."""
        size = self._fragments.shape[1]
        return Fragments.uniform(
            np.uint64(self.memory.ctypes.data) + self.rows.astype(np.uint64) * size,
            size,
            owner=self.memory,
            writable=True,
        )

    def mark_beside(self) -> None:
        """Write a pattern to all other memory, for :attr:`intact` to check."""
        self._fragments[self._beside] = _BESIDE

    @property
    def intact(self) -> bool:
        """Return whether all memory that does not travel is unchanged."""
        return bool((self._fragments[self._beside] == _BESIDE).all())

    def fragments(self) -> Bytes:
        """Copy the travelling fragments, layer after layer."""
        return self._fragments[self.rows]


def paged(
    memory: Bytes, layers: int, blocks: int, *, cross_layer: bool = False
) -> kvwire.PagedCache:
    """Make a cache over memory: blocks of 16 tokens, or of one if they are tiny.

    With ``cross_layer``, all layers of a block are contiguous.
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
    numbers = memory.view(np.float16)
    block = (2, tokens, heads, dim)
    if cross_layer:
        return kvwire.PagedCache(spec, numbers.reshape(blocks, layers, *block))
    return kvwire.PagedCache(spec, list(numbers.reshape(layers, blocks, *block)))


# --- memory ---------------------------------------------------------------------------


class BenchMemory:
    """The memory that one side moves, for one work at a time.

    All works use the same pages, so no round has to allocate any.

    Attributes:
        bytes: The whole memory.
        parts: The part for each operation in flight.
        pool: The work's pool, if it has a cache.
    """

    def __init__(self, b: Bench) -> None:
        self.side: int = LEFT if b.left else RIGHT
        self.bytes: Bytes = np.zeros(0, np.uint8)
        self.parts: Sequence[Bytes | Fragments] = ()
        self.pool: Pool | None = None
        self._in_arena = b.options.get("memory") == ARENA
        self._arenas: list[Arena] = []
        self._room = self.bytes
        self._work: OpsWork | None = None

    def have(self, work: Any) -> None:
        """Prepare the memory for a work, unless it is prepared already."""
        if self._work != work:
            self.forget()
            self.lay_out(work)
            self._work = work

    def lay_out(self, work: Any) -> None:
        """Divide the memory into a work's parts or pool."""
        self.take(work.memory_bytes)
        self.parts = np.split(self.bytes, work.in_flight)
        if work.layers:
            self.pool = Pool(self.bytes, work, self.side)
            self.parts = [self.pool.lent]

    def take(self, nbytes: int) -> None:
        """Allocate memory, after freeing the previous one."""
        if self._room.size < nbytes:
            self._room = np.zeros(0, np.uint8)
            if self._in_arena:
                self._arenas.append(Arena(nbytes, populate=True))
                self._room = self._arenas[-1].buffer(nbytes)
            else:
                self._room = np.empty(nbytes, np.uint8)
            # Written to first, so that timing includes no page faults.
            self._room[:] = 1
        self.bytes = self._room[:nbytes]

    def forget(self) -> None:
        """Drop all views of the memory."""
        self._work = None
        self.pool = None
        self.parts = ()
        self.bytes = np.zeros(0, np.uint8)

    async def fill(self) -> None:
        """Write random bytes to it, and a pattern beside the travelling blocks."""
        await fill(self.bytes)
        if self.pool is not None:
            self.pool.mark_beside()

    async def digested(self, checks: bool = True) -> str:
        """Return a digest of the bytes that travelled, if the round ``checks`` them."""
        return await asyncio.to_thread(self.digest) if checks else ""

    def digest(self) -> str:
        """Return a digest of the travelling blocks, or of one operation's bytes."""
        if self.pool is None:
            return digest(self.bytes[: self.bytes.size // max(1, len(self.parts))])
        found = digest(self.pool.fragments())
        # Differs from anything that the other side returns, so the error is noticed.
        return found if self.pool.intact else f"{found} and more on the {self.pool}"

    def close(self) -> None:
        """Unmap the arenas."""
        self.forget()
        self._room = self.bytes
        for arena in self._arenas:
            # Transfers may still have arrays in it, which keep it mapped.
            with contextlib.suppress(kvwire.UsageError):
                arena.close()


# --- connections ----------------------------------------------------------------------


@dataclass(slots=True)
class Ends:
    """One side's communicators, each connected to all of the other side's."""

    communicators: list[kvwire.Communicator] = field(default_factory=list)
    connections: list[kvwire.Connection] = field(default_factory=list)
    # On the left side: the addresses on which the other side listens.
    addresses: Sequence[str] = ()
    # A number for each transfer; both sides count in the same way.
    ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def communicator(self) -> kvwire.Communicator:
        """The first communicator."""
        return self.communicators[0]

    @property
    def connection(self) -> kvwire.Connection:
        """The first connection."""
        return self.connections[0]


@asynccontextmanager
async def joined(b: Bench) -> AsyncIterator[Ends]:
    """Connect both sides, and yield the communicators of this side.

    The options are ``transport``; ``by_link``, which uses a transport with links as the
    link, instead of as a lane beside TCP; the number of ``endpoints``; and the address
    of a ``peer`` that runs the right side.
    """
    ends = Ends()
    transport = b.options["transport"]
    try:
        for _ in range(int(b.options.get("endpoints", 1))):
            name = f"bench-{'left' if b.left else 'right'}"
            ends.communicators.append(await kvwire.open(name=name))
        if b.left:
            peer = b.options.get("peer")
            ends.addresses = [peer] if peer else await b.receive()
            for where in ends.addresses:
                for one in ends.communicators:
                    made = await one.connect(where, transport=transport)
                    ends.connections.append(made)
            if peer:
                await meet_peer(b, ends.connection)
            b.facts |= await _facts(ends)
        else:
            can = registry.load(transport).capabilities
            by_link = "by_link" in b.options and can.links
            where = f"{transport if by_link else 'tcp'}://{HOST}:0"
            await b.send([str(await one.listen(where)) for one in ends.communicators])
            for one in ends.communicators:
                for _ in ends.communicators:
                    ends.connections.append(await one.accept())
        yield ends
    finally:
        for one in ends.communicators:
            one.abort()
            await one.close()


async def _facts(ends: Ends) -> dict[str, Any]:
    loop = type(asyncio.get_running_loop()).__module__
    return {
        "kvwire": kvwire.__version__,
        "python": platform.python_version(),
        "loop": loop.partition(".")[0],
        "transport": str(ends.connection.transport_report),
        "connections": len(ends.connections),
    }


class ConnectionChannel(Channel):
    """Carries the two sides' messages over the measured connection itself.

    So the only way in is a connection that both sides have authenticated.
    """

    def __init__(self, connection: kvwire.Connection) -> None:
        self._connection = connection
        self._buffer = bytearray(BENCH_CALL_BYTES_MAX)

    async def send(self, value: object) -> None:
        await self._connection.send(_TAG, msgspec.json.encode(value))

    async def receive(self) -> Any:
        try:
            count = await self._connection.recv(_TAG, into=self._buffer)
        except kvwire.ConnectionClosed as exc:
            raise EOFError(f"{GONE}: {exc}") from exc
        return msgspec.json.decode(memoryview(self._buffer)[:count])

    async def close(self) -> None:
        """Do nothing: the connection belongs to the caller."""


def serves(connection: kvwire.Connection, profile: Mapping[str, str]) -> bool:
    """Return whether a peer serves benchmarks in this version."""
    return profile.items() <= dict(connection.peer.profile).items()


async def meet_peer(b: Bench, connection: kvwire.Connection) -> None:
    """Make a connection's other end the right side, and receive its facts."""
    if not serves(connection, PROFILE):
        raise BenchError("the peer does not run `kvwire bench serve` of this version")
    b.meet(ConnectionChannel(connection))
    b.facts["peer"] = await b.receive()


# --- the program ----------------------------------------------------------------------


async def operations(b: Bench) -> None:
    """Run all operations over the first connection of both sides."""
    async with joined(b) as ends:
        await operate(b, ends)


async def operate_with_peer(b: Bench, ends: Ends) -> None:
    """Run all operations with the peer of an existing connection."""
    await meet_peer(b, ends.connection)
    await operate(b, ends)


async def operate(b: Bench, ends: Ends) -> None:
    """Run all operations over the first of these connections."""
    memory = BenchMemory(b)
    try:
        async for work in b.works(OpsWork):
            # Allocating takes seconds on a busy machine; meanwhile the peer must get
            # answers.
            await asyncio.to_thread(memory.have, work)
            async with (
                _granted(b, ends, memory, work) as grants,
                _shown(b, ends, memory, work) as window,
            ):
                moves = OpsRound(b, ends, memory, work, grants, window)
                if b.checks:
                    await memory.fill()
                async with b.clock():
                    seconds = await moves.move()
                await b.report(seconds, await memory.digested(b.checks))
    finally:
        memory.close()


@asynccontextmanager
async def _granted(
    b: Bench, ends: Ends, memory: BenchMemory, work: OpsWork
) -> AsyncIterator[Sequence[kvwire.Grant]]:
    """Lend the right side's memory to the left side, if the work needs it.

    The left side gets a grant for each operation in flight.
    """
    if work.verb not in (PUT, GET) or (work.layers and work.verb == GET):
        yield ()
    elif b.left:
        grant = kvwire.Grant.from_bytes(bytes.fromhex(await b.receive()))
        starts = range(0, len(grant), work.nbytes)
        yield [grant[at : at + work.nbytes] for at in starts]
    else:
        lent = memory.parts[0] if work.layers else memory.bytes
        region = ends.communicator.register(lent, access="readwrite")
        try:
            await b.send(region.grant(ends.connection).to_bytes().hex())
            yield ()
        finally:
            await region.close()


@asynccontextmanager
async def _shown(
    b: Bench, ends: Ends, memory: BenchMemory, work: OpsWork
) -> AsyncIterator[tuple[kvwire.RemoteWindow, bytes] | None]:
    """Let the left side read the right side's blocks, if the work needs that."""
    if work.verb != GET or memory.pool is None:
        yield None
        return
    cache, blocks = memory.pool.chosen
    if b.left:
        ticket = bytes.fromhex(await b.receive())
        remote = await ends.connection.window(_WINDOW)
        # The two caches are mapped onto each other once, and not again in each round.
        await remote.get(ticket, into=cache, blocks=blocks[:1], positions=[0])
        try:
            yield remote, ticket
        finally:
            await remote.close()
    else:
        window = ends.communicator.expose(_WINDOW, cache)
        try:
            await b.send(window.offer(blocks).hex())
            yield None
        finally:
            await window.close()


@dataclass(frozen=True, slots=True)
class OpsRound:
    """Runs one round of a work: the left side's operations and their other ends."""

    b: Bench
    ends: Ends
    memory: BenchMemory
    work: OpsWork
    grants: Sequence[kvwire.Grant]
    # On the left side: the memory to read, and the grant for it.
    window: tuple[kvwire.RemoteWindow, bytes] | None = None

    async def move(self) -> Seconds:
        """Do this side's part; the left side returns the seconds it measured."""
        if self.b.left:
            return await self._begin_all()
        await self._answer_all()
        return ()

    # --- left -------------------------------------------------------------------------

    async def _begin_all(self) -> Seconds:
        """Run and time the operations: each one, or all those in flight together."""
        work = self.work
        await self.b.receive()  # the other side is ready
        if work.verb == READY:
            return await self._mark_layers()
        if work.verb == SETUP:
            return await setups_timed(
                work.count, self._one_more, self._begin_on, lambda new: new.close()
            )
        if work.in_flight == 1:
            return await each_timed(work.count, self._begin)
        began = time.perf_counter()
        await self._keep_busy(self._begin)
        if work.verb == SEND:
            await self.b.receive()  # all are there
        return [time.perf_counter() - began]

    async def _one_more(self) -> kvwire.Connection:
        where = self.ends.addresses[0]
        transport = self.b.options["transport"]
        return await self.ends.communicator.connect(where, transport=transport)

    def _begin(self, number: int) -> Awaitable[object]:
        return self._begin_on(self.ends.connection, number % self.work.in_flight)

    def _begin_on(
        self, connection: kvwire.Connection, at: int = 0
    ) -> Awaitable[object]:
        """Start the operation with this number; several may be in flight."""
        parts = self.memory.parts
        if self.window is not None:
            return self._get_from(*self.window)
        match self.work.verb:
            case "pull" | "setup":
                return over(connection.pull(next(self.ends.ids), *self._chosen))
            case "push":
                pushed = connection.push(next(self.ends.ids), *self._chosen)
                return over(mark_all(pushed))
            case "put":
                return connection.put(parts[0], self.grants[at])
            case "get":
                return connection.get(self.grants[at], into=parts[at])
            case "send":
                return connection.send(_DATA, parts[0])
            case _:
                return self._there_and_back(connection)

    async def _get_from(self, remote: kvwire.RemoteWindow, ticket: bytes) -> None:
        cache, blocks = self._chosen
        require_complete(await remote.get(ticket, into=cache, blocks=blocks))

    async def _there_and_back(self, connection: kvwire.Connection) -> None:
        await connection.send(_DATA, self.memory.parts[0])
        await connection.recv(_BACK, self.memory.parts[0])

    async def _mark_layers(self) -> Seconds:
        """Time each call of ``ready``, except for the first layer."""
        end = self.ends.connection.push(
            next(self.ends.ids), *self._chosen, group_bytes=1
        )
        clock = time.perf_counter
        seconds = []
        for layer in range(self.work.layers):
            began = clock()
            end.ready(layer)
            seconds.append(clock() - began)
            await asyncio.sleep(_GAP_S)
        end.finish()
        await over(end)
        return seconds[1:]

    # --- right ------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        """Act as the other end of the left side's operations."""
        b = self.b
        work = self.work
        connection = self.ends.connection
        parts = self.memory.parts
        if work.layers and work.verb not in (PUT, GET):
            await self._offer_all()
            return
        await b.send()
        if work.verb == SEND:
            await self._keep_busy(lambda at: connection.recv(_DATA, parts[at]))
            if work.in_flight > 1:
                await b.send()
        elif work.verb == ROUND_TRIP:
            for _ in range(work.count):
                await connection.recv(_DATA, parts[0])
                await connection.send(_BACK, parts[0])

    async def _offer_all(self) -> None:
        work = self.work
        count = work.count * (2 if work.verb == SETUP else 1)
        ends = [self._offer() for _ in range(min(_AHEAD, count))]
        try:
            await self.b.send()
            for number in range(count):
                end = ends[0]
                if work.verb == READY:
                    assert isinstance(end, kvwire.Incoming)
                    for layer in range(work.layers):
                        await end.layer(layer)
                await over(end)
                del ends[0]
                if number + _AHEAD < count:
                    ends.append(self._offer())
        finally:
            for end in ends:
                end.abort("the other side has gone")
                await end.drained()

    def _offer(self) -> End:
        number = next(self.ends.ids)
        communicator = self.ends.communicator
        if self.work.verb in (PUSH, READY):
            return communicator.expect(number, *self._chosen)
        return mark_all(communicator.publish(number, *self._chosen))

    # --- both -------------------------------------------------------------------------

    @property
    def _chosen(self) -> tuple[kvwire.PagedCache, list[int]]:
        assert self.memory.pool is not None
        return self.memory.pool.chosen

    async def _keep_busy(self, begin: Callable[[int], Awaitable[object]]) -> None:
        """Do the work, with ``in_flight`` operations at any time."""
        pending: deque[Awaitable[object]] = deque()
        for number in range(self.work.count):
            if len(pending) == self.work.in_flight:
                await pending.popleft()
            pending.append(begin(number % self.work.in_flight))
        for request in pending:
            await request


async def over(end: End) -> None:
    """Wait until a transfer is complete and its memory is free."""
    require_complete(await end)
    await end.drained()


def require_complete(outcome: kvwire.Outcome) -> None:
    """Raise if an outcome lacks a block."""
    if not outcome.complete:
        reasons = "; ".join(outcome.missing.reasons)
        raise RuntimeError(f"{len(outcome.missing)} blocks are missing: {reasons}")


def mark_all(outgoing: kvwire.Outgoing) -> kvwire.Outgoing:
    """Mark all of a transfer as ready at once."""
    outgoing.ready()
    outgoing.finish()
    return outgoing
