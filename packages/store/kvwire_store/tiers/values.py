"""Tiers in services that keep values under names: object stores and Redis.

:class:`ValueIO` moves values; the services differ only in this. :class:`KeyValueTier`
is the same for all of them: the format of a value, which blocks are known to exist or
to be absent, checks for damage, and reconnecting.

A value is one block: a head with the key, the order and checksums, followed by the
image or a codec's entry, see :mod:`kvwire_store.tiers.object_format`. So a value that
was cut off, replaced or returned by mistake is not taken for the block.

While a service cannot be reached every call fails at once, with the reason.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from itertools import repeat
from typing import ClassVar, Final, Self, TypeAlias

import numpy as np

from kvwire.aio import Upkeep, run_to_completion
from kvwire.errors import UsageError, error_text, printable
from kvwire.kv.blocks import Bits, Ids
from kvwire_store.address import TierAddress
from kvwire_store.keys import Key, Keys, Orders, absent
from kvwire_store.limits import (
    STORE_NODE_TIMEOUT_S,
    STORE_OBJECT_ABSENT_S,
    STORE_OBJECTS_KNOWN,
    STORE_REDIAL_S,
    STORE_REDIAL_S_MAX,
    STORE_TIMEOUT_S_MAX,
)
from kvwire_store.namespace import ABSENT, UNKNOWN, Namespace
from kvwire_store.tiers.base import (
    DAMAGED,
    LANDED,
    MISSING,
    Batch,
    BlockResult,
    BlockResults,
)
from kvwire_store.tiers.coded import CodedTier
from kvwire_store.tiers.object_format import ObjectHead, path_of, read_objects

Head: TypeAlias = bytes | memoryview | BlockResult
"""A value's beginning, or MISSING, or FAILED; LANDED if it exists but was not read."""


class ValueIO(ABC):
    """Moves values to and from one service; holds everything specific to the service.

    Failures of the service raise nothing, unless a method is documented to raise: the
    values concerned get a failed result, and :meth:`KeyValueTier.note` gets the reason.
    """

    async def connect(self) -> None:  # noqa: B027 - some connect with each request
        """Connect to the service; raise one of ``faults`` if that fails."""

    async def disconnect(self) -> None:  # noqa: B027 - some hold nothing
        """Drop the client, if there is one. Never raises."""

    async def is_back(self) -> bool:
        """Return whether the service is reachable again; reconnects if needed."""
        await self.connect()
        return True

    @abstractmethod
    async def heads(self, keys: Keys) -> list[Head]:
        """Read the first ``HEAD_BYTES`` of each value, or check its existence."""

    @abstractmethod
    async def put(self, batch: Batch) -> BlockResults:
        """Write values, in the order of the batch."""

    @abstractmethod
    async def get_into(self, batch: Batch) -> BlockResults:
        """Read values, and pass each to :meth:`KeyValueTier.unpack`."""

    @abstractmethod
    async def remove(self, keys: Keys) -> Bits:
        """Remove values; return for each whether it no longer exists."""

    @abstractmethod
    async def remove_folder(self, folder: str) -> None:
        """Remove every value whose name begins with a folder's.

        Raises:
            OSError: Some values may remain; the text has the reason.
        """


