"""kvwire and NixlConnector on the same engines, while things go wrong.

``make fault-matrix`` has each connector's two engines on hosts of their own, which are
network namespaces (root, ``ip`` and ``tc``), asks them, and harms them meanwhile. Every
answer is compared with that of one engine alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.integrations.vllm.faults.answers import Outcome
from tests.integrations.vllm.faults.arena import Arena, Tally, arena
from tests.integrations.vllm.faults.cases import CASES
from tests.integrations.vllm.faults.contenders import CONTENDERS

Rows = dict[str, dict[str, Tally]]


def main() -> int:
    """Run it; the exit status is 1 if kvwire did anything wrong."""
    options = _options()
    parts = options.only or [""]
    chosen = [name for name in CASES if any(part in name for part in parts)]
    found: dict[str, Rows] = {}
    began = time.monotonic()
    for kind in options.models.split(","):
        for name in options.connectors.split(","):
            rows = found.setdefault(kind, {}).setdefault(name, {})
            with arena(CONTENDERS[name], kind) as place:
                _run(place, chosen, rows, options)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1, default=vars))
    for kind, by_name in found.items():
        print(f"\n{kind}, {time.monotonic() - began:.0f} s\n\n{table(by_name)}")
    ours = [t for by in found.values() for t in by.get("kvwire", {}).values()]
    return int(any(map(bad, ours)))


def bad(tally: Tally) -> bool:
    """Whether something happened that never may."""
    never = (Outcome.WRONG, Outcome.HANG)
    counts = sum(tally.outcomes[one.value] for one in never)
    return bool(counts or tally.crashes or tally.leaked)


def table(rows: Rows) -> str:
    """Faults by connectors, as Markdown."""
    columns = [one.value for one in Outcome]
    heads = ["fault", "connector", "requests", *columns, "deaths", "leaked", "slowest"]
    lines = [heads, ["---"] * len(heads)]
    for case in next(iter(rows.values())):
        for name, by_case in rows.items():
            if case not in by_case:
                continue
            tally = by_case[case]
            counts = [tally.outcomes[column] for column in columns]
            numbers = [tally.outcomes.total(), *counts, tally.crashes, tally.leaked]
            slowest = f"{tally.slowest_s:.1f} s"
            lines.append([case, name, *map(str, numbers), slowest])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _run(
    place: Arena, chosen: list[str], rows: dict[str, Tally], options: argparse.Namespace
) -> None:
    """Run the cases again and again, until there are enough or time is over."""
    end = time.monotonic() + 60 * options.minutes
    for case in chosen:
        rows[case] = Tally()
    least = 0
    while least < options.requests and (least == 0 or time.monotonic() < end):
        for case in chosen:
            if least and time.monotonic() > end:
                break
            place.tally = rows[case]
            began = time.monotonic()
            CASES[case](place, options.batch)
            place.settle()
            took_s = time.monotonic() - began
            print(f"{place.contender.name}: {case}: {took_s:.0f} s", rows[case])
            sys.stdout.flush()
        least = min(tally.outcomes.total() for tally in rows.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=340, help="of each fault")
    parser.add_argument("--batch", type=int, default=24, help="in one round of a fault")
    parser.add_argument("--minutes", type=float, default=1e9, help="for a connector")
    parser.add_argument("--models", default="gqa,gemma")
    parser.add_argument("--connectors", default=",".join(CONTENDERS))
    parser.add_argument("--only", action="append", help="faults, by parts of names")
    parser.add_argument("--json", type=Path, help="where the counts go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
