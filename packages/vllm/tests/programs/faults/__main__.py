"""kvwire and NixlConnector on the same engines, while things go wrong.

``make fault-matrix`` has each connector's engines on hosts of their own, which are
network namespaces (root, ``ip`` and ``tc``), asks them, and harms them meanwhile. Every
answer is compared with that of one engine alone. kvwire's are asked once more through
its proxy, with prompts that all begin alike, beside requests of bystanders.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Final

from packages.vllm.tests.programs.faults.answers import Outcome
from packages.vllm.tests.programs.faults.arena import SETTINGS, Arena, Tally, arena
from packages.vllm.tests.programs.faults.cases import CASES, COMPUTED_ONCE, CROWDED
from packages.vllm.tests.programs.faults.contenders import CONTENDERS

Rows = dict[str, dict[str, Tally]]

# Columns of the table, and what of a tally is in each.
_COUNTS: Final = {
    "deaths": "crashes",
    "leaked": "leaked",
    "bystanders harmed": "harmed",
    "rewound": "rewound",
    "computed by decode": "again",
}


def main() -> int:
    """Run it; the exit status is 1 if kvwire did anything wrong."""
    options = _options()
    parts = options.only or [""]
    chosen = [name for name in CASES if any(part in name for part in parts)]
    found: dict[str, Rows] = {}
    began = time.monotonic()
    for kind in options.models.split(","):
        for name in options.connectors.split(","):
            for setting in map(SETTINGS.__getitem__, options.settings.split(",")):
                # In sequence it is decode that has more to do than it can.
                cases = [c for c in chosen if setting.shared or c != CROWDED]
                if not cases or (setting.shared and name != "kvwire"):
                    continue  # it is kvwire's proxy that asks
                rows = found.setdefault(kind, {}).setdefault(name + setting.name, {})
                with arena(CONTENDERS[name], setting, kind) as place:
                    _run(place, cases, rows, options)
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1, default=vars))
    for kind, by_name in found.items():
        print(f"\n{kind}, {time.monotonic() - began:.0f} s\n\n{table(by_name)}")
    ours = [
        (case, tally)
        for by_name in found.values()
        for name, rows in by_name.items()
        if name.startswith("kvwire")
        for case, tally in rows.items()
    ]
    return int(any(bad(case, tally) for case, tally in ours))


def bad(case: str, tally: Tally) -> bool:
    """Whether something happened that never may."""
    never = (Outcome.WRONG, Outcome.HANG)
    counts = sum(tally.outcomes[one.value] for one in never)
    twice = tally.again if case in COMPUTED_ONCE else 0
    others = tally.harmed or tally.rewound
    return bool(counts or tally.crashes or tally.leaked or others or twice)


def table(rows: Rows) -> str:
    """Faults by connectors, as Markdown."""
    columns = [one.value for one in Outcome]
    heads = ["fault", "connector", "requests", *columns, *_COUNTS, "slowest"]
    lines = [heads, ["---"] * len(heads)]
    for case in dict.fromkeys(case for by_case in rows.values() for case in by_case):
        for name, by_case in rows.items():
            if case not in by_case:
                continue
            tally = by_case[case]
            counts = [tally.outcomes[column] for column in columns]
            counts += [getattr(tally, name) for name in _COUNTS.values()]
            numbers = [tally.outcomes.total(), *counts]
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
            with place.watched():
                CASES[case](place, options.batch)
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
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--only", action="append", help="faults, by parts of names")
    parser.add_argument("--json", type=Path, help="where the counts go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
