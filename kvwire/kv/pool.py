"""A pool of blocks with a prefix cache: who holds which block, and what it contains.

Theory
------
A block is *held* (its reference count says how often) or *free*. A block of either kind
may be *cached*: its content has a name, the hash of its chain. So a free cached block
is a prefix that nobody uses at the moment: it can be taken back by its hash until it is
needed for something else.

Free blocks are in a list, next to be taken first:

* Blocks that are not cached come before all others: taking one loses nothing.
* Of the cached ones, the least recently freed comes first. The blocks of one request
  are freed at once and the last block first, since a block is of no use without those
  before
  it: the tail of a prefix goes before its head.

The list is doubly linked and intrusive: two arrays of block ids, and one more entry as
its ends. Taking a block out of the middle, because its content is wanted again, costs
as much as taking the first. Everything is O(1) a block, and no call allocates more than
its result.

If two blocks get the same content at the same time, the first keeps the name and the
other stays without.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvwire import limits
from kvwire.errors import UsageError
from kvwire.kv.hashing import BlockHash


class BlockPool:
    """Gives out block ids 0 to ``num_blocks - 1``. Not thread-safe.

    Args:
        num_blocks: Blocks of the cache.
        block_tokens: Tokens of a block.

    Raises:
        UsageError: A number is out of range.
    """

    __slots__ = (
        "_by_hash",
        "_free",
        "_hashes",
        "_next",
        "_previous",
        "_refs",
        "block_tokens",
        "num_blocks",
    )

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 1:
            raise UsageError(f"BlockPool: num_blocks={num_blocks}: at least 1")
        if not 1 <= block_tokens <= limits.KV_BLOCK_TOKENS_MAX:
            raise UsageError(
                f"BlockPool: block_tokens={block_tokens}: 1 to "
                f"{limits.KV_BLOCK_TOKENS_MAX}"
            )
        self.num_blocks: int = num_blocks
        self.block_tokens: int = block_tokens
        self._refs = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._free = num_blocks
        # Entry `num_blocks` is both ends: its next is the first, its previous the last.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def free_blocks(self) -> int:
        """Return how many blocks :meth:`allocate` can give out, cached or not."""
        return self._free

    @property
    def cached_blocks(self) -> int:
        """Return how many blocks have content with a name, held or free."""
        return len(self._by_hash)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_tokens)

    def ref_count(self, block: int) -> int:
        """Return how often a block is held.

        Raises:
            UsageError: There is no such block.
        """
        self._check([block])
        return self._refs[block]

    def hash_of(self, block: int) -> BlockHash | None:
        """Return the name of a block's content, or None.

        Raises:
            UsageError: There is no such block.
        """
        self._check([block])
        return self._hashes[block]

    def allocate(self, count: int) -> list[int]:
        """Take free blocks, each held once; what was cached in them is forgotten.

        Raises:
            UsageError: There are fewer free blocks; none was taken.
        """
        if not 0 <= count <= self._free:
            raise UsageError(
                f"allocate({count}): {self._free} of {self.num_blocks} blocks are "
                "free; ask pool.free_blocks first"
            )
        following, hashes, refs = self._next, self._hashes, self._refs
        taken: list[int] = []
        block = following[self.num_blocks]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            name = hashes[block]
            if name is not None:
                hashes[block] = None
                del self._by_hash[name]
            block = following[block]
        following[self.num_blocks] = block
        self._previous[block] = self.num_blocks
        self._free -= count
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, once each; in token order, so that the last goes first.

        Raises:
            UsageError: A block is not held, or is there twice; none was given back.
        """
        self._check_held(blocks)
        refs, hashes = self._refs, self._hashes
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                self._link(block, first=hashes[block] is None)

    def lookup(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of a chain's longest cached prefix; only looks.

        Args:
            hashes: A chain from its first block on; see
                :meth:`kvwire.kv.hashing.HashScheme.block_hashes`.
        """
        found: list[int] = []
        get = self._by_hash.get
        for name in hashes:
            block = get(name)
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, blocks: Sequence[int]) -> None:
        """Hold blocks once more that are held or cached, such as :meth:`lookup` found.

        Raises:
            UsageError: A block is free and has no content, or is there twice; none was
                touched.
        """
        self._check(blocks)
        refs, hashes = self._refs, self._hashes
        for block in blocks:
            if not refs[block] and hashes[block] is None:
                raise UsageError(f"touch: block {block} is free and nothing is in it")
        for block in blocks:
            if refs[block] == 0:
                self._unlink(block)
            refs[block] += 1

    def cache(self, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Name the content of held blocks that are full.

        Raises:
            UsageError: A block is not held, is there twice or has another name; or
                there is not one hash for each block. Nothing was named.
        """
        self._check_held(blocks)
        if len(blocks) != len(hashes):
            raise UsageError(f"cache: {len(hashes)} hashes for {len(blocks)} blocks")
        for block, name in zip(blocks, hashes, strict=True):
            known = self._hashes[block]
            if known is not None and known != name:
                raise UsageError(
                    f"cache: block {block} is named {known.hex()[:8]} already, not "
                    f"{name.hex()[:8]}; a block's content changes only after evict()"
                )
        for block, name in zip(blocks, hashes, strict=True):
            if name not in self._by_hash:
                self._by_hash[name] = block
                self._hashes[block] = name

    def evict(self, blocks: Sequence[int]) -> None:
        """Forget what is in some blocks, such as those that a transfer left damaged.

        Raises:
            UsageError: There is no such block, or one is there twice; none was evicted.
        """
        self._check(blocks)
        for block in blocks:
            name = self._hashes[block]
            if name is None:
                continue
            self._hashes[block] = None
            del self._by_hash[name]
            if self._refs[block] == 0:
                self._unlink(block)
                self._link(block, first=True)

    def _link(self, block: int, *, first: bool) -> None:
        """Put a block into the free list, at one end or the other."""
        following, previous, ends = self._next, self._previous, self.num_blocks
        after = following[ends] if first else ends
        before = previous[after]
        following[block], previous[block] = after, before
        following[before] = previous[after] = block
        self._free += 1

    def _unlink(self, block: int) -> None:
        """Take a block out of the free list, wherever it is."""
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._free -= 1

    def _check(self, blocks: Sequence[int]) -> None:
        """Refuse ids that are no blocks, and any id twice."""
        if len(blocks) == 0:
            return
        if min(blocks) < 0 or max(blocks) >= self.num_blocks:
            wrong = next(b for b in blocks if not 0 <= b < self.num_blocks)
            raise UsageError(f"block {wrong} is not one of 0 to {self.num_blocks - 1}")
        if len(set(blocks)) != len(blocks):
            twice = next(b for b in blocks if blocks.count(b) > 1)
            raise UsageError(f"block {twice} is there twice")

    def _check_held(self, blocks: Sequence[int]) -> None:
        self._check(blocks)
        refs = self._refs
        for block in blocks:
            if not refs[block]:
                raise UsageError(f"block {block} is not held; it is free already")
