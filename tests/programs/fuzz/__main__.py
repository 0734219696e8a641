"""Runs targets under atheris: ``python -m tests.programs.fuzz [TARGET] --seconds 60``.

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

from tests.programs.fuzz.corpus import FOLDER, INPUT_BYTES_MAX, TARGETS
from tests.support.tree import ROOT

BUILD = ROOT / "build" / "fuzz"


def main() -> int:
    """Run each target; return an exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.fuzz")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="add what was found")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.targets or TARGETS:
        found, committed = BUILD / name, FOLDER / name
        found.mkdir(parents=True, exist_ok=True)
        options = (
            f"-max_total_time={arguments.seconds}",
            f"-artifact_prefix={found}/",
            f"-max_len={INPUT_BYTES_MAX}",
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-print_final_stats=1",
        )
        if _libfuzzer(name, *options, found, committed):
            failed.append(name)
        elif arguments.keep:
            _libfuzzer(name, "-merge=1", "-use_counters=0", committed, found)
    print(f"failed: {', '.join(failed)}" if failed else "no target has failed")
    return int(bool(failed))


def _libfuzzer(name: str, *arguments: str | Path) -> int:
    command = [sys.executable, "-m", "tests.programs.fuzz.under_atheris", name]
    return subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
