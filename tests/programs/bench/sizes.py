"""What large numbers cost: blocks that a tier keeps, requests that end, blocks offered.

Each figure is one that a page names, or an operator runs into: how much of a memory
tier blocks of one size fill, how long a communicator takes to close with many published
requests, and how long an offer of many blocks holds the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, Final, TypeAlias

import numpy as np
from rich.console import RenderableType

import kvwire
from kvwire.cli.bench.report import new_table
from kvwire.limits import GIB, KIB, MIB
from kvwire.types import in_bytes

BLOCK_BYTES: Final = (2 * KIB, 16 * KIB, 64 * KIB, MIB)
_ROUNDS: Final = 7
_PUT_BYTES: Final = 16 * MIB


Figure: TypeAlias = tuple[str, int, float, str, str]
"""What was done, with how many, what came of it, its unit, and the aim."""


def cache_of(nbytes: int, blocks: int) -> kvwire.PagedCache:
    """Return a cache with blocks of ``nbytes``."""
    spec = kvwire.KVSpec(
        layers=1,
        kv_heads=1,
        head_dim=nbytes,
        block_tokens=1,
        dtype="uint8",
        components=1,
        kind="state",
    )
    return kvwire.PagedCache.grouped(
        {"kv": (spec, [np.zeros((blocks, 1, 1, nbytes), np.uint8)])}
    )


async def filled(tier_bytes: int, block_bytes: int) -> Figure:
    """Put as many bytes of blocks as a memory tier has; return the share it keeps."""
    from kvwire_store import BlockStore

    count = tier_bytes // block_bytes
    step = max(1, min(count, _PUT_BYTES // block_bytes))
    cache = cache_of(block_bytes, step)
    async with BlockStore.open([f"memory:{tier_bytes // KIB}KiB"]) as store:
        for first in range(0, count, step):
            some = range(first, min(count, first + step))
            hashes = [number.to_bytes(8, "little") for number in some]
            await store.put(hashes, cache, range(len(some)))
        (kept,) = store.stats().values()
    share = kept.blocks * block_bytes / tier_bytes
    what = f"of {in_bytes(tier_bytes)} kept, in blocks of {in_bytes(block_bytes)}"
    return what, count, 100 * share, "%", "100 %"


async def published(count: int) -> Iterator[Figure]:
    """Publish requests that nobody pulls, and close."""
    cache = cache_of(64 * KIB, 64)
    started = perf_counter()
    async with kvwire.open(name="sizes") as here:
        held = [here.publish(f"request-{n}", cache, [n % 64]) for n in range(count)]
        begun = perf_counter()
    ended = perf_counter()
    assert all(one.is_drained for one in held)
    return iter(
        (
            ("requests published", count, begun - started, "s", ""),
            ("closed with them", count, ended - begun, "s", "< 3 s"),
        )
    )


async def offered(count: int) -> Iterator[Figure]:
    """Offer blocks and withdraw them, in the ways that callers list them."""
    ids = np.random.default_rng(0).permutation(count)
    lists = {"a range": range(count), "an array": ids, "a list": ids.tolist()}
    figures: list[Figure] = []
    async with kvwire.open(name="sizes") as here:
        memory = np.zeros(16 * count, np.uint8)
        window = here.expose("sizes", memory, block_bytes=16)
        for name, listed in lists.items():
            for verb in (window.offer, window.withdraw):
                spent_ms = 1000 * _least(verb, listed)
                what = f"blocks: {verb.__name__} of {name}"
                figures.append((what, count, spent_ms, "ms", "< 5 ms"))
        await window.close()
    return iter(figures)


def _least(verb: Callable[[Any], object], listed: Any) -> float:
    """Return the least time of a few calls: what it takes, not what disturbs it."""
    spent = []
    for _ in range(_ROUNDS):
        started = perf_counter()
        verb(listed)
        spent.append(perf_counter() - started)
    return min(spent)


async def sizes(
    tier_bytes: int = GIB, requests: int = 100_000, blocks: int = 300_000
) -> list[Figure]:
    """Return all figures."""
    figures = [await filled(tier_bytes, block_bytes) for block_bytes in BLOCK_BYTES]
    figures += await published(requests)
    figures += await offered(blocks)
    return figures


def render(figures: Sequence[Figure]) -> RenderableType:
    """Show a row for each figure."""
    table = new_table(None, "number", "is", "aim")
    for what, number, value, unit, aim in figures:
        table.add_row(what, f"{number:,}", f"{value:.3g} {unit}", aim)
    return table
