"""Prints the numbers; the exit status is 1 when one is above its ceiling."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import PurePath
from typing import Final

from tests.programs.structure import idioms, imports, scaffolding
from tests.support import tree

# What makes a number smaller lowers its ceiling. One that becomes larger needs a reason
# that a reviewer can disagree with.
CEILINGS: Final = {
    "rooms": 24,
    "floors": 12,
    "arrows": 116,
    "rings": 1,
    "files of the biggest ring": 2,
    "forwarders": 80,
    "callbacks": 91,
    "backoffs": 3,
    "patches in tests": 207,
    "private names in tests": 305,
}


def measured() -> dict[str, list[str]]:
    """What there is of each, one place in a line."""
    graph = _graph(tree.packages(""))
    # What stands on kvwire has rooms of its own, and rings no more than kvwire.
    rings = imports.rings(_graph(tree.packages()))
    files = tree.python("kvwire/", "backends/")
    tests = tree.python(*tree.TESTS)
    return {
        "rooms": sorted({imports.room(module) for module in graph}),
        "floors": imports.chain(graph),
        "arrows": [f"{one} -> {other}" for one, other in sorted(imports.arrows(graph))],
        "rings": [f"{len(ring)}: {', '.join(ring)}" for ring in rings],
        "files of the biggest ring": rings[0] if rings else [],
        "forwarders": list(chain.from_iterable(map(idioms.forwarders, files))),
        "callbacks": list(chain.from_iterable(map(idioms.callbacks, files))),
        "backoffs": list(chain.from_iterable(map(idioms.backoffs, files))),
        "patches in tests": list(chain.from_iterable(map(idioms.patches, tests))),
        "private names in tests": list(
            chain.from_iterable(map(idioms.private_names, tests))
        ),
    }


def _graph(packages: Iterable[str]) -> imports.Graph:
    names = (PurePath(path).name for path in packages)
    return imports.of_tree(name for name in names if name != imports.ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description="the shape of kvwire in numbers")
    parser.add_argument("--list", choices=CEILINGS, help="every place of one number")
    listed: str | None = parser.parse_args().list
    found = measured()
    if listed:
        print("\n".join(found[listed]))
        return
    above = [name for name, places in found.items() if len(places) > CEILINGS[name]]
    for name, places in found.items():
        verdict = "ABOVE ITS CEILING" if name in above else ""
        print(f"{name:27}{len(places):4} of at most {CEILINGS[name]:4}  {verdict}")
    print("\n".join(f"  ring of {ring}" for ring in found["rings"]))
    for name in above:
        print(f"{name}: python -m tests.programs.structure --list {name!r}")
    tests = scaffolding.counted(tree.python(*tree.TESTS))
    print("\n".join(f"{name:27}{count}" for name, count in tests.items()))
    excess = scaffolding.above(tests)
    print("\n".join(excess))
    sys.exit(1 if above or excess else 0)


if __name__ == "__main__":
    main()
