"""The protocol core under simulated faults (goals R3, R4, R5, R11, Q7)."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.programs.sim.faults import AMBUSHES
from tests.programs.sim.plan import FAULTS, make_plan
from tests.programs.sim.run import Result, command, described, run_plan, run_seed
from tests.support.depth import parameters
from tests.support.runs import ran

# 2,000 schedules in parts, so that one that fails leaves the others to run.
_PARTS = 10
_SEEDS_A_PART = 200
_PINNED = Path(__file__).with_name("seeds.txt")
_REPEATED = 40


def expect_pass(result: Result) -> None:
    """The seed did not fail; if it did, the message says how to repeat it."""
    text = f"{described(result)}\nrepeat it: {command(result.plan.seed)}"
    assert result.error is None, text


@pytest.mark.parametrize("part", parameters(range(_PARTS), every=_PARTS))
def test_schedules(part: int) -> None:
    """Exactly one completion, no early reuse, no wrong byte, nothing left open."""
    for seed in range(part * _SEEDS_A_PART, (part + 1) * _SEEDS_A_PART):
        expect_pass(run_seed(seed))


@pytest.mark.parametrize("line", _PINNED.read_text().splitlines())
def test_seeds_that_failed_once(line: str) -> None:
    if line.startswith("#"):
        assert len(line) <= 88
        return
    seed, found = line.split(maxsplit=1)
    assert len(found.split()) >= 3, "say what the seed found"
    expect_pass(run_seed(int(seed)))


@cache
def counted() -> Counter[tuple[object, ...]]:
    """How often each thing was done, and with what, in some hundred schedules."""
    said: Counter[tuple[object, ...]] = Counter()
    for seed in range(600):
        for _, _, what, *details in run_seed(seed).trace:
            said[what, *details[:1]] += 1
            said[(what,)] += 1
    return said


@pytest.mark.slow
def test_the_schedules_reach_what_they_are_for() -> None:
    """Every verb succeeds and fails, every fault strikes, every ambush springs."""
    said = counted()
    kinds = ("send", "recv", "put", "get", "incoming transfer", "outgoing transfer")
    windows = ("opening of a window", "get from a window")
    for kind in (*kinds, *windows):
        assert said[kind, "NoneType"] > 100, f"{kind} rarely succeeds"
        for error in ("RequestCancelled", "DeadlineExceeded", "ConnectionLost"):
            assert said[kind, error], f"no {kind} ends with {error}"
    for kind in ("put", "get", "opening of a window"):
        assert said[kind, "AccessDenied"]
    for kind in ("put", "get", "get from a window"):
        assert said[kind, "StaleRegion"]
    for fault in FAULTS:
        assert said[(fault.value,)], f"no {fault.value}"
    for ambush in AMBUSHES:
        assert said["ambushed", ambush], f"no ambush by {ambush}"
    for event in ("payload flipped", "body flipped", "header flipped", "forges"):
        assert said[(event,)], f"no {event}"
    # Lanes come up, carry, break before, within and after a payload, or never come;
    # and where they break again and again, others come up beyond so many at once.
    for event in ("up", "payload", "it broke", "the other half is gone", "declined"):
        assert said["lane", event] > 50, f"{event}: {said['lane', event]}"
    assert said["lane", "payload missed"] > 10
    assert said["lane", "payload lost"] > 50
    assert said["lane", "its path is lost"] > 50
    assert said["lane", "payload of a later lane"] > 10
    assert said["lane", "the other process is gone"]
    assert said["lane", "the connection is over"]


_OF_WINDOWS = {
    ("blocks", "landed"): 100,
    ("blocks", "landed together"): 100,
    ("blocks", "all stale"): 20,
    ("blocks", "some stale"): 20,
    ("blocks", "damaged"): 1,
    ("blocks", "damaged together"): 1,
    ("window", "withheld"): 20,
    ("window", "withheld together"): 20,
    ("window", "withdrawn in the middle"): 20,
    ("get from a window", "PeerError"): 20,
    ("renews",): 100,
    ("closes window",): 100,
    ("reads no more",): 50,
}


@pytest.mark.slow
def test_the_schedules_reach_what_windows_are_for() -> None:
    """Blocks land and do not, either way, of windows that either side closes."""
    said = counted()
    for event, least in _OF_WINDOWS.items():
        assert said[event] >= least, f"{event}: {said[event]}"


def test_a_plan_always_gives_the_same_schedule() -> None:
    plan = make_plan(7)
    assert plan == make_plan(7)
    assert run_plan(plan).digest == run_plan(plan).digest
    assert run_plan(plan).digest != run_seed(8).digest


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_schedules_do_not_depend_on_hashes(hash_seed: str) -> None:
    """Goal Q7: what a process prints of its schedules is what this one gets."""
    assert traced(sys.executable, hash_seed) == traced(sys.executable, "2")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_schedules_do_not_depend_on_the_version_of_python(version: str) -> None:
    """Goal Q7, for each other interpreter that has the dependencies."""
    if version == "{}.{}".format(*sys.version_info):
        assert traced(sys.executable, "3") == traced(sys.executable, "4")
        return
    python = shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"there is no python{version} here")
    found = ran(python, "-c", "import msgspec, numpy, rich, uvloop, xxhash")
    if found.returncode:
        pytest.skip(f"python{version} has not all dependencies of kvwire")
    assert traced(python, "0") == traced(sys.executable, "0")


def traced(python: str, hash_seed: str) -> str:
    """The digest that another process prints of its schedules."""
    arguments = ["--seeds", str(_REPEATED), "--start", "5000"]
    done = ran(
        python,
        "-m",
        "tests.programs.sim",
        *arguments,
        check=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    (digest,) = re.findall(r"trace ([0-9a-f]{16})", done.stdout)
    return str(digest)
