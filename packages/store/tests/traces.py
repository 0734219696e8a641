"""Hit shares of evictions: ``python -m packages.store.tests.traces [FILE.jsonl ...]``.

A file is one of Mooncake's traces (github.com/kvcache-ai/Mooncake, FAST25-release):
each line names the blocks of one prompt in ``hash_ids``. Without one, prompts are drawn
here: agents that come back to a few prefixes, and between them scans of documents that
nobody asks for again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from kvwire_store.eviction import EVICTIONS
from kvwire_store.index import Index
from kvwire_store.keys import as_keys
from kvwire_store.placement import leading
from kvwire_store.tiers.slabs import GRAIN_BYTES, Slabs

Prompts = Iterable[list[int]]
_SLAB_BLOCKS: Final = 16


def agents(*, scans: bool, prompts: int = 3_000) -> Iterator[list[int]]:
    """Prompts of 40 agents with 50 blocks of their own; every 20th scans 400 blocks."""
    rng = np.random.default_rng(1)
    fresh = 1_000_000
    for number in range(prompts):
        if scans and number % 20 == 19:
            yield list(range(fresh, fresh + 400))
            fresh += 400
            continue
        agent = min(int(rng.zipf(1.3)), 40) * 100
        # Its prefix, and what was said since.
        yield [*range(agent, agent + 50), fresh, fresh + 1]
        fresh += 2


def hit_share(evict: str, blocks: int, prompts: Prompts) -> float:
    """The share of blocks that were there when a prompt asked for its prefix."""
    slabs = Slabs(-(-blocks // _SLAB_BLOCKS), _SLAB_BLOCKS * GRAIN_BYTES)
    index = Index(slabs, evict)
    asked = hits = 0
    for prompt in prompts:
        keys = as_keys(b"%d" % block for block in prompt)
        slots = index.find(keys)
        there = leading(slots >= 0)
        asked += keys.size
        hits += there
        index.touch(keys[:there], slots[:there])
        lacking = keys[there:][slots[there:] < 0]
        # The tail first: where a chain has no room, its head is what stays.
        while lacking.size:
            needed = lacking.size - slabs.free(GRAIN_BYTES)
            index.evict(GRAIN_BYTES, max(0, needed))
            taken = index.take(GRAIN_BYTES, lacking.size)
            index.name(lacking[-taken.size :], taken)
            index.unpin(lacking[-taken.size :], taken)
            lacking = lacking[: -taken.size]
    return hits / asked


def of_file(path: Path) -> list[list[int]]:
    """The prompts of one of Mooncake's traces, in time order."""
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]


def main(arguments: list[str] | None = None) -> None:
    """Print a table: each trace, each size, each eviction."""
    parser = argparse.ArgumentParser(prog="python -m packages.store.tests.traces")
    parser.description = "Print the hit shares of evictions on traces."
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE.jsonl",
        help="one of Mooncake's traces; without any, prompts are drawn",
    )
    files: list[Path] = parser.parse_args(arguments).files
    for path in files:
        if not path.is_file():
            parser.error(f"{path}: there is no such file")
    traces = {str(path): of_file(path) for path in files} or {
        "agents": list(agents(scans=False)),
        "agents and scans": list(agents(scans=True)),
    }
    print(f"| trace | blocks | {' | '.join(EVICTIONS)} |")
    for name, prompts in traces.items():
        distinct = len({block for prompt in prompts for block in prompt})
        for share in (100, 30, 10, 3):
            blocks = max(64, distinct // share)
            shares = [hit_share(kind, blocks, prompts) for kind in EVICTIONS]
            cells = " | ".join(f"{100 * one:.1f} %" for one in shares)
            print(f"| {name} | {blocks:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
