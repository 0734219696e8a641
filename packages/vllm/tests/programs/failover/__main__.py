"""Kill engines that stream answers, and see what it costs.

``make failover`` starts two engines of vLLM that decode over one store server, and the
proxy before them. Round by round it reads some streams, kills one of the engines, in
turns, and compares every stream with one engine's uninterrupted answer. vLLM's own
counters show how many tokens the other engine computed again. A round's streams begin
somewhere in those answers, with what comes before as their prompts: so a stream of
thousands of tokens takes seconds. Engines start as forks of a process that has imported
vLLM; with ``--commands`` they start as users start them, which takes ten times as long.
With ``--cost`` it measures how much decoding slows down because blocks are saved as
they fill.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from packages.vllm.tests.programs.failover.arena import (
    AFTER_TOKENS,
    Round,
    Workload,
    arena,
    pause_s,
)
from packages.vllm.tests.programs.failover.cost import Cost, cost_of, cost_of_hooks
from packages.vllm.tests.support.models import make_model

# After so many tokens of its streams an engine is killed at the latest: enough to fill
# two blocks.
_AT_MOST: Final = 260
# Rounds that differ in one of these options are no rounds of one table.
_SAME: Final = ("streams", "tokens", "commands", "seed", "model", "signals")


def main() -> int:
    """Run it; the exit status is 1 if a round was bad."""
    options = _options()
    found: dict[str, Any] = {"load": os.getloadavg()}
    had = Rounds.read(options.json, {name: getattr(options, name) for name in _SAME})
    rounds = had.counted
    with tempfile.TemporaryDirectory(prefix="kvwire-failover-") as made:
        folder = Path(made)
        if options.hooks:
            hooks = cost_of_hooks(folder, streams=options.streams, steps=options.hooks)
            found["hooks"] = asdict(hooks)
            print(
                f"the connector's part of a step: {hooks.engine_s * 1e6:.0f} us of the "
                f"engine's thread, {hooks.process_s * 1e6:.0f} us of its process; "
                f"{hooks.blocks} blocks were filled",
                flush=True,
            )
        if options.cost or options.kills > len(rounds):
            model = make_model(options.model, folder)
        if options.cost:
            cost = cost_of(model, folder, rounds=options.cost, streams=options.streams)
            found["cost"] = asdict(cost) | {"rate": cost.rate, "work": cost.work}
            found["cost"]["best"] = cost.best
            print(cost_line(cost), flush=True)
        if options.kills > len(rounds):
            play(model, folder, options, had)
    if rounds:
        print(table(rounds))
    if had.idle:
        print(f"\n{had.idle} more rounds, whose engine had no streams, do not count")
    found |= had.document()
    if options.json:
        options.json.write_text(json.dumps(found))
    if options.plot and rounds:
        plot(rounds, options.plot)
    return int(any(one.bad for one in rounds))


@dataclass(slots=True)
class Rounds:
    """The rounds of this run, and of earlier ones with the same options."""

    options: dict[str, Any]
    counted: list[Round] = field(default_factory=list)
    # Rounds in which nothing happened: the engine had no stream any more.
    idle: int = 0

    @classmethod
    def read(cls, path: Path | None, options: dict[str, Any]) -> Self:
        """Read the rounds of earlier runs; those with other options are refused."""
        if path is None or not path.exists():
            return cls(options)
        document = json.loads(path.read_text())
        had = document.get("options")
        if had != options:
            raise SystemExit(
                f"{path} has rounds with the options {had}, not {options}: use these, "
                "or another file"
            )
        rounds = [
            {k: v for k, v in o.items() if k != "bound"} for o in document["rounds"]
        ]
        return cls(options, [Round(**one) for one in rounds], document["idle"])

    @property
    def played(self) -> int:
        """How many rounds there were."""
        return len(self.counted) + self.idle

    def take(self, one: Round) -> None:
        """Count a round, if a stream moved or something happened that never may."""
        if one.moved or one.bad:
            self.counted.append(one)
        else:
            self.idle += 1

    def document(self) -> dict[str, Any]:
        """Return what is kept for further runs."""
        rounds = [asdict(one) | {"bound": one.bound} for one in self.counted]
        return {"options": self.options, "rounds": rounds, "idle": self.idle}


def play(model: Path, folder: Path, options: argparse.Namespace, had: Rounds) -> None:
    """Kill engines, until it is enough or too late."""
    end = time.monotonic() + options.seconds
    with arena(model, folder, forked=not options.commands) as place:
        first = place.engines[0]
        work = Workload.of(options.streams, options.tokens, options.seed, first)
        while len(had.counted) < options.kills and time.monotonic() <= end:
            number = had.played
            place.back()
            chance = random.Random(1000 * options.seed + number)
            at = chance.randrange(1, min(_AT_MOST, options.tokens - AFTER_TOKENS))
            how = options.signals[number % len(options.signals)]
            these = work.cut(chance, at + AFTER_TOKENS)
            one = place.round(these, at, signal.Signals[how])
            had.take(one)
            print(f"round {had.played}: {line(one)}", flush=True)


def line(one: Round) -> str:
    """One round in a line."""
    longest_s = one.pauses_s[0] if one.pauses_s else 0.0
    return (
        f"engine {one.engine} ended with {one.moved} streams; computed again "
        f"{one.computed} tokens of at most {one.bound}, wrong {one.wrong}, lost "
        f"{one.lost}; longest pause {longest_s * 1e3:.0f} ms from the kill on, "
        f"{one.around_s * 1e3:.0f} ms from the token before it, "
        f"{one.before_s * 1e3:.0f} ms before; a step is "
        f"{one.step_s * 1e3:.1f} ms; noticed after {one.noticed_s * 1e3:.0f} ms, then "
        f"{one.first_s * 1e3:.0f} ms to a first token; gone after {one.gone_s:.1f} s"
    )


def table(rounds: Sequence[Round]) -> str:
    """All rounds, as Markdown."""
    moved = sum(one.moved for one in rounds)
    computed = sum(one.computed for one in rounds)
    pauses = sorted(p for one in rounds for p in one.pauses_s[: one.moved])
    steps = sorted(one.step_s for one in rounds)
    rows = {
        "engines ended": len(rounds),
        "streams that moved": moved,
        "streams with wrong tokens": sum(one.wrong for one in rounds),
        "streams lost": sum(one.lost for one in rounds),
        "tokens computed again, per stream": f"{computed / max(1, moved):.0f}",
        "rounds above a block and a step for each stream": sum(
            one.computed > one.bound for one in rounds
        ),
        "rounds with a pause above 10 steps and a second": sum(
            one.late for one in rounds
        ),
        "rounds with no token for 10 steps after it was noticed": sum(
            one.slow for one in rounds
        ),
        "median time to the first token at the other engine": (
            f"{statistics.median(o.first_s for o in rounds):.3f} s"
        ),
        "longest pause from the kill on": f"{pauses[-1]:.2f} s" if pauses else "none",
        "from the token before it": f"{max(o.around_s for o in rounds):.2f} s",
        "longest pause before a kill": f"{max(o.before_s for o in rounds):.2f} s",
        "median pause": f"{pauses[len(pauses) // 2]:.2f} s" if pauses else "none",
        "median step": f"{steps[len(steps) // 2] * 1e3:.0f} ms",
        "a kill noticed after, at most": f"{max(o.noticed_s for o in rounds):.2f} s",
    }
    said = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"\n| | |\n| --- | --- |\n{said}"


def cost_line(cost: Cost) -> str:
    """What saving costs, in a line."""
    return (
        f"decoding with saves is {cost.rate:.3f} times as fast as without (the fastest "
        f"turns: {cost.best:.3f}; to a connector that does nothing: "
        f"{cost.rate_to_bare:.3f}), and takes {cost.work:.3f} times as much of the "
        f"processor for a token; a step of {cost.step_s * 1e3:.2f} ms takes "
        f"{cost.more_s * 1e3:.2f} ms longer"
    )


def plot(rounds: Sequence[Round], path: Path) -> None:
    """Draw each stream's tokens around the moment that its engine ended."""
    from matplotlib.figure import Figure

    shown = rounds[:3]
    figure = Figure(figsize=(9, 1.0 + 1.2 * len(shown)), layout="constrained")
    for axes, one in zip(
        figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0],
        shown,
        strict=True,
    ):
        order = sorted(one.tokens_at, key=lambda at: -pause_s(at, one.at))
        for row, at in enumerate(order):
            color = "#b5442e" if row < one.moved else "#3b6ea5"
            seen = [t - one.at for t in at if -1 <= t - one.at <= 2]
            axes.plot(seen, [row] * len(seen), "|", color=color, ms=7)
        axes.axvline(0, color="black", lw=0.8)
        axes.set_yticks([])
        axes.set_ylim(-0.7, len(order) - 0.3)
        axes.set_ylabel(f"{len(order)} streams", fontsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(
            f"{one.moved} streams moved, {one.computed} tokens computed again",
            fontsize=9,
            loc="left",
        )
    axes.set_xlim(-1, 2)
    axes.set_xlabel("seconds after an engine ended; each mark is a token")
    figure.savefig(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "make failover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=10, help="rounds; 0 for none")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no round begins after that"
    )
    parser.add_argument("--streams", type=int, default=4, help="at once")
    parser.add_argument(
        "--tokens", type=int, default=3600, help="of each uninterrupted answer"
    )
    parser.add_argument(
        "--commands", action="store_true", help="start engines as users start them"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model", choices=("gqa", "wide"), default="gqa", help="wide is larger"
    )
    parser.add_argument(
        "--signals",
        nargs="+",
        default=["SIGKILL"],
        choices=("SIGKILL", "SIGTERM"),
        help="how engines end, in turns",
    )
    parser.add_argument(
        "--cost", type=int, default=0, metavar="ROUNDS", help="measure what saves cost"
    )
    parser.add_argument(
        "--hooks", type=int, default=0, metavar="STEPS", help="likewise, without vLLM"
    )
    parser.add_argument(
        "--json", type=Path, help="where every figure goes; kills in it count"
    )
    parser.add_argument("--plot", type=Path, help="a picture of the pauses, as SVG")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
