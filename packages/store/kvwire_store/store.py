"""The KV store: put blocks under their hashes, and get them back anywhere.

>>> async with kvwire_store.BlockStore.open(["memory:8GiB"]) as store:
...     await store.put(hashes, cache, blocks)
...     found = await store.match(hashes, other)
...     outcome = await store.get(hashes[:found], other, free_blocks[:found])

A block is immutable: its hash names the tokens, and its namespace covers everything
else that its bytes depend on (:mod:`kvwire_store.namespace`). So a stored block is
never overwritten, and any cache for the same model can get it, whatever its layout and
block size.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, Self, overload

import msgspec

from kvwire.aio import (
    LoopThread,
    Opening,
    TurnBudget,
    run_to_completion,
    start_task,
    unusable,
    yields_before_raising,
)
from kvwire.errors import KVWireError, UsageError, nearest, with_remedy
from kvwire.kv.blocks import Blocks
from kvwire.kv.geometry import Geometry, GroupGeometry
from kvwire.kv.paged import PagedCache, computed_once
from kvwire.kv.plan import TransferPlan
from kvwire.limits import KIB, SNAPSHOT_ROWS_MAX
from kvwire.memory.container import memory_limit, resident_bytes
from kvwire.memory.device.device_copies import DeviceCopies
from kvwire.spi import RINGS, CallSnapshot, PartSnapshot, show_part
from kvwire.types import in_bytes
from kvwire_store.address import TierAddress
from kvwire_store.counters import StoreCounters
from kvwire_store.index import Index
from kvwire_store.limits import STORE_KEYS_MAX
from kvwire_store.management import HashTokens, StoreManagement
from kvwire_store.operations.asked import Asked, AskedGet, LaterFills
from kvwire_store.operations.base import Operation
from kvwire_store.operations.get import GetOperation
from kvwire_store.operations.group_request import (
    GroupRequest,
    Hashes,
    by_group,
    group_requests,
    keys_of,
)
from kvwire_store.operations.put import PutOperation
from kvwire_store.placement import leading
from kvwire_store.request import Settled, StoreRequest
from kvwire_store.tenants import Tenants
from kvwire_store.threads import Threads
from kvwire_store.tier_stack import TierStack
from kvwire_store.tiers.base import Tier, TierStats
from kvwire_store.tiers.coded import is_coded
from kvwire_store.tiers.registry import ELSEWHERE, PASSAGE, open_tier
from kvwire_store.tiers.slabs import Slabs

logger: logging.Logger = logging.getLogger("kvwire.store")

Write = Literal["through", "back"]
# The overhead of a call, as the number of bytes that could be copied in that time.
_CALL_BYTES: Final = 128 * KIB
# Gets that complete at once copy no more than this in one turn of the loop, which takes
# about 0.2 ms.
_IN_PLACE_BYTES: Final = 512 * KIB
_KIND: Final = attrgetter("namespace.digest", "keys.size")


class BlockStore(StoreManagement):
    """Stores blocks by their hashes, in memory and in the tiers below it.

    Created by :meth:`open`; bound to one event loop. Blocks pass through the memory
    tier, but for some that a server sends straight into the cache.
    """

    def __init__(
        self,
        memory: TierAddress,
        below: Sequence[Tier],
        write: Write,
        tenants: Tenants | None = None,
    ) -> None:
        memory.require("slab", "populate", "keep")
        nbytes = memory.size(memory.place)
        slab = memory.slab_bytes(nbytes)
        tenants = Tenants() if tenants is None else tenants
        self._name = memory.text
        self._thread = LoopThread()
        self._threads = Threads()
        self._tiers = TierStack(
            Index(Slabs(nbytes // slab, slab), tenants.shares("memory", nbytes)),
            below,
            through=write == "through",
            threads=self._threads,
            tenants=tenants,
            name=self._name,
        )
        keep = memory.choice("keep", ("yes", "no"), "yes")
        self._tiers.memory.keeps = keep == "yes"
        self._later = LaterFills(self._tiers.memory)
        self._live: dict[asyncio.Future[Any], Operation | AskedGet] = {}
        self._calls = set()
        # The close functions of this store's servers.
        self._servers: set[Callable[[], Awaitable[None]]] = set()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        # Bounds the bytes that gets copy in one turn of the loop.
        self._turn = TurnBudget(_IN_PLACE_BYTES)
        # The lower tiers that are not closed yet.
        self._open = list(below)
        # Looked up only once, since a store call should stay cheap.
        self._logs = logger.isEnabledFor(logging.DEBUG)
        show_part(self, _shown)

    @staticmethod
    def open(
        tiers: Sequence[str],
        *,
        write: Write = "through",
        tenants: Sequence[str] = (),
    ) -> OpeningStore:
        """Open a store: ``await`` it, or use it as ``async with``.

        Args:
            tiers: The addresses of the tiers, fastest first; the first is
                ``memory:SIZE``, or a tier that other processes share, such as
                ``kvwire://``: then blocks only pass through memory.
            write: When a put completes. ``"through"``: when a tier that survives a
                restart has the blocks, if there is such a tier. ``"back"``: when memory
                has them; they are written to lower tiers when memory needs the room, or
                when the store closes.
            tenants: The tenants that share the store, such as
                ``"acme?disk=100GiB&ttl=3600"``; see
                :class:`kvwire_store.tenants.Tenant`.

        Raises:
            UsageError: A tier or tenant cannot be parsed, or cannot be used.
            BackendUnavailable: The library for a tier or its codec is missing.
        """
        return OpeningStore(tiers, write, tenants)

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else f"{len(self._tiers.memory.index)} blocks in memory"
        )
        return f"<BlockStore {self.name}; {state}>"

    # --- blocks -----------------------------------------------------------------------

    @overload
    async def match(
        self,
        hashes: Sequence[bytes],
        cache: PagedCache | None = None,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> int: ...
    @overload
    async def match(
        self,
        hashes: Mapping[str, Sequence[bytes]],
        cache: PagedCache | None = None,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> dict[str, int]: ...
    @yields_before_raising
    async def match(
        self,
        hashes: Hashes,
        cache: PagedCache | None = None,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> int | dict[str, int]:
        """Return the number of a chain's leading blocks that are stored; reads no disk.

        A block may be evicted before the get that follows, which then reports it
        missing.

        Args:
            hashes: The hashes of the chain; for a grouped cache ``{group: hashes}``.
            cache: The cache that needs the blocks. It may be left out as long as the
                store has blocks for only one kind of cache.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.

        Returns:
            The number, or ``{group: number}``.

        Raises:
            UsageError: The hashes are invalid, or `cache` is needed.
            ClosedOK: The store is closed.

        Cancel safety: safe, it only reads.
        """
        self._check("BlockStore.match", cache, optional=True)
        if cache is not None:
            namespaces = self._namespaces(cache, hash_tokens, tenant)
            groups = tuple(namespaces)
        else:
            namespaces = self._known_namespaces(hashes, tenant)
            named = hashes if isinstance(hashes, Mapping) else namespaces
            groups = tuple(named) or ("",)
        found: dict[str, int] = {}
        for name, listed in by_group(hashes, groups).items():
            found[name] = 0
            if name in namespaces:
                keys = keys_of(listed, namespaces[name])
                found[name] = leading(await self._tiers.find(keys))
        return found if isinstance(hashes, Mapping) else next(iter(found.values()))

    @yields_before_raising
    async def present(
        self,
        hashes: Sequence[bytes],
        cache: PagedCache,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
    ) -> list[bool]:
        """Return for each hash whether its block is stored; they need not form a chain.

        Args:
            hashes: The blocks' hashes.
            cache: The cache that needs the blocks; it must have one group.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.

        Raises:
            UsageError: The hashes are invalid, or the cache has several groups.
            ClosedOK: The store is closed.

        Cancel safety: safe, it only reads.
        """
        self._check("BlockStore.present", cache)
        namespaces = self._namespaces(cache, hash_tokens, tenant)
        (keys,) = self._keys(hashes, namespaces).values()
        found: list[bool] = (await self._tiers.find(keys)).tolist()
        return found

    def put(
        self,
        hashes: Hashes,
        cache: PagedCache,
        blocks: Blocks,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
        after: object = None,
    ) -> StoreRequest:
        """Store blocks under their hashes; mark blocks already stored as used.

        Do not write to the blocks until the request has drained. The outcome shows for
        each block whether it is stored now, or the reason why not. Empty lists are
        allowed; their outcome is empty and complete.

        Args:
            hashes: The hashes of full blocks, in token order; for a grouped cache
                ``{group: hashes}``. One per block, unless ``hash_tokens`` is given.
            cache: The cache that holds the blocks.
            blocks: Their block ids, or ``{group: ids}``.
            hash_tokens: Tokens per hash, if it differs from the tokens per block: one
                number for all groups, or one for each.
            tenant: The tenant that owns the blocks, one of those passed to
                :meth:`open`.
            after: For a cache on a device: a torch or CuPy event that fires once the
                blocks are written. By default an event is recorded now, on this
                thread's current stream.

        Raises:
            UsageError: Hashes and blocks do not match, or `after` is not an event.
            BackendUnavailable: The cache is on a device that does not work.
            ClosedOK: The store is closed.

        Cancel safety: cancelling the await stops the waiting, not the put; the blocks
        are free once the request's ``drained()`` returns.
        """
        return self._move(
            PutOperation, hashes, cache, blocks, hash_tokens, tenant, after
        )

    def get(
        self,
        hashes: Hashes,
        cache: PagedCache,
        blocks: Blocks,
        *,
        hash_tokens: HashTokens = None,
        tenant: str = "",
        after: object = None,
    ) -> StoreRequest:
        """Fill blocks with the stored blocks of some hashes.

        The outcome is like a transfer's: the blocks that landed, and the reasons why
        others did not. A missing block may contain arbitrary bytes.

        Args:
            hashes: See :meth:`put`.
            cache: The cache to fill.
            blocks: The block ids to fill, or ``{group: ids}``.
            hash_tokens: See :meth:`put`.
            tenant: The tenant that owns them.
            after: For a cache on a device: an event that fires once the blocks may be
                overwritten; see :meth:`put`. Work queued behind the event must not use
                the blocks before the request has drained.

        Raises:
            UsageError: Hashes and blocks do not match, the cache cannot be written to,
                or `after` is not an event.
            BackendUnavailable: The cache is on a device that does not work.
            ClosedOK: The store is closed.

        Cancel safety: cancelling the await stops the waiting, not the get; the blocks
        are free once the request's ``drained()`` returns.
        """
        return self._move(
            GetOperation, hashes, cache, blocks, hash_tokens, tenant, after
        )

    def require_room(self, cache: PagedCache, *, tenant: str = "") -> None:
        """Check before a put that a block of a cache fits every tier.

        Without this check, every put of blocks that are too large would store nothing
        and log that again. A tier that cannot be reached counts as having room, and so
        does a disk with a codec.

        Args:
            cache: The cache whose blocks will be put.
            tenant: The tenant that owns them.

        Raises:
            UsageError: A block does not fit; the text names the tier and both sizes.
            ClosedOK: The store is closed.
        """
        self._check("BlockStore.require_room", cache)
        number = self._tiers.tenants.number(tenant) if tenant else 0
        for namespace in self._namespaces(cache, None, tenant).values():
            memory = self._tiers.memory.too_large(namespace.image_bytes, number)
            below = {one.name: one.too_large(namespace) for one in self._tiers.below}
            for name, why in {self._name: memory, **below}.items():
                if why:
                    raise UsageError(f"tier {name!r}: {why}")

    # --- the store --------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The addresses of its tiers."""
        return ", ".join((self._name, *(tier.name for tier in self._tiers.below)))

    @property
    def counters(self) -> StoreCounters:
        """Counts since the store was opened."""
        return self._tiers.counters

    def stats(self) -> dict[str, TierStats]:
        """Return each tier's numbers, by the tier's name."""
        below = {tier.name: tier.stats() for tier in self._tiers.below}
        return {self._name: self._tiers.memory.stats()} | below

    @property
    def report(self) -> dict[str, str]:
        """Each tier's reason for accepting no blocks, or its last failure; else ""."""
        return {self._name: ""} | {t.name: t.error for t in self._tiers.below}

    @yields_before_raising
    async def flush(self) -> None:
        """Wait until the blocks of all puts so far would survive a power cut.

        Raises:
            OSError: Some would not, or may not, because a disk is full or fails.
            ClosedOK: The store is closed.

        Cancel safety: safe, it may be called again.
        """
        self._check("BlockStore.flush", None, optional=True)
        with self._under_way():
            # Excludes operations that begin meanwhile, or this might never end.
            if so_far := tuple(self._live):
                await asyncio.wait(so_far)
            await self._tiers.memory.settle()
            await self._tiers.flush()

    async def close(self) -> None:
        """Close the store after running calls have ended; it may be called repeatedly.

        New calls are refused from now on. The store's servers are closed first.

        Cancel safety: only the waiting is cancelled: the close continues by itself;
        call it again to wait for its end.
        """
        self._thread.check("BlockStore.close")
        # A server of this store may begin operations until the server itself is closed.
        self._closed |= not self._servers
        if self._closing is None or self._closing.done():
            # Closed again, in case the close failed or was cancelled with its loop.
            self._closing = start_task(self._close())
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        """Return the store itself."""
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it completely, even if the caller is cancelled repeatedly."""
        await self._thread.leave(self.close)

    # --- inside -----------------------------------------------------------------------

    async def _close(self) -> None:
        while self._servers:
            await next(iter(self._servers))()
        self._closed = True
        while under_way := (*self._live, *self._calls):
            await asyncio.wait(under_way)
        self._later.fill()
        await self._tiers.memory.settle()
        if self._open:
            await self._tiers.memory.empty()
        while self._open:
            # A tier releases its resources even if its close is cancelled.
            await self._open.pop(0).close()
        # First, because a thread holds its copied blocks until it has finished.
        self._threads.close()
        self._tiers.memory.close()

    def _move(
        self,
        kind: type[PutOperation | GetOperation],
        hashes: Hashes,
        cache: PagedCache,
        blocks: Blocks,
        hash_tokens: HashTokens,
        tenant: str,
        after: object,
    ) -> StoreRequest:
        """Begin a put or get, planned like a transfer with a peer."""
        self._check(f"BlockStore.{kind.verb}", cache)
        if after is not None or cache.device is not None:
            after = self._threads.devices.prepare(cache.device, after)
        lists = cache.block_lists(blocks, least=0)
        namespaces = self._namespaces(cache, hash_tokens, tenant)
        requests = group_requests(cache, lists, hashes, namespaces)
        # The part of the plan that is independent of the blocks is made once.
        template = computed_once(
            cache,
            (kind.verb, *map(_KIND, requests)),
            lambda: TransferPlan(cache, lists, _images(requests), kind.side).template,
        )
        asked = cache, lists, template
        # A get of a few blocks may end without a task.
        taskless = kind is GetOperation and cache.device is None
        taskless = taskless and not (self._logs or RINGS)
        if taskless and (request := self._requested(requests, asked)) is not None:
            return request
        work = kind(self._tiers, requests, after)
        work.asked = asked
        moving = (self._moved_now(work) if taskless else None) or self._begin(work)
        return StoreRequest(work, moving, self._thread)

    def _requested(
        self, requests: Sequence[GroupRequest], asked: Asked
    ) -> StoreRequest | None:
        """Request a get's blocks from the first lower tier, if it answers at once."""
        below = self._tiers.below
        if len(requests) > 1 or not below or below[0].mapped is not None:
            return None
        keys = requests[0].keys
        nbytes = keys.size * requests[0].namespace.image_bytes
        if not 0 < nbytes <= below[0].asks_bytes or keys.size > STORE_KEYS_MAX:
            return None
        over = Settled(self._thread.loop)
        get = AskedGet(self._tiers, requests[0], asked, partial(self._answered, over))
        if not get.begin(below[0]):
            return None
        self._follow(get, over)
        return StoreRequest(get, over, self._thread)

    def _moved_now(self, work: Operation) -> Settled | None:
        """Return the outcome if a small get can end within this turn."""
        assert isinstance(work, GetOperation)
        if not work.is_small:
            return None
        nbytes = work.nbytes + _CALL_BYTES
        over = Settled(self._thread.loop)
        if self._turn.has_room(nbytes):
            if not work.at_once():
                return None
            self._turn.spend(nbytes)
            over.set_result(work.end())
        elif work.is_near:
            self._follow(work, over)
            self._turn.later(nbytes, partial(self._move_in_turn, work, over))
        else:
            return None
        return over

    def _move_in_turn(self, work: GetOperation, over: Settled) -> None:
        """Copy in the turn that has room; a task does the rest."""
        try:
            if work.at_once():
                over.settle(work.end())
                return
        except Exception as exc:  # noqa: BLE001 - the caller's await raises it
            work.drained.set()
            over.fail(exc)
            return
        over.follow(start_task(work.run()))

    def _answered(
        self, over: Settled, get: AskedGet, rest: GetOperation | None
    ) -> None:
        """End a get whose blocks came in an answer, or continue it in a task."""
        if rest is None or rest.is_over:
            try:
                over.settle(get.end() if rest is None else rest.end())
            except Exception as exc:  # noqa: BLE001 - the caller's await raises it
                get.drained.set()
                over.fail(exc)
        else:
            over.follow(start_task(rest.run()))
        if get.keeps:
            self._later.add(get, over.get_loop())

    def _begin(self, work: Operation) -> asyncio.Task[Any]:
        """Start an operation in a task; a close waits for it."""
        task = start_task(work.run())
        self._follow(work, task)
        return task

    async def _run(self, work: Operation) -> None:
        """Run an operation in the caller's task; closing the store waits for it.

        Cancel safety: a running copy is finished first.
        """
        over = asyncio.get_running_loop().create_future()
        self._follow(work, over)
        try:
            await work.run()
        finally:
            over.set_result(None)

    def _follow(self, work: Operation | AskedGet, task: asyncio.Future[Any]) -> None:
        self._live[task] = work
        task.add_done_callback(self._live.pop)
        if self._logs:
            logger.debug("%s: %s of %d blocks", self.name, work.verb, work.blocks)
            task.add_done_callback(
                lambda _: logger.debug("%s: over, %r", self.name, self.counters)
            )
        if RINGS and task.get_loop() in RINGS:
            ring = RINGS[task.get_loop()]
            key = f"store {id(work):x}"
            ring.note("begin", key, f"{work.blocks} blocks", work.verb)
            task.add_done_callback(lambda _: ring.note("end", key, "over", 0, ""))

    def _snapshot(self) -> PartSnapshot:
        """Describe the running calls; see :meth:`kvwire.Communicator.snapshot`."""
        calls = [
            CallSnapshot(
                text=f"{work.verb} of {work.blocks:,} blocks", age_s=work.age_s
            )
            for work in self._live.values()
        ]
        counters = self.counters
        pinned = self._tiers.memory.index.pinned
        return PartSnapshot(
            kind="store",
            name=self.name,
            calls=tuple(calls[:SNAPSHOT_ROWS_MAX]),
            summary=(
                f"{pinned:,} blocks pinned, {counters.hit_blocks:,} found, "
                f"{counters.missed_blocks:,} not found"
            ),
            counters=msgspec.structs.asdict(counters),
            trouble={name: reason for name, reason in self.report.items() if reason},
        )


