"""Caches whose every line is stamped, and what a soak counts of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

import kvwire
from tests.support.caches import Memory

LINE_BYTES = 64
POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
Words = npt.NDArray[np.uint64]

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


class StampedCache:
    """A paged cache whose blocks are written and checked as stamps."""

    def __init__(self, spec: kvwire.KVSpec = SPEC) -> None:
        memory = Memory(spec, NUM_BLOCKS, 0)
        self.words: list[Words] = [
            t.reshape(NUM_BLOCKS, -1).view(np.uint64) for t in memory.tensors
        ]
        for words in self.words:
            words[:] = POISON
        self.cache = memory.cache
        self._lines = np.arange(
            self.words[0].shape[1] * 8 // LINE_BYTES, dtype=np.uint64
        ).repeat(LINE_BYTES // 8)

    def stamp(self, transfer: int, layer: int, position: int, generation: int) -> Words:
        """What a block holds: its transfer, layer, position, generation and line."""
        name = ((transfer * 64 + layer) * 256 + position) * 256 + generation % 256
        return (np.uint64(name) << np.uint64(16)) + self._lines

    def write(
        self,
        transfer: int,
        layer: int,
        blocks: list[int],
        generation: int,
        positions: range,
    ) -> None:
        for position in positions:
            block = blocks[position]
            self.words[layer][block] = self.stamp(transfer, layer, position, generation)

    def check(
        self, transfer: int, blocks: list[int], outcome: kvwire.Outcome, tally: Tally
    ) -> None:
        """Compare the blocks that have landed with their stamps."""
        landed = set(outcome.landed.ids().tolist())
        for position, block in enumerate(blocks):
            if block not in landed:
                continue
            for layer, words in enumerate(self.words):
                expected = self.stamp(transfer, layer, position, transfer)
                wrong = int(np.count_nonzero(words[block] != expected)) * 8
                tally.wrong_bytes += wrong
                tally.nbytes += expected.nbytes

    def poison(self, blocks: list[int]) -> None:
        for words in self.words:
            words[blocks] = POISON

    def poisoned(self, blocks: list[int]) -> int:
        return sum(
            int(np.count_nonzero(words[blocks] != POISON)) * 8 for words in self.words
        )


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
            stamped.write(number, layer, blocks, number, positions)
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
