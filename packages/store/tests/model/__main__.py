"""Runs rounds of the model, and says how many promises were kept.

python -m packages.store.tests.model --rounds 1000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.progress import track

from packages.store.tests.model.rounds import EVENTS, ROOMS, Round


async def one(seed: int, asked: argparse.Namespace, found: Counter[str]) -> str:
    """Run a round; what it has found wrong, or nothing."""
    events = tuple(event for event in asked.events.split(",") if event)
    with tempfile.TemporaryDirectory(prefix="kvwire-", dir=asked.directory) as base:
        this = Round(seed, Path(base), events=events, room=asked.room)
        try:
            await this.run()
        except Exception as exc:  # noqa: BLE001 - a store that raises is wrong as well
            return f"seed {seed}, room {this.room}: {type(exc).__name__}: {exc}"
        finally:
            found.update(this.counts)
    return ""


def main() -> int:
    """Run the rounds that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m packages.store.tests.model")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", default=",".join(EVENTS))
    parser.add_argument("--room", default="", choices=["", *ROOMS])
    parser.add_argument("--directory", default=None, help="where tiers are made")
    parser.add_argument("--keep-going", action="store_true")
    asked = parser.parse_args()
    found: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.monotonic()
    seeds = range(asked.seed, asked.seed + asked.rounds)
    for seed in track(seeds, "rounds", disable=not sys.stderr.isatty()):
        said = asyncio.run(one(seed, asked, found))
        if not sys.stderr.isatty() and not (seed - asked.seed + 1) % 50:
            print(f"{seed - asked.seed + 1} rounds", flush=True)
        if said:
            wrong.append(said)
            print(said, flush=True)
            if not asked.keep_going:
                break
    seconds = time.monotonic() - began
    what = ", ".join(f"{found[name]} {name}" for name in sorted(found) if name)
    print(f"{seed - asked.seed + 1} rounds in {seconds:.0f} s: {what}")
    print(f"{len(wrong)} rounds have found something wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
