"""A tier on many store servers: ``kvwire://role=store?directory=redis://host:6379``.

The address has a selector, as for a peer. The directory's members that match it are the
nodes, and each block is stored on one of them, see :func:`placed`. Only connected nodes
are used: a node whose connection is lost, or which missed a deadline, is skipped until
it has been redialled, and its blocks are missing meanwhile. Nothing is copied from one
node to another.

A node's name is the label ``node`` in its record, or else its address. It keeps its
share of the blocks as long as its name stays the same.

Every client computes the same number for each pair of block and node, and the node with
the highest number has the block (rendezvous hashing). So no table is needed. A new node
takes its share from all others, and nothing else moves. When a node leaves, its share
is spread over all others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash

import kvwire
from kvwire.aio import end_task, gather_all, run_to_completion, start_task
from kvwire.directory import Change, ChangeKind, Directory, Record, Selector
from kvwire.directory.registry import open_directory
from kvwire.errors import KVWireError, UsageError, error_text, without_password
from kvwire.kv.blocks import Bits, Ids
from kvwire_store.address import TierAddress
from kvwire_store.keys import Keys, Orders, absent
from kvwire_store.limits import (
    STORE_NODE_TIMEOUT_S,
    STORE_NODES_MAX,
    STORE_TIMEOUT_S_MAX,
)
from kvwire_store.namespace import Namespace
from kvwire_store.placement import BlockState, Placement, Placing, Verb, VerbKind
from kvwire_store.tiers.base import Batch, BlockResult, BlockResults, Tier
from kvwire_store.tiers.remote import OPTIONS, RemoteTier, client_config

logger: logging.Logger = logging.getLogger("kvwire.store")

_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True)
class _Node:
    """One store server, and the task that dials it for the first time."""

    name: str
    address: str
    seed: int
    tier: RemoteTier
    opening: asyncio.Task[None]


class ShardedTier(Tier):
    """Keeps each block at one of many store servers. Made by :meth:`open`.

    Attributes:
        nodes: The servers that are announced, by their names.
    """

    def __init__(
        self,
        name: str,
        communicator: kvwire.Communicator,
        directory: Directory,
        selector: Selector,
        timeout_s: float,
    ) -> None:
        super().__init__(name)
        self._communicator = communicator
        self._directory = directory
        self._selector = selector
        self._timeout_s = timeout_s
        self._records: dict[str, Record] = {}
        self.nodes: dict[str, _Node] = {}
        self._shared_names: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, address: TierAddress) -> ShardedTier:
        """Open a tier ``kvwire://SELECTOR?directory=URL``, with one server's options.

        Without ``directory``, the configuration's directory is used. If the directory
        or a node
        cannot be reached, ``error`` has the reason, and it is tried again.

        Cancel safety: nothing stays open.
        """
        address.require("directory", *OPTIONS)
        timeout_s = address.number("timeout", STORE_NODE_TIMEOUT_S, STORE_TIMEOUT_S_MAX)
        config = client_config(address)
        try:
            selector = Selector.parse(address.place.removeprefix("//"))
            directory = open_directory(config.directory or "file:")
        except KVWireError as exc:
            raise UsageError(f"tier {without_password(address.text)!r}: {exc}") from exc
        communicator = await kvwire.open(config)
        name = address.text
        if "@" in name:  # the directory's password
            name = f"kvwire://{selector}?directory={directory}"
        tier = cls(name, communicator, directory, selector, timeout_s)
        try:
            await tier._begin()
        except BaseException:
            await run_to_completion(tier.close())
            raise
        return tier

    @property  # type: ignore[misc]
    def error(self) -> str:
        if not self.nodes:
            return (
                "no store server has announced itself; kvwire store serve --directory"
            )
        wrong = [
            f"{n.name}: {n.tier.error}" for n in self.nodes.values() if n.tier.error
        ]
        return f"of {len(self.nodes)} nodes " + "; ".join(wrong) if wrong else ""

    @property
    def reason(self) -> str:  # type: ignore[override]
        tiers = [node.tier for node in self.nodes.values()]
        away = any(tier.reason for tier in tiers)
        return self.error if away or not tiers else ""

    @property
    def durable(self) -> bool:  # type: ignore[override]
        tiers = self.asked()
        return bool(tiers) and all(node.tier.durable for node in tiers)

    @property
    def taking(self) -> bool:
        return any(node.tier.taking for node in self.nodes.values())

    @property
    def asks(self) -> bool:  # type: ignore[override]
        return any(node.tier.asks for node in self.nodes.values())

    async def find(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``.

        One round trip to each node, side by side.
        """
        orders = absent(keys.size)

        async def ask(tier: RemoteTier, which: Ids) -> None:
            orders[which] = await tier.find(keys[which])

        await gather_all(*(ask(tier, which) for tier, which in self._shards(keys)))
        return orders

    async def holds(self, keys: Keys) -> Bits:
        held = np.zeros(keys.size, np.bool_)

        async def ask(tier: RemoteTier, which: Ids) -> None:
            held[which] = await tier.holds(keys[which])

        await gather_all(*(ask(tier, which) for tier, which in self._shards(keys)))
        return held

    def touch(self, keys: Keys) -> None:
        """Record a use, which is sent to the block's node with the next request."""
        for tier, which in self._shards(keys):
            tier.touch(keys[which])

    async def delete(self, keys: Keys) -> None:
        """Delete blocks at every node: an older placement may have put them there."""
        await self._everywhere(lambda tier: tier.delete(keys))

    async def delete_namespace(self, digest: bytes) -> None:
        await self._everywhere(lambda tier: tier.delete_namespace(digest))

    async def apply(self, verb: Verb, namespace: Namespace, keys: Keys) -> Placement:
        """See Tier. Asks all nodes: an older placement may have put blocks there.

        A prefetch goes only to the node where a get looks.
        """
        placing = Placing(keys.size)
        if self.reason:
            placing.rule(_ALL, BlockState.DEFERRED, self.reason)
        if verb.kind is VerbKind.PREFETCH:
            shards = self._shards(keys)
        else:
            shards = [(node.tier, np.arange(keys.size)) for node in self.asked()]
        for (_, which), part in zip(
            shards,
            await gather_all(
                *(tier.apply(verb, namespace, keys[which]) for tier, which in shards)
            ),
            strict=True,
        ):
            placing.better(which, part, verb)
        return placing.end()

    def namespaces(self) -> Iterable[Namespace]:
        return [one for node in self.asked() for one in node.tier.namespaces()]

    async def flush(self) -> None:
        await self._everywhere(lambda tier: tier.flush())

    async def close(self) -> None:
        try:
            if self._watching is not None:
                await end_task(self._watching)
            self._records.clear()
            self._follow()
            if self._leaving:
                await asyncio.wait(self._leaving)
            await self._directory.close()
        finally:
            await self._communicator.close()

    # --- where blocks are -------------------------------------------------------------

    def asked(self) -> list[_Node]:
        """Return the servers that this side is connected to."""
        return [node for node in self.nodes.values() if node.tier.connected]

    def _shards(self, keys: Keys) -> list[tuple[RemoteTier, Ids]]:
        """Return the connected nodes for the blocks, each with its positions."""
        nodes = self.asked()
        where = placed(keys, [node.seed for node in nodes])
        shards = ((n.tier, np.flatnonzero(where == at)) for at, n in enumerate(nodes))
        return [(tier, which) for tier, which in shards if which.size]

    def too_large(self, namespace: Namespace) -> str:
        told = (node.tier.too_large(namespace) for node in self.nodes.values())
        return next(filter(None, told), "")

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        async def write(tier: RemoteTier, part: Batch) -> BlockResults:
            if not tier.taking:
                return np.full(part.keys.size, BlockResult.REFUSED, np.uint8)
            return await tier.write(namespace, part)

        return await self._moved(batch, write)

    async def _read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        return await self._moved(batch, lambda tier, part: tier.read(namespace, part))

    async def _moved(self, batch: Batch, move: Any) -> BlockResults:
        """Move a batch, all nodes' parts concurrently."""
        results = np.full(batch.keys.size, BlockResult.FAILED, np.uint8)

        async def one(tier: RemoteTier, which: Ids) -> None:
            part = batch.selected(which)
            results[which] = await move(tier, part)
            batch.orders[which] = part.orders
            batch.tell(which, part)

        shards = self._shards(batch.keys)
        await gather_all(*(one(tier, which) for tier, which in shards))
        return results

    async def _everywhere(
        self, do: Callable[[RemoteTier], Coroutine[Any, Any, None]]
    ) -> None:
        """Call every node; raise if one is not connected."""
        await self._dialled()
        if not self.nodes:
            raise OSError(f"{self.name}: {self.error}")
        await gather_all(*(do(node.tier) for node in self.nodes.values()))

    async def _dialled(self) -> None:
        """Wait until each known node has been dialled once."""
        if opening := [node.opening for node in self.nodes.values()]:
            await asyncio.wait(opening)

    # --- the nodes --------------------------------------------------------------------

    async def _begin(self) -> None:
        """Wait for the nodes known now, then follow the directory."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for record in await self._directory.members(self._selector):
                    self._records[record.key] = record  # bounded: MEMBERS_MAX
        except OSError as exc:  # a timeout is one as well
            logger.warning("%s: %s; retrying", self.name, error_text(exc))
        self._follow()
        await self._dialled()
        self._watching = start_task(self._watch())

    async def _watch(self) -> None:
        async with aclosing(self._directory.watch(self._selector)) as changes:
            async for change in changes:
                self._take(change)

    def _take(self, change: Change) -> None:
        key = change.record.key
        self._records.pop(key, None)
        if change.kind is not ChangeKind.LEFT:
            self._records[key] = change.record  # bounded: MEMBERS_MAX
        self._follow()

    def _follow(self) -> None:
        """Dial and drop nodes to match the records; the last of equal names counts."""
        wanted: dict[str, str] = {}
        for record in self._records.values():
            name = _name(record)
            if name in wanted and name not in self._shared_names:
                self._shared_names.add(name)  # bounded: MEMBERS_MAX
                logger.warning(
                    "%s: %s and %s have the name %s, so only the second is used. If "
                    "both run, give each its own: --label node=NAME",
                    self.name,
                    wanted[name],
                    record.address,
                    name,
                )
            wanted[name] = record.address
        for node in list(self.nodes.values()):
            if wanted.get(node.name) != node.address:
                del self.nodes[node.name]
                task = start_task(_leave(node))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        for name, address in wanted.items():
            if name in self.nodes:
                continue
            if len(self.nodes) >= STORE_NODES_MAX:
                logger.warning("%s: more than %d nodes", self.name, STORE_NODES_MAX)
                return
            tier = RemoteTier(name, self._communicator, address, self._timeout_s)
            opening = start_task(_open(tier))
            self.nodes[name] = _Node(name, address, seed_of(name), tier, opening)


def _name(record: Record) -> str:
    return record.labels.get("node") or record.address


async def _open(tier: RemoteTier) -> None:
    try:
        await tier.dial()
    except KVWireError as exc:
        # A record may contain anything; it costs its reader only this attempt.
        tier.error = tier.reason = error_text(exc)


async def _leave(node: _Node) -> None:
    await end_task(node.opening)
    await node.tier.hang_up()


# The finalizer of SplitMix64: each input bit flips half of the output bits.
_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST: Final = 31


def seed_of(node: str) -> int:
    """Return a node's seed for :func:`placed`, the same at every client."""
    return xxhash.xxh3_64_intdigest(node.encode())


def placed(keys: Keys, seeds: Sequence[int]) -> Ids:
    """Return the position of each block's node; there is at least one node."""
    digests = map(xxhash.xxh3_64_intdigest, keys.tolist())
    names = np.fromiter(digests, np.uint64, keys.size)
    best = np.zeros(keys.size, np.uint64)
    where = np.zeros(keys.size, np.int64)
    for number, seed in enumerate(seeds):
        drawn = names ^ np.uint64(seed)
        for shift, factor in _STEPS:
            drawn = (drawn ^ (drawn >> np.uint64(shift))) * np.uint64(factor)
        drawn ^= drawn >> np.uint64(_LAST)
        better = drawn > best
        best[better] = drawn[better]
        where[better] = number
    return where
