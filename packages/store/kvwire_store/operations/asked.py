"""Blocks of a get that come in an answer of a lower tier, without a task.

The get requests all of its blocks at once. As the answer arrives, its images are copied
straight into the caller's blocks. Memory gets its copies after the caller has been
woken, as far as there is room without waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from kvwire.kv.blocks import Ids, any_of
from kvwire.memory.copy import copy
from kvwire_store.images import images_in
from kvwire_store.limits import STORE_KEYS_MAX
from kvwire_store.namespace import UNKNOWN
from kvwire_store.operations.group_request import BlockRequest
from kvwire_store.tier_stack import TierStack
from kvwire_store.tiers.base import LANDED, Batch, BlockResults, Tier, all_landed

logger: logging.Logger = logging.getLogger("kvwire.store")

_ALL: Final = slice(None)
_NOTHING: Final = memoryview(b"")
_NO_IMAGES: Final = images_in(np.empty(0, np.uint8), 1, 0)


Took = Callable[[BlockResults, Batch], None]
"""Takes an answer: the results of all blocks, and the landed blocks."""


class AskedBlocks:
    """The blocks of one get, from its request until memory has its copies.

    Args:
        tiers: The store's tiers.
        request: The blocks.
        took: Called with the answer, to copy the images to their places.
        asked: Called once, when the answer is there, or none can come.

    Attributes:
        rest: The positions of blocks that the answer has not brought; None for none.
        keeps: Whether memory gets copies; then call :meth:`keep`.
    """

    def __init__(
        self,
        tiers: TierStack,
        request: BlockRequest,
        took: Took,
        asked: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._request = request
        self._took = took
        self._asked = asked
        named = request.namespace.tenant
        self._tenant = tiers.tenants.number(named) if named else 0
        self.keeps: bool = tiers.memory.keeps
        # What memory may keep: the landed blocks, and their images in a row.
        self._came: Batch | None = None
        self._line = _NOTHING
        self.rest: Ids | None = None

    def begin(self, tier: Tier) -> bool:
        """Request all blocks from a tier; return whether they were requested."""
        memory = self._tiers.memory
        request = self._request
        keys = request.keys
        nbytes = request.namespace.image_bytes
        busy = memory.in_flight.ends
        if (
            not 0 < keys.size <= STORE_KEYS_MAX
            or keys.size * nbytes > tier.asks_bytes
            or request.repeats
            or memory.too_large(nbytes, self._tenant)
            or any_of(memory.index.find(keys) >= 0)
            or (busy and any_of(memory.in_flight.busy(keys)))
        ):
            return False
        if self.keeps:
            # Until they are in memory, other calls wait for these blocks.
            memory.in_flight.begin(keys)
        try:
            begun = self._begin(tier)
        except Exception:  # noqa: BLE001 - the long way raises it, where it lasts
            begun = False
        if not begun and self.keeps:
            memory.in_flight.end(keys)
        return begun

    def keep(self) -> None:
        """Copy what has arrived into memory, as far as there is room."""
        memory = self._tiers.memory
        came = self._came
        try:
            if came is not None:
                self._copy(came)
        finally:
            self._came = None
            self._line = _NOTHING
            memory.in_flight.end(self._request.keys)

    def _copy(self, came: Batch) -> None:
        memory = self._tiers.memory
        nbytes = self._request.namespace.image_bytes
        taken = memory.take_now(nbytes, came.keys.size, self._tenant)
        # If there is not room for all, the head of the chain stays.
        count = taken.size
        if not count:
            return
        try:
            copy(self._line[: count * nbytes], memory.images(taken, nbytes))
        except BaseException:
            memory.give_back(taken)
            raise
        assert came.kept is not None
        memory.below[taken] = came.kept[:count]
        born = None if came.born is None else came.born[:count]
        keys = came.keys[:count]
        memory.index.name(keys, taken, born, came.orders[:count])
        memory.unpin(taken)

    def _begin(self, tier: Tier) -> bool:
        index = self._tiers.memory.index
        keys = self._request.keys
        born = np.full(keys.size, index.now()) if index.shares.expire else None
        # np.full and np.ones are functions of Python.
        orders = np.empty(keys.size, np.uint8)
        orders.fill(UNKNOWN)
        kept = np.empty(keys.size, np.bool_)
        kept.fill(True)
        batch = Batch(keys, orders, _NO_IMAGES, born=born, kept=kept)

        def answered(results: BlockResults | None, line: memoryview) -> None:
            try:
                if results is None:
                    self.rest = np.arange(keys.size)
                else:
                    self._arrived(batch, results, line)
            except Exception:
                # Lack of memory, or a bug, ends no other call of this client.
                logger.exception("the blocks of an answer are requested again")
                self.rest = np.arange(keys.size)
            self._asked()

        return tier.ask(self._request.namespace, batch, answered)

    def _arrived(self, batch: Batch, results: BlockResults, line: memoryview) -> None:
        # Mostly all of them; a slice takes a fraction of a mask's time.
        whole = all_landed(results)
        here = _ALL if whole else results == LANDED
        keys = batch.keys[here]
        nbytes = self._request.namespace.image_bytes
        images = images_in(np.frombuffer(line, np.uint8), nbytes, keys.size)
        assert batch.kept is not None
        born = None if batch.born is None else batch.born[here]
        kept = batch.kept[here]
        came = Batch(keys, batch.orders[here], images, born=born, kept=kept)
        self._took(results, came)
        if not whole:
            self.rest = (results != LANDED).nonzero()[0]
        if keys.size:
            self._came = came
            self._line = line
