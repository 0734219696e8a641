"""Transfers of caches whose every word is stamped, and what a soak counts of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import kvwire
from tests.support.caches import StampedCache

SPEC = kvwire.KVSpec(
    layers=8, kv_heads=8, head_dim=128, block_tokens=16, dtype="float16"
)
NUM_BLOCKS = 96
TRANSFERS_AT_ONCE = 4
BLOCKS_EACH_MAX = NUM_BLOCKS // TRANSFERS_AT_ONCE
# Chunks of one prefill.
CHUNKS_MAX = 3
# A round takes milliseconds, and a lease of 2 s where it is cut; longer is a hang.
ROUND_TIMEOUT_S = 60.0


@dataclass
class Tally:
    nbytes: int = 0
    wrong_bytes: int = 0
    late_bytes: int = 0
    false_reports: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> bool:
        """Whether any byte was wrong or late, or a producer claimed too much."""
        return bool(self.wrong_bytes or self.late_bytes or self.false_reports)

    def check(
        self,
        cache: StampedCache,
        transfer: int,
        blocks: list[int],
        outcome: kvwire.Outcome,
    ) -> None:
        """Compare the blocks that have landed with their stamps."""
        landed = set(outcome.landed.ids().tolist())
        for position, block in enumerate(blocks):
            if block in landed:
                self.wrong_bytes += cache.wrong(block, transfer, position)
                self.nbytes += cache.words[:, block].nbytes


def take_blocks(free: list[int], count: int, source: random.Random) -> list[int]:
    """Take some of the free blocks, whichever."""
    source.shuffle(free)
    taken, free[:] = free[:count], free[count:]
    return taken


async def prefill(
    out: kvwire.Outgoing,
    stamped: StampedCache,
    number: int,
    blocks: list[int],
    source: random.Random,
) -> bool:
    """Write and mark a transfer by chunks and layers; whether those are several.

    Now and then give up half-way, or leave the last layer of a chunk out.
    """
    fate, parts = source.random(), chunks(len(blocks), source)
    layers = len(stamped.words)
    for positions in parts:
        for layer in range(layers):
            for position in positions:
                stamped.write(blocks[position], number, position, layer)
            if fate < 0.05 and layer == layers // 2:
                out.abort("soak: aborted half-way")
                return len(parts) > 1
            if fate < 0.1 and layer == layers - 1:
                out.finish(partial=True)
                return len(parts) > 1
            out.ready(layers=layer, blocks=slice(positions.start, positions.stop))
            await asyncio.sleep(0)
    out.finish()
    return len(parts) > 1


def chunks(count: int, source: random.Random) -> list[range]:
    """Cut the positions of a list, as a prefill may take them."""
    most = min(count - 1, source.randrange(CHUNKS_MAX))
    cuts = sorted(source.sample(range(1, count), most))
    return [range(start, stop) for start, stop in pairwise([0, *cuts, count])]
