"""Each module of the core against its own test file, every branch (goal Q4).

Coverage of the whole suite hides which test knows about which code. Here
``kvwire/wire/header.py`` counts only what ``tests/wire/test_header.py`` executes, and
``test_header_*.py`` where one file is too long, in a process of its own. Run it as
``python -m tests.support.module_coverage``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.tree import ROOT

REQUIRED_PERCENT = 100
LAYERS = ("wire", "proto")


def pairs() -> Iterator[tuple[Path, list[Path]]]:
    """Every module of the core, and the only test files that count for it."""
    for layer in LAYERS:
        modules = sorted((ROOT / "kvwire" / layer).glob("[!_]*.py"))
        folder = ROOT / "tests" / layer
        own = {folder / f"test_{module.name}" for module in modules}
        for module in modules:
            more = set(folder.glob(f"test_{module.stem}_*.py")) - own
            yield module, [folder / f"test_{module.name}", *sorted(more)]


def shortfall(module: Path, tests: list[Path]) -> str:
    """What a module lacks, in the words of pytest or coverage; "" if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"--data-file={folder}/coverage"
        include = f"--include={module}"
        ran = _run(
            *("-m", "coverage", "run", "--branch", data, include),
            *("-m", "pytest", "-q", "-m", "", *map(str, tests)),
        )
        if ran.returncode:
            return ran.stdout + ran.stderr
        told = _run(
            *("-m", "coverage", "report", data, include, "--show-missing"),
            f"--fail-under={REQUIRED_PERCENT}",
        )
        return told.stdout + told.stderr if told.returncode else ""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """Check every module, as many at once as there are cores; return an exit status."""
    every = list(pairs())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lacks = list(pool.map(lambda pair: shortfall(*pair), every))
    for (module, _), lack in zip(every, lacks, strict=True):
        print(f"{'FAIL' if lack else 'ok'}  {module.relative_to(ROOT)}")
        if lack:
            print(lack)
    return int(any(lacks) or not every)


if __name__ == "__main__":
    sys.exit(main())
