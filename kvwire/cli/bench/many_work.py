"""What is moved by ``kvwire bench many``: mixed sizes at once, and one beside many.

Every transfer has blocks of its own, scattered over one cache; only the side that
publishes has the blocks of the others beside once, as a prefix that all of them want. A
block is 64 KiB in 16 layers, so everything travels in fragments of 4 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvwire.cli.bench.case import Work
from kvwire.limits import KIB, MIB

LAYERS: Final = 16
LAYER_BYTES: Final = 4 * KIB
BLOCK_BYTES: Final = LAYERS * LAYER_BYTES
# Of 100 transfers: prompts of 16 tokens, of 256, and one that is long.
SMALL_BYTES: Final = BLOCK_BYTES
MEDIUM_BYTES: Final = 1 * MIB
MEDIUM_SHARE: Final = 0.18
LARGE_SHARE: Final = 0.02

AT_ONCE: Final = "at once"
ONE_BY_ONE: Final = "one by one"
BESIDE: Final = "beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyWork(Work):
    """``count`` transfers; ``verb`` is one of those above.

    * ``at once``: all of them begin together, spread over all connections; ``nbytes``
      is the size of the largest;
    * ``one by one``: each of ``nbytes``, begun when the one before is over;
    * ``beside``: likewise, and on the same connection others are always under way.

    Attributes:
        others: How many others there are.
        other_bytes: Of each.
        priority: Of those that are timed; that of the others is 0.
    """

    others: int = 0
    other_bytes: int = 0
    priority: int = 0

    def sizes(self) -> list[int]:
        """Bytes of each transfer, in the order in which they begin."""
        if self.verb != AT_ONCE:
            return [self.nbytes] * self.count
        large = max(1, round(self.count * LARGE_SHARE))
        medium = max(1, round(self.count * MEDIUM_SHARE))
        sizes = np.full(self.count, SMALL_BYTES)
        sizes[:medium] = MEDIUM_BYTES
        sizes[medium : medium + large] = self.nbytes
        mixed: list[int] = np.random.default_rng(0).permutation(sizes).tolist()
        return mixed

    @property
    def moved_bytes(self) -> int:
        """Bytes of a round, without those of the others."""
        return sum(self.sizes())

    @property
    def distinct(self) -> list[int]:
        """Bytes of the transfers that have blocks of their own, without the others."""
        return self.sizes() if self.verb == AT_ONCE else [self.nbytes]

    def shares(self, *, publishes: bool) -> tuple[int, list[list[int]]]:
        """The blocks that one side needs, and which transfer has which.

        Args:
            publishes: The others have one share, instead of one each.
        """
        counts = [1, self.others] if publishes and self.others else [self.others, 1]
        sizes = self.distinct + [self.other_bytes] * counts[0]
        blocks = sum(sizes) // BLOCK_BYTES
        parts = scattered(sizes, blocks)
        own = len(self.distinct)
        return blocks, parts[:own] + parts[own:] * counts[1]


def scattered(sizes: list[int], blocks: int) -> list[list[int]]:
    """Different blocks for each of these transfers, out of so many."""
    order = np.random.default_rng(1).permutation(blocks)
    ends = np.cumsum(np.array(sizes) // BLOCK_BYTES)
    return [part.tolist() for part in np.split(order, ends)[: len(sizes)]]
