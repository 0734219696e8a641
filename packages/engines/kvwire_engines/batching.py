"""Continuous batching of transformers, with prefixes in a store.

A manager of continuous batching shares blocks between prompts that begin alike. Here
such blocks are stored, and loaded before a request is added, which then finds them::

    shared = ContinuousBatching(kept, manager)  # kept: a TransformersCaches
    await shared.get(prompt)
    manager.add_request(prompt)
    ...
    await shared.put(prompt + answer)

The manager's ``page_size`` has to be the ``block_tokens`` of the caches; then a prompt
of the manager goes on in a ``DynamicCache`` as well, and the other way round. Tested
with transformers 5.24 on CPUs; models whose layers all have full attention.
"""

from __future__ import annotations

from typing import Any, Final

from kvwire import PagedCache
from kvwire.aio import run_to_completion
from kvwire.errors import UsageError
from kvwire.kv.hashing import HashScheme
from kvwire.kv.layout import AxisOrder
from kvwire_engines.caches import Tokens, token_ids
from kvwire_engines.transformers import TransformersCaches

_AXES: Final = AxisOrder("block token head dim")


class ContinuousBatching:
    """Stores and loads the shared blocks of one manager.

    The manager's loop is paused for as long as its tables are read or written, not
    while bytes move. Use it from one event loop, and close the manager afterwards.

    Args:
        kept: The caches of the manager's model, with its ``page_size`` as
            ``block_tokens``.
        manager: A ``ContinuousBatchingManager`` that has been started.
    """

    def __init__(self, kept: TransformersCaches, manager: Any) -> None:
        self._kept = kept
        self._manager = manager
        self._cache: PagedCache | None = None

    async def put(self, tokens: Tokens) -> int:
        """Store the blocks of a sequence that the manager still has.

        Args:
            tokens: The sequence: a prompt, and the generated tokens.

        Returns:
            The number of leading tokens that are stored now.

        Raises:
            UsageError: The manager's blocks are not supported.
            RuntimeError: The manager does not run.
            ClosedOK: The store is closed.

        Cancel safety: the put is finished first.
        """
        return await run_to_completion(self._put(token_ids(tokens).tolist()))

    async def get(self, tokens: Tokens) -> int:
        """Load the stored blocks of a prompt, so that the next request finds them.

        Args:
            tokens: The prompt.

        Returns:
            The number of leading tokens that the manager has now.

        Raises:
            UsageError: The manager's blocks are not supported.
            RuntimeError: The manager does not run.
            ClosedOK: The store is closed.

        Cancel safety: the get is finished first.
        """
        return await run_to_completion(self._get(token_ids(tokens).tolist()))

    async def _put(self, ids: list[int]) -> int:
        with self._manager.pause():
            blocks = self._allocator()
            # One token more, since a request always computes the last one.
            found = blocks.match_prefix_blocks([*ids, 0])
            for block in found:
                blocks.ledger.acquire(block)
        try:
            if not found:
                return 0
            hashes = self._scheme().block_hashes(ids)[: len(found)]
            request = self._kept.store.put(
                hashes, self._paged(blocks), found, tenant=self._kept.tenant
            )
            outcome = await request
            await request.drained()
            return outcome.usable_tokens
        finally:
            with self._manager.pause():
                _release(blocks, found)

    async def _get(self, ids: list[int]) -> int:
        hashes = self._scheme().block_hashes(ids[:-1])
        with self._manager.pause():
            blocks = self._allocator()
            known = len(blocks.match_prefix_blocks(ids))
        paged = self._paged(blocks)
        stored = await self._kept.store.match(hashes, paged, tenant=self._kept.tenant)
        if stored <= known:
            return int(known * blocks.tokens_per_page)
        with self._manager.pause():
            fresh = _allocated(blocks, stored - known)
        landed = 0
        try:
            request = self._kept.store.get(
                hashes[known : known + len(fresh)],
                paged,
                fresh,
                tenant=self._kept.tenant,
            )
            outcome = await request
            await request.drained()
            landed = outcome.usable_prefix
        finally:
            with self._manager.pause():
                total = _adopt(blocks, ids, known, fresh, landed)
        return total * int(blocks.tokens_per_page)

    def _scheme(self) -> HashScheme:
        return HashScheme(self._kept.sources[0].block_tokens)

    def _allocator(self) -> Any:
        """Return the manager's blocks; called while it is paused."""
        processor = self._manager.batch_processor
        if processor is None:
            raise UsageError("continuous batching: the manager has ended; start it")
        kinds = processor.cache.cache_allocators
        if list(kinds) != ["full_attention"]:
            raise UsageError(
                f"continuous batching: layers of {', '.join(kinds)}; only full "
                "attention is supported"
            )
        blocks = kinds["full_attention"]
        wanted = self._kept.sources[0].block_tokens
        if blocks.tokens_per_page != wanted:
            raise UsageError(
                f"continuous batching: page_size={blocks.tokens_per_page}, and the "
                f"caches have block_tokens={wanted}; set both to the same number"
            )
        return blocks

    def _paged(self, blocks: Any) -> PagedCache:
        """View the manager's memory: each block has pages of keys, values, keys, ..."""
        if self._cache is None:
            step = 2 * len(blocks.layer_indices)
            pairs = [
                tuple(
                    pages[::step] for pages in blocks.get_cache_for_block_table(layer)
                )
                for layer in blocks.layer_indices
            ]
            spec = self._kept.sources[0].spec(self._kept.shape)
            self._cache = PagedCache(spec, pairs, _AXES)
        return self._cache


# The name of a request that is never added: its table holds what a get has loaded.
_ADOPTED: Final = "kvwire"


def _allocated(blocks: Any, count: int) -> list[int]:
    """Take free blocks from a pool, fewer than `count` if there are no more."""
    pool = blocks.pool
    while pool.count_free_blocks(blocks.index) < count and pool.num_free_sectors:
        pool.allocate_sector(blocks.index)
    fresh = min(count, pool.count_free_blocks(blocks.index))
    found: list[int] = pool.get_free_blocks(blocks.index, fresh)
    return found


def _adopt(
    blocks: Any, ids: list[int], known: int, fresh: list[int], landed: int
) -> int:
    """Give the landed ones of fresh blocks to the manager, and the others back.

    Returns the number of leading blocks of the prompt that the manager has now.
    """
    here = blocks.match_prefix_blocks(ids)
    for block in here:
        blocks.ledger.acquire(block)
    # More of them may have been computed meanwhile; or some were evicted, and then what
    # has landed behind them is of no use.
    first = len(here) - known
    adopted = fresh[first:landed] if first >= 0 else []
    blocks.block_table[_ADOPTED] = [*here, *adopted]
    blocks.mark_complete_blocks(_ADOPTED, ids, len(adopted))
    blocks.free_blocks(_ADOPTED)  # they stay, as blocks that no request uses now
    unused = [block for block in fresh if block not in adopted]
    blocks.pool.free_blocks(blocks.index, unused)
    return len(here) + len(adopted)


def _release(blocks: Any, held: list[int]) -> None:
    gone = [block for block in held if blocks.ledger.release(block)]
    blocks.pool.free_blocks(blocks.index, gone)
