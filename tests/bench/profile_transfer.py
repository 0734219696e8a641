"""Where the time of a KV transfer goes, on both sides.

    python -m tests.bench.profile_transfer --transport ucx --wire tcp --kib 1024

Two processes move the blocks of ``kvwire bench fragments``, in rounds that take turns:
plain ones, which say what a round takes, and ones under cProfile, which say which
functions that is. The profiler slows Python down and C not at all, so the second say
only what is large and how often it is called.

*Asleep* is the wall clock without the CPU time of the process: it waits for events, or
for its turn on a CPU. *Elsewhere* is what no function has: the loop, and with ``--clock
wall`` the sleep. The default counts CPU time, which other jobs disturb least.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from kvwire.cli.bench.fragments import UCX, FragmentWork, work_of
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import head, new_table
from kvwire.limits import KIB, MIB
from tests.bench.profile_side import BUILT_IN, FOREIGN, ProfiledSide

SIDES: Final = ("left", "right")
_NAME_CHARS: Final = 52

# What one side answers of one round.
Answer = dict[str, Any]


def profile(
    transport: str,
    wire: str,
    work: FragmentWork,
    *,
    rounds: int,
    loop: str,
    clock: str,
) -> dict[str, Any]:
    """Run it.

    Returns:
        By side: ``spent`` in a plain round, median; ``profiled`` likewise of the rounds
        under the profiler, and their ``functions``, a round. ``rate`` and
        ``rate_profiled`` are bytes a second.
    """
    taken: list[list[tuple[Answer, Answer]]] = [[], []]
    with ExitStack() as running:
        pairs = []
        for profiled in ("no", clock):
            contender = Contender(
                transport,
                ProfiledSide,
                environment=UCX[wire] if transport == "ucx" else {},
                transport=transport,
                pool_bytes=work.pool_bytes,
                loop=loop,
                profiled=profiled,
            )
            pairs.append(running.enter_context(contender.start()))
        for pair in pairs:
            pair.check(work)
            pair.move(work)  # warm
        for _ in range(rounds):
            for pair, answers in zip(pairs, taken, strict=True):
                left, right = pair.move(work)
                answers.append((left, right))
        facts = pairs[0].facts
    plain, under = taken
    found = {
        side: {
            "spent": _median(answers[number] for answers in plain),
            "profiled": _median(answers[number] for answers in under),
            "functions": _by_function([answers[number] for answers in under]),
        }
        for number, side in enumerate(SIDES)
    }
    rates = {"rate": _rate(plain), "rate_profiled": _rate(under)}
    return {"clock": clock, **rates, **found, **facts}


def _rate(rounds: list[tuple[Answer, Answer]]) -> float:
    return median(float(left["values"][0]) for left, _ in rounds)


def _median(answers: Any) -> dict[str, float]:
    spent = [answer["spent"] for answer in answers]
    return {name: median(one[name] for one in spent) for name in spent[0]}


def _by_function(rounds: list[Answer]) -> list[dict[str, Any]]:
    """Means of one round, what takes longest first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for answer in rounds:
        for one in answer["functions"]:
            total = sums.setdefault((one["kind"], one["name"]), [0, 0.0])
            total[0] += one["calls"] / len(rounds)
            total[1] += one["own_s"] / len(rounds)
    rows = [
        {"kind": kind, "name": name, "calls": calls, "own_s": own_s}
        for (kind, name), (calls, own_s) in sums.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["own_s"])))


def render(found: dict[str, Any], work: FragmentWork, top: int) -> RenderableType:
    """Tables: what a round took, by kind and by function."""
    parts: list[RenderableType] = [Text(str(found["transport"])), Text()]
    title = f"a round: {found['rate'] / 1e9:.2f} GB/s, with the profiler "
    table = new_table(f"{title}{found['rate_profiled'] / 1e9:.2f}", *SIDES)
    spent = [found[side]["spent"] for side in SIDES]
    for name in ("wall_s", "user_s", "kernel_s"):
        cells = (f"{1e3 * one[name]:.2f} ms" for one in spent)
        table.add_row(name.removesuffix("_s"), *cells)
    table.add_row("asleep", *(f"{1e3 * asleep_s(one):.2f} ms" for one in spent))
    for name in ("sleeps", "taken_away", "page_faults"):
        counts = (f"{one[name]:.0f}" for one in spent)
        table.add_row(name.replace("_", " "), *counts)
    parts += [table, Text()]
    for side in SIDES:
        parts += [_functions(side, found[side], work, found["clock"], top), Text()]
    return Group(*parts)


def asleep_s(spent: dict[str, float]) -> float:
    """Seconds of a round in which the process was not on a CPU."""
    return max(0.0, spent["wall_s"] - spent["user_s"] - spent["kernel_s"])


def _functions(
    side: str, found: dict[str, Any], work: FragmentWork, clock: str, top: int
) -> RenderableType:
    title = f"{side}, by function: own {clock} time under the profiler"
    table = new_table(title, "ms", "%", "calls", "KiB/call")
    spent = found["profiled"]
    all_s = spent["wall_s"] if clock == "wall" else spent["user_s"] + spent["kernel_s"]
    kinds: dict[str, float] = {}
    for row in found["functions"]:
        kinds[row["kind"]] = kinds.get(row["kind"], 0.0) + row["own_s"]
    kinds["elsewhere"] = max(0.0, all_s - sum(kinds.values()))
    for kind, own_s in sorted(kinds.items(), key=lambda item: -item[1]):
        table.add_row(f"[b]all: {kind}[/b]", *_times(own_s, all_s), "", "")
    for row in found["functions"][:top]:
        size = ""
        if row["kind"] in (BUILT_IN, FOREIGN):
            size = f"{work.moved_bytes / row['calls'] / KIB:.1f}"
        function = Text(row["name"][-_NAME_CHARS:])
        calls = f"{row['calls']:.0f}"
        table.add_row(function, *_times(row["own_s"], all_s), calls, size)
    return table


def _times(own_s: float, all_s: float) -> tuple[str, str]:
    return f"{1e3 * own_s:.2f}", f"{100 * own_s / all_s:.1f}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", default="ucx", help="of kvwire")
    parser.add_argument("--wire", choices=UCX, default="tcp", help="for ucx")
    parser.add_argument("--kib", type=int, default=1024, help="of one layer of a block")
    parser.add_argument("--verb", choices=("push", "pull"), default="push")
    parser.add_argument("--cross-layer", action="store_true")
    parser.add_argument("--mib", type=int, default=512, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--top", type=int, default=12, help="functions to show")
    parser.add_argument("--json", help="write everything to this file; - is the output")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and show it."""
    chosen = arguments(given)
    work = work_of(
        chosen.verb,
        chosen.kib * KIB,
        cross_layer=chosen.cross_layer,
        round_bytes=chosen.mib * MIB,
    )
    found = profile(
        chosen.transport,
        chosen.wire,
        work,
        rounds=chosen.rounds,
        loop=chosen.loop,
        clock=chosen.clock,
    )
    if chosen.json != "-":
        Console(width=100).print(render(found, work, chosen.top))
    if chosen.json:
        text = json.dumps(
            {**head("profile", vars(chosen)), "work": asdict(work), **found}
        )
        if chosen.json == "-":
            print(text)
        else:
            Path(chosen.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
