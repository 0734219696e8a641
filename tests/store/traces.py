"""Hit shares of evictions on traces: ``python -m tests.store.traces [FILE.jsonl ...]``.

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

import numpy as np

from kvwire.store.eviction import EVICTIONS
from kvwire.store.index import Index, as_keys
from kvwire.store.tiers.slabs import GRAIN_BYTES, Slabs

Prompts = Iterable[list[int]]


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
    index = Index(Slabs(-(-blocks // 16), 16 * GRAIN_BYTES), evict)
    hits = asked = 0
    for prompt in prompts:
        keys = as_keys(number.to_bytes(8, "big") for number in prompt)
        slots = index.find(keys)
        here = slots >= 0
        prefix = keys.size if here.all() else int(here.argmin())
        hits, asked = hits + prefix, asked + keys.size
        lacking = keys[~here]
        index.pin(keys[here], slots[here])
        # The tail first, as a put does.
        for last in range(lacking.size, 0, -16):
            some = lacking[max(0, last - 16) : last]
            while (
                left := some.size - (new := index.take(GRAIN_BYTES, some.size)).size
            ) > 0:
                index.give_back(new)
                if not index.evict(GRAIN_BYTES, left).slots.size:
                    break
            else:
                index.name(some, new)
                index.unpin(some, new)
        index.unpin(keys[here], slots[here])
        slots = index.find(keys)
        index.touch(keys[slots >= 0], slots[slots >= 0])
    return hits / asked


def of_file(path: Path) -> list[list[int]]:
    """The prompts of one of Mooncake's traces, in time order."""
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]


def main(arguments: list[str] | None = None) -> None:
    """Print a table: each trace, each size, each eviction."""
    parser = argparse.ArgumentParser(prog="python -m tests.store.traces")
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
