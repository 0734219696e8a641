"""How long the first two tokens take, through the proxy and of its prefill engine.

``python -m tests.programs.first_token.times``, where vLLM is installed. The ways are
asked in turns, each with a prompt of its own: the engine alone, both engines without a
proxy, the proxy, and the proxy with ``--first-token decode``. Each engine has a core of
its own, as in the benchmark of handovers: else an engine alone computes on both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import httpx

from tests.programs.bench import vllm_servers
from tests.programs.bench.vllm_requests import ask_at_once
from tests.programs.bench.vllm_servers import SHAPES, Contender
from tests.support.engines import serving
from tests.support.engines.models import make_model
from tests.support.engines.pairs import running
from tests.support.engines.serving import (
    ANSWERS_WITHIN_S,
    Engine,
    Front,
    asked,
    before,
    front,
    prompt,
)

TOKENS: Final = 8
_TO_WARM_UP: Final = 40  # the length of prompts that are not shown
ALONE: Final = "alone"
BOTH: Final = "both engines, no proxy"
EARLY: Final = "first token of prefill"
LATE: Final = "first token of decode"
# Engines still free blocks when they have answered.
SETTLES_S: Final = 0.3
_KVWIRE: Final = Contender(
    "kvwire",
    "first",
    lambda _, listen: serving.kvwire_config(listen, {"require": ["tcp"]}),
    # With random numbers, two tokens are often equally likely, and decode would begin
    # anew behind prefill's.
    arguments=("--load-format", "auto"),
)


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lengths", default="300,1500,4000", help="of prompts")
    parser.add_argument("--shape", choices=SHAPES, default="64KiB", help="of the model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model("gqa", folder, **SHAPES[options.shape])
        engines = [
            vllm_servers.server(_KVWIRE, role, core, model, folder)
            for core, role in enumerate(("kv_producer", "kv_consumer"))
        ]
        early = front(folder, *before(engines))
        late = front(folder, *before(engines), "--first-token", "decode")
        with running(*engines, early, late), httpx.Client() as client:
            ways = {
                ALONE: partial(_times, client, engines[0].url),
                BOTH: partial(_times_of_both, engines[0], engines[1]),
                EARLY: partial(_times, client, early.url),
                LATE: partial(_times, client, late.url),
            }
            lengths = [int(length) for length in options.lengths.split(",")]
            _measure(ways, lengths, options.rounds)
            return _check(early)


def _check(early: Front) -> int:
    """Show how many streams prefill began; 1 if decode chose another token in any."""
    text = httpx.get(f"{early.url}/metrics", timeout=ANSWERS_WITHIN_S).text
    moved = serving.metric_of(text, "kvwire_proxy_moves_total")
    begun = serving.metric_of(text, "kvwire_proxy_first_tokens_total", "prefill")
    print(f"prefill began {begun:g} streams, of which {moved:g} continued elsewhere")
    return int(bool(moved))


def _measure(
    ways: Mapping[str, Callable[[list[int]], list[float]]],
    lengths: Sequence[int],
    rounds: int,
) -> None:
    seed = 0
    for length in (_TO_WARM_UP, *lengths):
        found: dict[str, list[list[float]]] = defaultdict(list)
        for _ in range(rounds):
            for way, times_of in ways.items():
                seed += 1
                time.sleep(SETTLES_S)
                found[way].append(times_of(prompt(length, seed)))
        if length == _TO_WARM_UP:
            continue
        alone = found[ALONE]
        step = statistics.median(
            later - sooner for times in alone for sooner, later in pairwise(times[1:])
        )
        print(f"{length} tokens; a decode step takes {step * 1e3:.1f} ms")
        for way, all_times in found.items():
            first = [times[0] for times in all_times]
            second = [times[1] - times[0] for times in all_times]
            ratio = statistics.median(
                mine / other[0] for mine, other in zip(first, alone, strict=True)
            )
            behind = statistics.median(second)
            more = (behind - statistics.median(one[1] - one[0] for one in alone)) / step
            print(
                f"  {way}: first {statistics.median(first) * 1e3:.1f} ms "
                f"({min(first) * 1e3:.1f} to {max(first) * 1e3:.1f}), "
                f"{ratio:.3f} of alone; second {behind * 1e3:.1f} ms behind it, "
                f"{more:+.2f} steps to alone",
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


def _times_of_both(prefill: Engine, decode: Engine, ids: list[int]) -> list[float]:
    """When prefill had answered, and when decode had its second token."""
    found = ask_at_once(prefill, decode, ids)
    return [found.prefill_s, found.prefill_s + found.handover_s + found.step_s]


if __name__ == "__main__":
    sys.exit(main())
