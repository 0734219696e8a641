"""Ask an engine alone and two behind the proxy, and compare the answers.

``python -m packages.vllm.tests.programs.answers --answers 10000``, where vLLM is
installed. Each answer has a seed: ``--seed S --answers 1`` asks for that one again.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx

from packages.vllm.tests.programs.answers.requests import (
    Likeness,
    apart,
    draw,
    likeness,
)
from packages.vllm.tests.support.models import make_model, write_byte_tokenizer
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import before, engine, front

# Answers between two lines of its progress.
_SHOWN_EACH: Final = 200
# Requests at once: a step of an engine takes hardly longer for many than for one.
AT_ONCE: Final = 48
# Of the model: what a step takes is mostly the calls for each.
_LAYERS: Final = 2


def main() -> int:
    """Run it; the exit status is 1 if any answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    of_seconds = "no request begins later, counted from before the engines start"
    parser.add_argument("--seconds", type=float, default=math.inf, help=of_seconds)
    parser.add_argument("--folder", type=Path, help="for the model and for logs")
    options = parser.parse_args()
    print(f"seeds {options.seed} to {options.seed + options.answers - 1}")
    with tempfile.TemporaryDirectory() as folder:
        return _run(options.folder or Path(folder), options)


def _run(folder: Path, options: argparse.Namespace) -> int:
    last = time.monotonic() + options.seconds
    model = make_model("gqa", folder, num_hidden_layers=_LAYERS)
    write_byte_tokenizer(model)
    transfer = {"require": ["tcp"]}
    more = (
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        # No request may be computed in several steps, see `draw`.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"),
    )
    engines = [
        engine(model, folder, name, core, transfer, *more)
        for core, name in enumerate(("prefill", "decode"))
    ]
    proxy = front(folder, *before(engines))
    found: Counter[Likeness] = Counter()
    wrong: list[int] = []
    seeds = iter(range(options.seed, options.seed + options.answers))
    counting = threading.Lock()
    with running(*engines, proxy), httpx.Client() as client:

        def compare(seed: int) -> None:
            request = draw(random.Random(seed))
            # In turns, so that both have as much to do.
            one = engines[seed % len(engines)]
            here = request.answer(client, one.url, cache_salt=f"alone {seed}")
            there = request.answer(client, proxy.url)
            alike = likeness(here, there)
            with counting:
                if alike is Likeness.DIFFERENT:
                    wrong.append(seed)
                    print(
                        f"seed {seed}: {request.said}", *apart(here, there), sep="\n  "
                    )
                found[alike] += 1
                if found.total() % _SHOWN_EACH == 0:
                    shown = f"{found.total()} answers, {len(wrong)} different"
                    print(f"{time.monotonic() - began:.0f} s: {shown}", flush=True)

        def compare_more(_: int) -> None:
            for seed in seeds:
                compare(seed)
                if time.monotonic() > last:
                    return

        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(compare_more, range(AT_ONCE)))
        text = httpx.get(f"{proxy.url}/metrics").text
        print(*(line for line in text.splitlines() if "_moves_" in line), sep="\n")
        print(f"fetched {engines[1].metric('vllm:external_prefix_cache_hits_total'):g}")
    print(f"{found.total()} answers in {time.monotonic() - began:.0f} s:")
    print(*(f"  {count} {alike}" for alike, count in found.items()), sep="\n")
    print(f"  different: seeds {wrong}" if wrong else "  none is different")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
