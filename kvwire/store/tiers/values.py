"""What tiers in a key-value service are alike in: one value there for each block.

A value is what an object is, see :mod:`kvwire.store.tiers.object_format`: a head with
the key, the order and checksums, and the image. So a value that was cut, replaced or
answered by mistake is no block; it is removed, for a put would take it that the block
is there.

A service that does not answer is passed over: everything is answered at once, with the
reason, until a task has asked whether it is back.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from functools import partial
from typing import ClassVar, Self

from kvwire.aio import Backoff, end_task, run_to_completion, start_task
from kvwire.errors import UsageError, error_text, printable
from kvwire.kv.blocks import Bits, Ids
from kvwire.store.address import TierAddress
from kvwire.store.index import Key, Keys
from kvwire.store.limits import (
    STORE_NODE_TIMEOUT_S,
    STORE_REDIAL_S,
    STORE_REDIAL_S_MAX,
    STORE_TIMEOUT_S_MAX,
)
from kvwire.store.namespace import Namespace
from kvwire.store.threads import Threads
from kvwire.store.tiers.base import DAMAGED, MISSING, Batch, BlockResults, Tier
from kvwire.store.tiers.object_format import path_of, read_objects


class ValueTier(Tier):
    """Keeps each block as a value of a service. Subclassed; made by :meth:`open`.

    Attributes:
        faults: What its client raises where the service cannot be reached.
        refusals: Those of them that no other attempt would end.
        separator: The text between the prefix and a block's name.
    """

    faults: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    refusals: ClassVar[tuple[type[Exception], ...]] = ()
    separator: ClassVar[str] = "/"

    def __init__(self, address: TierAddress, *options: str) -> None:
        super().__init__(address.text)
        address.require(*options)
        self._prefix = f"{address.options.get('prefix', 'kvwire')}{self.separator}"
        self._timeout_s = address.number(
            "timeout", STORE_NODE_TIMEOUT_S, STORE_TIMEOUT_S_MAX
        )
        self._threads = Threads()
        # Servers that have failed since it was last asked who is there.
        self._failing: set[str] = set()
        self._failed_at = 0.0
        self._backoff = Backoff(STORE_REDIAL_S, STORE_NODE_TIMEOUT_S)
        self._healing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, address: TierAddress) -> Self:
        """Open a tier; see the class for its address.

        A service that cannot be reached is no error: ``error`` says so, and it is tried
        again.

        Cancel safety: nothing stays open.
        """
        tier = cls(address)
        try:
            await tier._connect()
        except cls.refusals as exc:
            await tier.close()
            text = printable(error_text(exc))
            raise UsageError(f"tier {address.text!r}: {text}") from None
        except cls.faults as exc:
            tier._failed(exc)
        except BaseException:
            await run_to_completion(tier.close())
            raise
        return tier

    @property
    def unavailable_reason(self) -> str:  # type: ignore[override]
        return self.error if self._failing else ""

    async def delete(self, keys: Keys) -> None:
        """Delete the values of blocks."""
        left = int((~await self._remove(keys)).sum())
        if left:
            raise OSError(f"{self.name}: {left} not deleted: {self.error}")

    async def close(self) -> None:
        if self._healing is not None:
            await end_task(self._healing)
        self._threads.close()
        await self._disconnect()

    # --- for subclasses ---------------------------------------------------------------

    @abstractmethod
    async def _connect(self) -> None:
        """Connect to the service; raises one of ``faults`` where that fails."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Let go of the client, if there is one."""

    @abstractmethod
    async def _is_back(self) -> bool:
        """Tell whether the service is there again, connecting to it at need."""

    @abstractmethod
    async def _get(self, batch: Batch) -> BlockResults:
        """Read blocks, with the help of :meth:`_unpack`."""

    @abstractmethod
    async def _remove(self, keys: Keys) -> Bits:
        """Remove values; return which are gone."""

    async def _unpack(
        self, batch: Batch, which: Ids, raws: list[memoryview], results: BlockResults
    ) -> None:
        """Copy images out of the values that came, and say what became of each."""
        if not which.size:
            return
        part = batch.selected(which)
        read = await self._threads.run(partial(read_objects, part, raws))
        # Another block's value is in the way of a put, as a damaged one is.
        read[read == MISSING] = DAMAGED
        results[which], batch.orders[which] = read, part.orders

    def _name(self, key: Key) -> str:
        return self._prefix + path_of(key)

    def _note(self, error: str) -> None:
        self.error = printable(error)

    def _failed(self, error: BaseException, server: str = "") -> None:
        """Pass a server over until it was asked again who is there."""
        text = error_text(error).partition("\n")[0]
        self._note(f"{server} {text}".strip())
        self._failing.add(server)  # bounded: the servers of a cluster
        if self._healing is None or self._healing.done():
            now = asyncio.get_running_loop().time()
            if now - self._failed_at > STORE_REDIAL_S_MAX:
                self._backoff.reset()
            self._failed_at = now
            self._healing = start_task(self._heal())

    # --- inside -----------------------------------------------------------------------

    async def _read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        results = await self._get(batch)
        damaged = batch.keys[results == DAMAGED]
        if damaged.size:
            await self._remove(damaged)
        return results

    async def _heal(self) -> None:
        """Ask who is there until somebody says so; then all are worth a try again."""
        while self._failing:
            await asyncio.sleep(self._backoff.pause_s())
            try:
                if await self._is_back():
                    self._failing.clear()
                    self._note("")
            except Exception as exc:  # noqa: BLE001 - or nobody would ever ask again
                self._note(error_text(exc))
