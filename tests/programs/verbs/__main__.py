"""Random verbs on stores, servers and disks that fail: python -m tests.programs.verbs.

What each act has reported is compared with what is there. The first seed that shows
something wrong is printed and ends the run; ``--seed N --acts M`` repeats it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.progress import track

from tests.programs.verbs.acts import ACTS, VERBS, run


def main() -> int:
    """Run what the command line asks for; the exit status is 1 if a seed failed."""
    parser = argparse.ArgumentParser(
        "python -m tests.programs.verbs", description=__doc__
    )
    parser.add_argument("--acts", type=int, default=10_000, help="in all")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    asked = parser.parse_args()
    # Everything that fails here is logged.
    logging.disable(logging.CRITICAL)
    found: Counter[str] = Counter()
    began = time.monotonic()
    seeds = range(asked.seed, asked.seed + -(-asked.acts // ACTS))
    for seed in track(seeds, "seeds", disable=not sys.stderr.isatty()):
        acts = min(ACTS, asked.acts - (seed - asked.seed) * ACTS)
        with tempfile.TemporaryDirectory(prefix="kvwire-verbs-") as folder:
            try:
                found += run(seed, Path(folder), acts)
            except Exception as exc:  # noqa: BLE001 - what it is is printed
                print(f"seed {seed}, {acts} acts: {type(exc).__name__}: {exc}")
                return 1
    load = ", ".join(f"{one:.0f}" for one in os.getloadavg())
    print(
        f"seeds {seeds[0]} to {seeds[-1]}: {sum(found[verb] for verb in VERBS)} acts, "
        f"each as it was reported; {time.monotonic() - began:.0f} s, load {load}"
    )
    print(", ".join(f"{count} {name}" for name, count in sorted(found.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
