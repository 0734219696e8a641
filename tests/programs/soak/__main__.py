"""A soak: KV transfers under connection drops, every byte checked.

    python -m tests.programs.soak --gib 10 [--seed 0] [--fault-s 0.5] [--psk]
        [--transport tcp|local|ucx|nixl]

Two processes move blocks, in both directions of asking, with prefill in one piece and
in chunks, aborts and partial commits, while connections are cut and the processes are
stopped, continued and killed: :mod:`tests.programs.soak.processes`. Each word of the
producer's blocks is of :mod:`kvwire_certify.oracle`, and names its transfer, layer,
position and place; a byte that is misplaced, mixed or stale differs. A block
of the consumer is poisoned when its transfer has drained, and the poison has to be
there still when the block is used again: a late write shows, whenever it comes. A
producer that reports a whole transfer of which its consumer has a part has made a
*false report*.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvwire.limits import GIB
from kvwire.security.keys import write_key_file
from tests.programs.soak.processes import WAYS, ProcessSoak
from tests.programs.soak.stamps import Tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.soak")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB to check")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--fault-s",
        type=float,
        default=0.5,
        help="mean seconds between two; 0: none",
    )
    parser.add_argument(
        "--psk", action="store_true", help="prove a key and seal control frames"
    )
    parser.add_argument("--transport", choices=WAYS, default="tcp")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        psk_file = ""
        if given.psk:
            psk_file = str(Path(folder, "soak.key"))
            write_key_file(Path(psk_file))
        tally = _run(given, psk_file)
    return int(tally.failed)


def _run(given: argparse.Namespace, psk_file: str) -> Tally:
    console = Console()
    soak = ProcessSoak(
        seed=given.seed,
        goal=int(given.gib * GIB),
        fault_s=given.fault_s,
        way=given.transport,
        psk_file=psk_file,
    )
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tally = uvloop.run(soak.run(progress))
    seconds = time.monotonic() - began
    console.print(
        f"{tally.nbytes / GIB:.2f} GiB checked in {seconds:.1f} s, "
        f"{tally.wrong_bytes} wrong bytes, {tally.late_bytes} late bytes, "
        f"{tally.false_reports} false reports"
    )
    for what, count in sorted(tally.counts.items()):
        console.print(f"  {what}: {count}")
    if tally.failed:
        console.print(f"failed; again with --seed {given.seed}")
    return tally


if __name__ == "__main__":
    sys.exit(main())
