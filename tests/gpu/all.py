"""All that needs a GPU, in order: ``python -m tests.gpu.all --minutes 8``.

It runs from a checkout, on a machine with one GPU and no network, and ends in time: a
step that would not fit is not begun, and one that hangs is killed. It writes
``build/gpu.json`` and ``build/gpu.md``, a page with what has passed, failed, and was
not run. With ``--simulated`` each step takes what stands for a GPU without one: the
driver over host memory, the simulated device, or the CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import kvwire
from tests.support.tree import ROOT

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_TAIL: Final = 40


@dataclass(frozen=True, slots=True)
class Step:
    """One program.

    Attributes:
        name: What it shows.
        words: Its command on a GPU, behind ``python -m``.
        simulated: The same without a GPU; empty if it has no such form.
        needs: A module without which it cannot run.
        seconds: How long it takes on one H100 at most, as far as that is known.
    """

    name: str
    words: tuple[str, ...]
    simulated: tuple[str, ...]
    needs: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """How a step ended, and its last lines."""

    name: str
    command: str
    state: str
    seconds: float
    output: str


_PYTEST: Final = ("pytest", "--quiet", "-p", "no:cacheprovider")
STEPS: Final = (
    Step(
        "copies, events, graphs, transfers, stores, processes, failures",
        (*_PYTEST, "tests/gpu", "--ignore", "tests/gpu/test_windows.py"),
        (*_PYTEST, "tests/memory/device/test_cuda_ops.py"),
        "pytest",
        180,
    ),
    Step(
        "messages, puts and gets of tensors",
        ("tests.gpu.messages",),
        ("tests.gpu.messages", "--simulated"),
        "",
        40,
    ),
    Step(
        "windows over IPC",
        ("tests.gpu.windows", "--seconds", "20"),
        ("tests.gpu.windows", "--seconds", "1", "--simulated"),
        "",
        90,
    ),
    Step(
        "a model that prefills in one process and decodes in another",
        ("tests.gpu.model", "--rounds", "7"),
        ("tests.gpu.model", "--rounds", "2", "--simulated"),
        "torch",
        120,
    ),
    Step("rates", ("tests.gpu.rates",), (), "torch", 60),
)


def run_all(*, simulated: bool, minutes: float) -> list[Result]:
    """Run the steps, as far as the time lasts."""
    until = time.monotonic() + 60 * minutes
    results = []
    for step in STEPS:
        result = run_step(step, simulated=simulated, left_s=until - time.monotonic())
        print(f"{result.state}: {step.name}, {result.seconds:.0f} s", flush=True)
        results.append(result)
    return results


def run_step(step: Step, *, simulated: bool, left_s: float) -> Result:
    """Run one step in a process of its own."""
    words = step.simulated if simulated else step.words
    command = " ".join(("python -m", *words))

    def ended(state: str, seconds: float, output: str) -> Result:
        lines = output.strip().splitlines()[-_TAIL:]
        return Result(step.name, command, state, seconds, "\n".join(lines))

    if not words:
        return ended(NOT_RUN, 0.0, "it has no form without a GPU")
    if step.needs and find_spec(step.needs) is None:
        return ended(NOT_RUN, 0.0, f"{step.needs} is not installed")
    if left_s < step.seconds / 2:
        return ended(NOT_RUN, 0.0, f"{left_s:.0f} s were left")
    began = time.monotonic()
    try:
        done = subprocess.run(
            (sys.executable, "-m", *words),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=left_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        # Bytes, whatever was asked for.
        text = bytes(exc.stdout or b"").decode(errors="replace")
        took = time.monotonic() - began
        return ended(FAILED, took, f"{text}\nkilled: its time was over")
    state = FAILED if done.returncode else PASSED
    return ended(state, time.monotonic() - began, done.stdout)


def facts() -> dict[str, str]:
    """Return what the results depend on."""
    found = {
        "kvwire": kvwire.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        found["gpu"] = "none"
    else:
        found["gpu"] = "; ".join(done.stdout.strip().splitlines())
    return found


def page(results: list[Result], found: dict[str, str]) -> str:
    """Return the results as Markdown."""
    lines = ["# On this GPU", ""]
    lines += [f"* {name}: {value}" for name, value in found.items()]
    lines += ["", "| step | | seconds |", "|---|---|---|"]
    lines += [f"| {one.name} | {one.state} | {one.seconds:.0f} |" for one in results]
    for one in results:
        lines += ["", f"## {one.name}", "", f"`{one.command}`: {one.state}", ""]
        lines += ["```", one.output, "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run, and write the two files; 1 if a step has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--simulated", action="store_true", help="without a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "build")
    options = parser.parse_args()
    found = facts()
    results = run_all(simulated=options.simulated, minutes=options.minutes)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"facts": found, "steps": [asdict(one) for one in results]}
    (options.out / "gpu.json").write_text(json.dumps(document, indent=1))
    (options.out / "gpu.md").write_text(page(results, found))
    print(f"written: {options.out / 'gpu.json'} and gpu.md")
    return int(any(one.state == FAILED for one in results))


if __name__ == "__main__":
    sys.exit(main())
