"""Kills engines and servers of a store, and says how many promises were kept.

python -m tests.programs.torture --kills 200 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.programs.torture.world import torture


def main() -> int:
    """Kill as often as the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.torture")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--directory", default=None, help="where tiers are made")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvwire-", dir=asked.directory) as base:
        said = asyncio.run(torture(asked.seed, Path(base), asked.kills))
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
