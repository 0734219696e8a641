"""Ask an engine alone and two behind the proxy, and compare the answers.

``python -m tests.programs.first_token --answers 10000``, where vLLM is installed. Each
answer has a seed: ``--seed S --answers 1`` asks for that one again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx

from tests.programs.first_token.requests import (
    Likeness,
    apart,
    draw,
    likeness,
    warm_up,
)
from tests.support.engines.models import make_model, write_byte_tokenizer
from tests.support.engines.pairs import running
from tests.support.engines.serving import before, engine, front

# Between two looks at the time.
_ROUND: Final = 48
# Requests at once.
AT_ONCE: Final = 12


def main() -> int:
    """Run it; the exit status is 1 if any answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path, help="for the model and for logs")
    options = parser.parse_args()
    print(f"seeds {options.seed} to {options.seed + options.answers - 1}")
    with tempfile.TemporaryDirectory() as folder:
        return _run(options.folder or Path(folder), options)


def _run(folder: Path, options: argparse.Namespace) -> int:
    model = make_model("gqa", folder)
    write_byte_tokenizer(model)
    transfer = {"require": ["tcp"]}
    more = (
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        # So many that no request has to be computed in several steps, see `draw`.
        *("--max-num-batched-tokens", "16384"),
    )
    engines = [
        engine(model, folder, name, core, transfer, *more)
        for core, name in enumerate(("prefill", "decode"))
    ]
    proxy = front(folder, *before(engines))
    found: Counter[Likeness] = Counter()
    wrong: list[int] = []
    with running(*engines, proxy), httpx.Client() as client:

        def compare(seed: int) -> tuple[int, Likeness]:
            request = draw(random.Random(seed))
            here = request.answer(client, engines[0].url, cache_salt=f"alone {seed}")
            there = request.answer(client, proxy.url)
            alike = likeness(here, there)
            if alike is Likeness.DIFFERENT:
                print(f"seed {seed}: {request.said}", *apart(here, there), sep="\n  ")
            return seed, alike

        warm_up(client, proxy.url)
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            seeds = range(options.seed, options.seed + options.answers)
            for start in range(0, len(seeds), _ROUND):
                if time.monotonic() - began > options.seconds:
                    break
                for seed, alike in pool.map(compare, seeds[start : start + _ROUND]):
                    found[alike] += 1
                    wrong += [seed] * (alike is Likeness.DIFFERENT)
                print(f"{found.total()} answers, {len(wrong)} different", flush=True)
        text = httpx.get(f"{proxy.url}/metrics").text
        lines = [line for line in text.splitlines() if "_first_tokens_total{" in line]
        print(
            *lines, *(line for line in text.splitlines() if "_moves_" in line), sep="\n"
        )
        print(f"fetched {engines[1].metric('vllm:external_prefix_cache_hits_total'):g}")
    print(f"{found.total()} answers in {time.monotonic() - began:.0f} s:")
    print(*(f"  {count} {alike}" for alike, count in found.items()), sep="\n")
    print(f"  different: seeds {wrong}" if wrong else "  none is different")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
