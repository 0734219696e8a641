"""Runs targets under atheris: ``python -m tests.fuzz [TARGET ...] --seconds 60``.

Each target runs in a process of its own, since libFuzzer ends the process. It starts
from the committed corpus; new inputs go to ``build/fuzz/TARGET``, as does one that
shows a bug. ``--keep`` adds to the corpus the few new ones that reach code which the
committed ones do not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.fuzz.corpus import (
    FOLDER,
    INPUT_BYTES_MAX,
    TARGETS,
    inputs,
    keep,
    smallest,
    target,
)
from tests.support.tree import ROOT

BUILD = ROOT / "build" / "fuzz"


def main() -> int:
    """Run each target; return an exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="add what was found")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.targets or TARGETS:
        found = BUILD / name
        found.mkdir(parents=True, exist_ok=True)
        if _fuzz(name, found, arguments.seconds):
            failed.append(name)
        elif arguments.keep:
            _keep(name, found)
    print(f"failed: {', '.join(failed)}" if failed else "no target has failed")
    return int(bool(failed))


def _fuzz(name: str, found: Path, seconds: int) -> int:
    arguments = (
        str(found),
        str(FOLDER / name),
        f"-max_total_time={seconds}",
        f"-artifact_prefix={found}/",
        f"-max_len={INPUT_BYTES_MAX}",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    )
    command = [sys.executable, "-m", "tests.fuzz.under_atheris", name, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def _keep(name: str, found: Path) -> None:
    candidates = (path.read_bytes() for path in found.iterdir())
    for data in smallest(target(name), inputs(name), candidates):
        keep(name, data)


if __name__ == "__main__":
    sys.exit(main())
