"""A pool of blocks with a prefix cache, which tracks each block's holders and content.

Theory
------
A block is *held* (with a reference count) or *free*. Either kind may be *cached*: its
content has a name, the hash of its chain. A free cached block belongs to a prefix that
is not in use; until the block is reallocated, it can be found by its hash and held
again.

Free blocks without content are on a stack and are allocated first, since that loses
nothing. Among the free cached blocks, the least recently freed is allocated first. A
request's blocks are freed together, the last block first: a block is useless without
the blocks before it, so the tail of a prefix should be lost before its head.

The free cached blocks are in an ordered dict, so holding one from the middle again is
as cheap as taking the first. All operations are O(1) per block.

If two blocks get the same content, the first keeps the name and the other has none.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from kvwire import limits
from kvwire.errors import UsageError
from kvwire.kv.hashing import BlockHash
from kvwire.types import whole


class BlockPool:
    """Hands out block ids 0 to ``num_blocks - 1``. Not thread-safe.

    Hold the blocks that a transfer or a store call uses: call :meth:`touch` before it
    begins, and :meth:`free` once it has drained.

    One pool serves several cache groups of one block size: append the group's number to
    each hash, and count only blocks present in every group as hits. A name may be any
    bytes.

    Args:
        num_blocks: The number of blocks in the cache.
        block_tokens: Tokens per block.
        on_removed: Called with the names that :meth:`allocate` and :meth:`evict` have
            dropped, for example to emit KV events. It must neither raise nor call the
            pool.

    Raises:
        UsageError: A number is out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        on_removed: Callable[[Sequence[BlockHash]], None] | None = None,
    ) -> None:
        blocks = whole(num_blocks)
        size = whole(block_tokens)
        if blocks is None or blocks < 1:
            raise UsageError(
                f"BlockPool: num_blocks={num_blocks!r}: pass a number of at least 1"
            )
        if size is None or not 1 <= size <= limits.KV_BLOCK_TOKENS_MAX:
            raise UsageError(
                f"BlockPool: block_tokens={block_tokens!r}: pass a number from 1 to "
                f"{limits.KV_BLOCK_TOKENS_MAX}"
            )
        self.num_blocks: int = blocks
        self.block_tokens: int = size
        self._on_removed = on_removed
        self._refs = [0] * blocks
        self._hashes: list[BlockHash | None] = [None] * blocks
        self._by_hash: dict[BlockHash, int] = {}
        # Free blocks without content; the last is taken first.
        self._blank = list(range(blocks - 1, -1, -1))
        # Free blocks with content; the first is taken first.
        self._cached_free: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Return the number of blocks that :meth:`allocate` can return."""
        return len(self._blank) + len(self._cached_free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that these tokens need.

        Raises:
            UsageError: It is not a whole number of at least 0.
        """
        tokens = whole(num_tokens)
        if tokens is None or tokens < 0:
            raise UsageError(
                f"blocks_for({num_tokens!r:.80}): pass a number of at least 0"
            )
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Return free blocks, each held once; they lose their cached content.

        Raises:
            UsageError: Too few blocks are free, or it is no whole number; none was
                allocated.
        """
        wanted = whole(count)
        if wanted is None or not 0 <= wanted <= self.free_blocks:
            raise UsageError(
                f"allocate({count!r:.80}): {self.free_blocks} of {self.num_blocks} "
                "blocks are free; check pool.free_blocks first"
            )
        refs = self._refs
        rest = max(0, len(self._blank) - wanted)
        taken = self._blank[rest:]
        del self._blank[rest:]
        taken.reverse()
        if len(taken) < wanted:
            taken += self._take_cached(wanted - len(taken))
        for block in taken:
            refs[block] = 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Release each of these blocks once; pass them in token order.

        The last block becomes available for reuse first.

        Raises:
            UsageError: A block is not held, or is listed twice; none was released.
        """
        self._check_held(blocks)
        refs = self._refs
        hashes = self._hashes
        blank = self._blank
        cached = self._cached_free
        for block in reversed(blocks):
            count = refs[block] - 1
            refs[block] = count
            if count:
                continue
            if hashes[block] is None:
                blank.append(block)
            else:
                cached[block] = None

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix of a chain; changes nothing.

        Args:
            hashes: A chain of hashes, beginning with the first block; see
                :meth:`kvwire.kv.hashing.HashScheme.block_hashes`.
        """
        found = list(map(self._by_hash.get, hashes))
        if None in found:
            del found[found.index(None) :]
        return found  # type: ignore[return-value]  # it ends before the first None

    def touch(self, blocks: Sequence[int]) -> None:
        """Add one hold to held or cached blocks, for example from :meth:`lookup`.

        Raises:
            UsageError: A block is free without content, or is listed twice; no hold was
                added.
        """
        self._check(blocks)
        refs = self._refs
        hashes = self._hashes
        for block in blocks:
            if not refs[block] and hashes[block] is None:
                raise UsageError(
                    f"touch: block {block} is free and has no cached content"
                )
        for block in blocks:
            if refs[block] == 0:
                del self._cached_free[block]
            refs[block] += 1

    def cache(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Name the content of held blocks that are full.

        Raises:
            UsageError: A block is not held, is listed twice or has another name; or the
                numbers of blocks and hashes differ. Nothing was named.
        """
        self._check_held(blocks)
        if len(blocks) != len(hashes):
            raise UsageError(f"cache: {len(hashes)} hashes for {len(blocks)} blocks")
        named = self._hashes
        by_hash = self._by_hash
        if any(map(named.__getitem__, blocks)):
            for block, name in zip(blocks, hashes, strict=True):
                known = named[block]
                if known is not None and known != name:
                    raise UsageError(
                        f"cache: block {block} already has the hash "
                        f"{known.hex()[:8]}, not {name.hex()[:8]}; call evict() "
                        "before its content changes"
                    )
        for block, name in zip(blocks, hashes, strict=True):
            if by_hash.setdefault(name, block) == block:
                named[block] = name

    def evict(self, blocks: Sequence[int]) -> None:
        """Drop the content of blocks, for example after a damaged transfer.

        Raises:
            UsageError: There is no such block, or one is listed twice; none was
                evicted.
        """
        self._check(blocks)
        removed: list[BlockHash] = []
        for block in blocks:
            name = self._hashes[block]
            if name is None:
                continue
            self._hashes[block] = None
            del self._by_hash[name]
            removed.append(name)
            if self._refs[block] == 0:
                del self._cached_free[block]
                self._blank.append(block)
        if removed and self._on_removed is not None:
            self._on_removed(removed)

    def _take_cached(self, count: int) -> list[int]:
        """Take the first free cached blocks, and drop their content."""
        take = self._cached_free.popitem
        hashes = self._hashes
        by_hash = self._by_hash
        taken: list[int] = []
        removed: list[BlockHash] = []
        for _ in range(count):
            block, _ = take(last=False)
            name = hashes[block]
            assert name is not None, "a block without content is among the cached ones"
            hashes[block] = None
            del by_hash[name]
            taken.append(block)
            removed.append(name)
        if self._on_removed is not None:
            self._on_removed(removed)
        return taken

    def _check(self, blocks: Sequence[int]) -> None:
        """Refuse ids out of range, and duplicates."""
        if len(blocks) == 0:
            return
        if min(blocks) < 0 or max(blocks) >= self.num_blocks:
            wrong = next(b for b in blocks if not 0 <= b < self.num_blocks)
            raise UsageError(
                f"block {wrong} does not exist; the pool has 0 to {self.num_blocks - 1}"
            )
        if len(set(blocks)) != len(blocks):
            counts = Counter(blocks)
            twice = next(b for b in blocks if counts[b] > 1)
            raise UsageError(f"block {twice} appears twice")

    def _check_held(self, blocks: Sequence[int]) -> None:
        self._check(blocks)
        if not all(map(self._refs.__getitem__, blocks)):
            block = next(block for block in blocks if not self._refs[block])
            raise UsageError(f"block {block} is not held; it is free already")
