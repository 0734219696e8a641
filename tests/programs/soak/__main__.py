"""A soak: real processes that are cut, stopped and killed, every byte checked.

    python -m tests.programs.soak transfers --gib 10 [--way tcp|local|ucx|nixl] [--psk]
    python -m tests.programs.soak windows --blocks 1000000
        [--way mapped|process_vm_readv|tcp|inproc|ucx] [--plant]

See :mod:`tests.programs.soak.transfers` and :mod:`tests.programs.soak.windows`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from kvwire.limits import GIB
from kvwire.security.keys import write_key_file
from tests.programs.soak.processes import KEY, Soak, named


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    ways = list(named(given.what).WAYS)
    if (given.way or ways[0]) not in ways:
        parser.error(f"--way of {given.what} is one of {', '.join(ways)}")
    if given.plant and given.what != "windows":
        parser.error("--plant is for windows alone")
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.psk:
            write_key_file(folder / KEY)
        goal = int(given.gib * GIB) if given.what == "transfers" else given.blocks
        soak = Soak(
            given.what,
            seed=given.seed,
            goal=goal,
            fault_s=given.fault_s,
            way=given.way or ways[0],
            folder=folder,
            plant=given.plant,
        )
        uvloop.run(soak.run())
    counts = soak.counts
    print(
        f"{counts['bytes'] / GIB:.2f} GiB checked in {time.monotonic() - began:.1f} s, "
        f"{counts['wrong']} wrong bytes, {counts['late']} late bytes, "
        f"{counts['false']} false reports"
    )
    for what, count in sorted(counts.items()):
        print(f"  {what}: {count}")
    return int(soak.failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.soak")
    parser.add_argument("what", choices=["transfers", "windows"])
    parser.add_argument("--way", help="what carries the data")
    parser.add_argument("--gib", type=float, default=1.0, help="of transfers to check")
    parser.add_argument("--blocks", type=int, default=100_000, help="of windows to get")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--fault-s", type=float, default=0.5, help="mean seconds between two; 0: none"
    )
    parser.add_argument(
        "--psk", action="store_true", help="prove a key and seal control frames"
    )
    parser.add_argument(
        "--plant", action="store_true", help="leave out the look after the bytes"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
