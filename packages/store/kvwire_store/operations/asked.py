"""Blocks of a get that come in answers of a lower tier, without a task.

The get asks for its blocks in a few requests. As each answer arrives, its images are
copied straight into the caller's blocks. Memory gets its copies after the caller has
been woken, as far as there is room without waiting.
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

# More blocks than these requests bring come faster as one message.
_ASKS_MAX: Final = 4
_ALL: Final = slice(None)
_NO_IMAGES: Final = images_in(np.empty(0, np.uint8), 1, 0)


Took = Callable[[Ids, BlockResults, Batch], None]
"""Takes an answer: the positions asked for, their results, and the landed blocks."""


class AskedBlocks:
    """The blocks of one get, from its requests until memory has its copies.

    Args:
        tiers: The store's tiers.
        request: The blocks.
        took: Called with each answer, to copy the images to their places.
        asked: Called once, when all answers are there.

    Attributes:
        rest: The positions of blocks that no answer has brought.
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
        # Landed blocks, which memory may keep.
        self._came: list[tuple[Batch, memoryview]] = []
        # The number of requests without an answer.
        self._waiting = 0
        self.rest: list[Ids] = []

    def begin(self, tier: Tier) -> bool:
        """Request all blocks from a tier; return whether any were requested."""
        memory = self._tiers.memory
        request = self._request
        keys = request.keys
        nbytes = request.namespace.image_bytes
        step = min(tier.asks_bytes // nbytes, STORE_KEYS_MAX)
        count = -(-keys.size // step) if step else 0
        busy = memory.in_flight.ends
        if (
            not 0 < count <= _ASKS_MAX
            or request.repeats
            or memory.too_large(nbytes, self._tenant)
            or any_of(memory.index.find(keys) >= 0)
            or (busy and any_of(memory.in_flight.busy(keys)))
        ):
            return False
        if self.keeps:
            # Until they are in memory, other calls wait for these blocks.
            memory.in_flight.begin(keys)
        self._waiting = count
        positions = np.arange(keys.size)
        for first in range(0, keys.size, step):
            part = positions[first : first + step]
            try:
                begun = self._begin_part(tier, part)
            except Exception:  # noqa: BLE001 - the long way raises it, where it lasts
                begun = False
            if not begun:
                if not first:
                    if self.keeps:
                        self.keep()
                    return False
                # The others go the long way.
                self._waiting -= -(-(keys.size - first) // step)
                self.rest.append(positions[first:])
                if not self._waiting:
                    self._asked()
                break
        return True

    def keep(self) -> None:
        """Copy what has arrived into memory, as far as there is room."""
        memory = self._tiers.memory
        nbytes = self._request.namespace.image_bytes
        try:
            for part, line in self._came:
                taken = memory.take_now(nbytes, part.keys.size, self._tenant)
                # If there is not room for all, the head of the chain stays.
                keys = part.keys[: taken.size]
                if not keys.size:
                    return
                here = line[: keys.size * nbytes]
                try:
                    copy(here, memory.images(taken, nbytes))
                except BaseException:
                    memory.give_back(taken)
                    raise
                assert part.kept is not None
                memory.below[taken] = part.kept[: keys.size]
                born = None if part.born is None else part.born[: keys.size]
                memory.index.name(keys, taken, born, part.orders[: keys.size])
                memory.unpin(keys, taken)
        finally:
            self._came.clear()
            memory.in_flight.end(self._request.keys)

    def _begin_part(self, tier: Tier, positions: Ids) -> bool:
        index = self._tiers.memory.index
        count = positions.size
        born = np.full(count, index.now()) if index.shares.expire else None
        # np.full and np.ones are functions of Python.
        orders = np.empty(count, np.uint8)
        orders.fill(UNKNOWN)
        kept = np.empty(count, np.bool_)
        kept.fill(True)
        keys = self._request.keys[positions]
        part = Batch(keys, orders, _NO_IMAGES, born=born, kept=kept)

        def answered(results: BlockResults | None, line: memoryview) -> None:
            self._waiting -= 1
            known = len(self.rest)
            try:
                if results is None:
                    self.rest.append(positions)
                else:
                    self._arrived(part, positions, results, line)
            except Exception:
                # Lack of memory, or a bug, ends no other call of this client.
                logger.exception("the blocks of an answer are requested again")
                self.rest[known:] = [positions]
            if not self._waiting:
                self._asked()

        return tier.ask(self._request.namespace, part, answered)

    def _arrived(
        self, part: Batch, positions: Ids, results: BlockResults, line: memoryview
    ) -> None:
        # Mostly all of them; a slice takes a fraction of a mask's time.
        whole = all_landed(results)
        here = _ALL if whole else results == LANDED
        keys = part.keys[here]
        nbytes = self._request.namespace.image_bytes
        images = images_in(np.frombuffer(line, np.uint8), nbytes, keys.size)
        assert part.kept is not None
        born = None if part.born is None else part.born[here]
        kept = part.kept[here]
        came = Batch(keys, part.orders[here], images, born=born, kept=kept)
        self._took(positions, results, came)
        if not whole:
            self.rest.append(positions[results != LANDED])
        if keys.size and self.keeps:
            self._came.append((came, line))