def _shown(store: BlockStore) -> PartSnapshot:
    return store._snapshot()  # noqa: SLF001 - of this file


def _images(requests: tuple[GroupRequest, ...]) -> Geometry:
    """Describe the images of a call as a geometry."""
    return Geometry(
        tuple(
            GroupGeometry(
                name=request.group.name,
                spec=request.namespace.spec,
                order=request.group.order,
                blocks=request.keys.size,
            )
            for request in requests
        )
    )


async def _close_to_end(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await run_to_completion(close())


def _refused(address: TierAddress, error: OSError) -> KVWireError:
    """Return the error if the system refuses a tier's resources."""
    if isinstance(error, KVWireError):
        return error
    return UsageError(f"tier {address.text!r}: {with_remedy(error)}")


class StoreAccess(NamedTuple):
    """Access to a store's internals, for this library's own code.

    Attributes:
        tiers: The tiers that hold its blocks.
        thread: The thread that may call it.
        devices: Copies of blocks in GPU memory.
        servers: The close functions of its servers; closing the store calls them first.
        run: Runs an operation in the caller's task; closing waits for it.
        is_closed: Whether new calls are refused.
    """

    tiers: TierStack
    thread: LoopThread
    devices: DeviceCopies
    servers: set[Callable[[], Awaitable[None]]]
    run: Callable[[Operation], Coroutine[Any, Any, None]]
    is_closed: Callable[[], bool]


def access_to(store: BlockStore) -> StoreAccess:
    """Return a store's internals, for a server or connector in this library."""
    return StoreAccess(
        tiers=store._tiers,  # noqa: SLF001 - of this file
        thread=store._thread,  # noqa: SLF001
        devices=store._threads.devices,  # noqa: SLF001
        servers=store._servers,  # noqa: SLF001
        run=store._run,  # noqa: SLF001
        is_closed=lambda: store._closed,  # noqa: SLF001
    )


@unusable(
    "it is not open yet: `it = await kvwire_store.BlockStore.open(...)`, or `async "
    "with kvwire_store.BlockStore.open(...) as it`",
    result=BlockStore,
)
class OpeningStore(Opening):
    """Opens a store: await it, or use it as ``async with``."""

    _made_by = "kvwire_store.BlockStore.open"

    def __init__(
        self,
        tiers: Sequence[str],
        write: Write,
        tenants: Sequence[str],
    ) -> None:
        self._tenants = Tenants(tenants)
        if write not in ("through", "back"):
            hint = nearest(write, ("through", "back"))
            raise UsageError(f'write={write!r}: use "through" or "back"; {hint}')
        given: object = tiers
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise UsageError('tiers: pass a list, such as ["memory:8GiB"]')
        self._tiers = [TierAddress.parse(text) for text in tiers]
        if self._tiers[0].scheme in ELSEWHERE:
            self._tiers.insert(0, TierAddress.parse(PASSAGE))
        if self._tiers[0].scheme != "memory":
            raise UsageError(
                f"tiers: {self._tiers[0].text!r} comes first, but every block passes "
                "through memory; begin with memory:SIZE"
            )
        is_coded(self._tiers[0])
        for one in self._tiers[1:]:
            is_coded(one)
        self._write: Write = write
        self._store: BlockStore | None = None

    def __await__(self) -> Generator[Any, Any, BlockStore]:
        return self._open().__await__()

    async def __aenter__(self) -> BlockStore:
        """Open the store; it is closed at the end of the block."""
        self._store = await self._open()
        return self._store

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it, as the store's own ``async with`` does."""
        assert self._store is not None
        await self._store.__aexit__(kind, error, trace)

    @yields_before_raising
    async def _open(self) -> BlockStore:
        self._begin()
        below: list[Tier] = []
        async with AsyncExitStack() as opened:
            for address in self._tiers[1:]:
                try:
                    below.append(await open_tier(address, self._tenants))
                except OSError as exc:
                    raise _refused(address, exc) from exc
                opened.push_async_callback(_close_to_end, below[-1].close)
            memory = self._tiers[0]
            populate = memory.choice("populate", ("yes", "no"), "no") == "yes"
            _compare_with_container(memory)
            try:
                store = BlockStore(memory, below, self._write, self._tenants)
            except MemoryError:
                raise UsageError(
                    f"tier {memory.text!r}: this machine cannot allocate it and the "
                    "index of its blocks; open a smaller tier"
                ) from None
            except OSError as exc:
                raise _refused(memory, exc) from exc
            opened.pop_all()  # they are the store's now
            opened.push_async_exit(store)
            if populate:
                tier = store._tiers.memory  # noqa: SLF001 - of this file
                await run_to_completion(asyncio.to_thread(tier.populate))
            opened.pop_all()
        return store


def _compare_with_container(memory: TierAddress) -> None:
    """Refuse memory that this process's container would be killed for."""
    limit = memory_limit()
    nbytes = memory.size(memory.place)
    if limit is None:
        return
    if nbytes > limit.nbytes:
        raise UsageError(
            f"tier {memory.text!r}: this machine cannot hold it: it is larger than the "
            f"memory of this process's container, {limit}, and the system kills the "
            "process once that is full; open a smaller tier or raise the limit"
        )
    rest = limit.nbytes - resident_bytes()
    if nbytes > rest:
        logger.warning(
            "tier %r and what this process uses already are more than the memory of "
            "its container, %s: the system kills it once that is full; open a tier of "
            "less than %s or raise the limit",
            memory.text,
            limit,
            in_bytes(max(0, rest)),
        )
