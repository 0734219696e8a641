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
from dataclasses import dataclass
from pathlib import Path

from tests.support.tree import ROOT

REQUIRED_PERCENT = 100
LAYERS = ("wire", "proto")


@dataclass(frozen=True, slots=True)
class Pair:
    """A module and the only test files that count for it."""

    module: Path
    tests: tuple[Path, ...]


def pairs(root: Path) -> Iterator[Pair]:
    """Every module of the core; ``__init__`` files hold nothing but a docstring."""
    for layer in LAYERS:
        modules = sorted((root / "kvwire" / layer).glob("*.py"))
        folder = root / "tests" / layer
        own = {folder / f"test_{module.name}" for module in modules}
        for module in modules:
            if module.name != "__init__.py":
                more = set(folder.glob(f"test_{module.stem}_*.py")) - own
                yield Pair(module, (folder / f"test_{module.name}", *sorted(more)))


def shortfall(pair: Pair, root: Path) -> str:
    """What the pair lacks, in the words of pytest or coverage; "" if nothing."""
    if not pair.tests[0].is_file():
        return f"{pair.tests[0].relative_to(root)} does not exist"
    with tempfile.TemporaryDirectory() as folder:
        data = f"--data-file={folder}/coverage"
        include = f"--include={pair.module}"
        ran = _run(
            root,
            *("-m", "coverage", "run", "--branch", data, include),
            *("-m", "pytest", "-q", "-m", "", *map(str, pair.tests)),
        )
        if ran.returncode:
            return ran.stdout + ran.stderr
        told = _run(
            root,
            *("-m", "coverage", "report", data, include, "--show-missing"),
            f"--fail-under={REQUIRED_PERCENT}",
        )
        return told.stdout + told.stderr if told.returncode else ""


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def main(root: Path = ROOT) -> int:
    """Check every pair, as many at once as there are cores; return an exit status."""
    every = list(pairs(root))
    if not every:
        print(f"no module of {LAYERS} in {root / 'kvwire'}")
        return 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lacks = list(pool.map(lambda pair: shortfall(pair, root), every))
    for pair, lack in zip(every, lacks, strict=True):
        print(f"{'FAIL' if lack else 'ok'}  {pair.module.relative_to(root)}")
        if lack:
            print(lack)
    return int(any(lacks))


if __name__ == "__main__":
    sys.exit(main())
