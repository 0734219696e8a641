"""How long the first two tokens take, through the proxy and of its prefill engine.

``python -m tests.programs.first_token.times``, where vLLM is installed. The three ways
are asked in turns, each with a prompt of its own: the engine alone, the proxy, and the
proxy with ``--first-token decode``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Final

import httpx

from tests.support.engines.models import make_model
from tests.support.engines.pairs import running
from tests.support.engines.serving import (
    ANSWERS_WITHIN_S,
    asked,
    before,
    engine,
    front,
    prompt,
)

LENGTHS: Final = (300, 1500, 4000)
TOKENS: Final = 8
ALONE: Final = "alone"
EARLY: Final = "first token of prefill"
LATE: Final = "first token of decode"


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="wide")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(options.model, folder)
        transfer = {"require": ["tcp"]}
        engines = [
            engine(model, folder, name, core, transfer)
            for core, name in enumerate(("prefill", "decode"))
        ]
        early = front(folder, *before(engines))
        late = front(folder, *before(engines), "--first-token", "decode")
        ways = {ALONE: engines[0].url, EARLY: early.url, LATE: late.url}
        with running(*engines, early, late), httpx.Client() as client:
            _measure(client, ways, options.rounds)
    return 0


def _measure(client: httpx.Client, ways: dict[str, str], rounds: int) -> None:
    seed = 0
    for length in (40, *LENGTHS):
        found: dict[str, list[list[float]]] = defaultdict(list)
        for _ in range(rounds):
            for way, url in ways.items():
                seed += 1
                found[way].append(_times(client, url, prompt(length, seed)))
        if length not in LENGTHS:
            continue  # it was to warm up
        step = statistics.median(
            later - sooner
            for times in found[ALONE]
            for sooner, later in pairwise(times[1:])
        )
        print(f"{length} tokens; a decode step takes {step * 1e3:.1f} ms")
        for way, all_times in found.items():
            first = [times[0] for times in all_times]
            second = [times[1] - times[0] for times in all_times]
            ratio = statistics.median(
                mine / alone[0] for mine, alone in zip(first, found[ALONE], strict=True)
            )
            behind = statistics.median(second)
            print(
                f"  {way}: first {statistics.median(first) * 1e3:.1f} ms, "
                f"{ratio:.3f} of alone; second {behind * 1e3:.1f} ms behind it, "
                f"{behind / step:.2f} steps",
                flush=True,
            )


def _times(client: httpx.Client, url: str, ids: list[int]) -> list[float]:
    """When each token was here, in seconds since it was asked for."""
    body = {**asked(TOKENS, prompt=ids), "stream": True, "return_token_ids": False}
    began = time.perf_counter()
    with client.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=ANSWERS_WITHIN_S
    ) as said:
        return [
            time.perf_counter() - began
            for line in said.iter_lines()
            if '"text"' in line
        ]


if __name__ == "__main__":
    sys.exit(main())