class KeyValueTier(ValueIO, CodedTier):
    """Keeps each block as a value of a service. Subclassed; made by :meth:`open`.

    Attributes:
        faults: The exceptions of its client if the service cannot be reached.
        refusals: The exceptions among ``faults`` that another attempt would not change.
        timeout_s: How long it waits for an answer, unless the address has a
            ``timeout``.
        separator: The text between the prefix and the block in a value's name; "" if
            the address's place includes the prefix.
        remembers: Whether this side may cache which blocks exist; False if the service
            evicts values.
    """

    faults: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    refusals: ClassVar[tuple[type[Exception], ...]] = ()
    timeout_s: ClassVar[float] = STORE_NODE_TIMEOUT_S
    separator: ClassVar[str] = "/"
    remembers: ClassVar[bool] = False

    def __init__(self, address: TierAddress) -> None:
        super().__init__(address)
        prefix = address.options.get("prefix", "kvwire")
        self._prefix = f"{prefix}{self.separator}" if self.separator else ""
        self._timeout_s = address.number("timeout", self.timeout_s, STORE_TIMEOUT_S_MAX)
        self._upkeep = Upkeep(
            STORE_REDIAL_S, STORE_NODE_TIMEOUT_S, steady_s=STORE_REDIAL_S_MAX
        )
        self._memory = _Memory() if self.remembers else None
        # The last failure of each kind of request that has not succeeded since.
        self._noted: dict[str, str] = {}

    @classmethod
    async def open(cls, address: TierAddress) -> Self:
        """Open a tier; see the class for its address.

        A service that cannot be reached is no error: ``error`` has the reason, and the
        service is tried again.

        Cancel safety: nothing stays open.
        """
        tier = cls(address)
        try:
            await tier.connect()
        except cls.refusals as exc:
            await tier.close()
            text = printable(error_text(exc))
            raise UsageError(f"tier {address.text!r}: {text}") from None
        except cls.faults as exc:
            tier.lost(exc)
        except BaseException:
            await run_to_completion(tier.close())
            raise
        return tier

    @property
    def reason(self) -> str:  # type: ignore[override]
        return self._upkeep.reason

    async def find(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``.

        ``UNKNOWN`` if the service cannot return the head of a value alone. Blocks that
        are not remembered cost one round trip.
        """
        memory = self._memory
        orders = absent(keys.size)
        asked = np.arange(keys.size)
        if memory is not None:
            orders, asked = memory.look_up(keys)
            before = memory.versions(keys[asked])
        heads = await self.heads(keys[asked]) if asked.size else []
        if heads and not any(head is BlockResult.FAILED for head in heads):
            self.settle("get")
        names = keys[asked].tolist()
        # An answer from before a put or delete is outdated after it.
        same = [False] * asked.size
        if memory is not None:
            same = memory.unchanged(names, before)
        for at, key, head, unchanged in zip(
            asked.tolist(), names, heads, same, strict=True
        ):
            if isinstance(head, BlockResult):
                order = UNKNOWN if head is BlockResult.LANDED else ABSENT
            else:
                order = _order(key, head)
            if memory is not None:
                if not unchanged:
                    order = memory.known(key, order)
                elif head is not BlockResult.FAILED:
                    memory.note(key, order)
            orders[at] = order
        return orders

    async def delete(self, keys: Keys) -> None:
        """Remove the values of blocks."""
        memory = self._memory
        if memory is not None:
            memory.begin(keys)
        try:
            left = int((~await self.remove(keys)).sum())
        finally:  # a failed operation may still have been executed
            if memory is not None:
                memory.end(keys, repeat(ABSENT))
        if left:
            raise OSError(f"{self.name}: could not delete {left} values: {self.error}")
        self.settle("remove")

    async def delete_namespace(self, digest: bytes) -> None:
        """Remove every value of a namespace."""
        try:
            await self.remove_folder(f"{self._prefix}{digest.hex()}/")
        finally:
            if self._memory is not None:
                self._memory.forget_namespace(digest)

    async def close(self) -> None:
        await self._upkeep.close()
        self._threads.close()
        await self.disconnect()

    # --- for subclasses ---------------------------------------------------------------

    def value_name(self, key: Key) -> str:
        """Return the name of a block's value."""
        return self._prefix + path_of(key)

    def note(self, what: str, error: str) -> None:
        """Record a failure that does not mean that the service is unreachable.

        Args:
            what: The kind of request: put, get or remove. ``error`` keeps the text
                until a request of this kind succeeds.
            error: Why it failed.
        """
        self.error = self._noted[what] = printable(error)

    def settle(self, what: str) -> None:
        """Record that a request of a kind has succeeded."""
        if self._noted.pop(what, ""):
            self.error = self._upkeep.reason or next(iter(self._noted.values()), "")

    def lost(self, error: BaseException, server: str = "") -> None:
        """Record that the service is unreachable; a task retries until it is back."""
        text = error_text(error).partition("\n")[0]
        self.error = printable(f"{server} {text}".strip())
        self._upkeep.lost(self.error)
        self._upkeep.start(self._bring_back)

    async def unpack(
        self, batch: Batch, which: Ids, raws: list[memoryview], results: BlockResults
    ) -> None:
        """Copy images out of received values, and set the result of each."""
        if which.size:
            part = batch.selected(which)
            results[which] = await self._threads.run(partial(read_objects, part, raws))
            batch.orders[which] = part.orders
            batch.tell(which, part)

    # --- inside -----------------------------------------------------------------------

    async def _write_entries(self, namespace: Namespace, batch: Batch) -> BlockResults:
        if (memory := self._memory) is None:
            results = await self.put(batch)
            if (results == LANDED).all():
                self.settle("put")
            return results
        memory.begin(batch.keys)
        orders: Iterable[int | None] = repeat(None)
        try:
            results = await self.put(batch)
            if (results == LANDED).all():
                self.settle("put")
            landed = (results == LANDED).tolist()
            named = zip(landed, batch.orders.tolist(), strict=True)
            orders = [order if there else None for there, order in named]
        finally:
            memory.end(batch.keys, orders)
        return results

    async def _read_entries(self, namespace: Namespace, batch: Batch) -> BlockResults:
        memory = self._memory
        before = [] if memory is None else memory.versions(batch.keys)
        results = await self.get_into(batch)
        if (results == LANDED).all():
            self.settle("get")
        if memory is None:
            # Otherwise the next put would assume that these blocks exist.
            if (damaged := batch.keys[results == DAMAGED]).size:
                await self.remove(damaged)
            return results
        keys = batch.keys.tolist()
        columns = keys, results.tolist(), memory.unchanged(keys, before)
        for key, result, unchanged in zip(*columns, strict=True):
            if result in (MISSING, DAMAGED) and unchanged:
                # A damaged value stays damaged until a put replaces it.
                until_put = math.inf if result == DAMAGED else STORE_OBJECT_ABSENT_S
                memory.lacks(key, until_put)
            elif result in (MISSING, DAMAGED):
                memory.lacks(key, 0.0)  # so that it is looked up
        return results

    async def _bring_back(self) -> None:
        """Try to reach the service after each pause, until it answers."""
        async for _ in self._upkeep:
            try:
                if await self.is_back():
                    self._upkeep.back()
                    self._noted.clear()
                    self.error = ""
                    return
            except Exception as exc:  # noqa: BLE001 - or nobody would ever ask again
                self.error = printable(error_text(exc))
            self._upkeep.lost(self.error)


def _order(key: Key, raw: bytes | memoryview) -> int:
    """Return the order in a head, or ``ABSENT`` if the head has another key."""
    head = ObjectHead.read(memoryview(raw))
    return head.order if head is not None and head.key == key else ABSENT


class _Memory:
    """Caches which blocks exist, and for a short time which do not.

    Calls overlap, so an answer may be older than a change. A look-up changes an entry
    only if nothing has changed it since the look-up began; a put or delete only if no
    other one of the block overlapped it, since the order in which the service ran them
    is unknown.
    """

    _VERSIONS: Final = 1 << 12

    def __init__(self) -> None:
        # The orders of existing blocks; the last found one at the end.
        self.present: OrderedDict[Key, int] = OrderedDict()
        # The times until which blocks are assumed to be absent.
        self._absent: OrderedDict[Key, float] = OrderedDict()
        # How many puts and deletes of a block are running, and which blocks had
        # several.
        self._changing: dict[Key, int] = {}
        self._contested: set[Key] = set()
        # How often the blocks of each residue of the hash have changed. A
        # state would not do: a block that goes and returns looks as it did before.
        self._versions = [0] * self._VERSIONS

    def begin(self, keys: Keys) -> None:
        """Record that a put or delete of blocks has begun."""
        for key in keys.tolist():
            before = self._changing.get(key, 0)
            self._changing[key] = before + 1  # bounded: by the store's own calls
            if before:
                self._contested.add(key)

    def end(self, keys: Keys, orders: Iterable[int | None]) -> None:
        """Record the results of a put or delete: orders, or None if unknown."""
        for key, order in zip(keys.tolist(), orders, strict=False):
            left = self._changing.pop(key) - 1
            if left:
                self._changing[key] = left
            if key in self._contested:
                self.lacks(key, 0.0)  # so that it is looked up
                if not left:
                    self._contested.remove(key)
            elif order is not None:
                self.note(key, order)

    def look_up(self, keys: Keys) -> tuple[Orders, Ids]:
        """Return the known orders, and the blocks to look up."""
        known = map(self.present.get, keys.tolist(), repeat(ABSENT))
        orders = np.fromiter(known, np.uint8, keys.size)
        now = asyncio.get_running_loop().time()
        unknown = np.flatnonzero(orders == ABSENT).tolist()
        asked = [at for at in unknown if self._absent.get(keys[at], 0.0) <= now]
        return orders, np.array(asked, np.int64)

    def versions(self, keys: Keys) -> list[int]:
        """Return the version of each block; any change of a block changes it."""
        return list(map(self._version, keys.tolist()))

    def unchanged(self, keys: list[Key], before: list[int]) -> list[bool]:
        """Return which blocks have their versions of before: other ones may differ too.

        Ask before the first answer of a call is noted, which is a change as well.
        """
        pairs = zip(keys, before, strict=True)
        return [self._version(key) == version for key, version in pairs]

    def known(self, key: Key, otherwise: int) -> int:
        """Return the order of a block as far as it is known, or another one."""
        if self._absent.get(key, 0.0) > asyncio.get_running_loop().time():
            return ABSENT
        return self.present.get(key, otherwise)

    def note(self, key: Key, order: int) -> None:
        """Cache the order of a block, or ``ABSENT``."""
        if order == ABSENT:
            self.lacks(key, STORE_OBJECT_ABSENT_S)
            return
        self._changed(key)
        self._absent.pop(key, None)
        self.present[key] = order
        self.present.move_to_end(key)
        if len(self.present) > STORE_OBJECTS_KNOWN:
            self.present.popitem(last=False)

    def lacks(self, key: Key, for_s: float) -> None:
        """Cache for some seconds that a block is absent."""
        self._changed(key)
        self.present.pop(key, None)
        self._absent[key] = asyncio.get_running_loop().time() + for_s
        self._absent.move_to_end(key)
        if len(self._absent) > STORE_OBJECTS_KNOWN:
            self._absent.popitem(last=False)

    def forget_namespace(self, digest: bytes) -> None:
        """Drop all cached blocks of a namespace, so that they are looked up again."""
        self._contested.update(k for k in self._changing if k.startswith(digest))
        for key in [key for key in self.present if key.startswith(digest)]:
            self.lacks(key, 0.0)

    def _version(self, key: Key) -> int:
        return self._versions[hash(key) % self._VERSIONS]

    def _changed(self, key: Key) -> None:
        self._versions[hash(key) % self._VERSIONS] += 1
