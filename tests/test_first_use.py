"""Threads that meet something's first use together: types, names, modules, engines.

Each program runs in a process of its own, which has used nothing before, and switches
threads every microsecond.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.depth import parameters

# msgspec.convert itself, in place of `converted`, ends this with SIGSEGV in every run.
TYPES = """
import msgspec, sys, threading
from typing import Literal
from kvwire.config import converted

names = [f"a{number}" for number in range(40)]
fields = [(name, Literal[f"{name} is set", "yes"], "yes") for name in names]
kinds = [msgspec.defstruct(f"Kind{number}", fields) for number in range(300)]
barrier = threading.Barrier(8)
found = []

def meet():
    for kind in kinds:
        barrier.wait()
        found.append(converted({"a39": "a39 is set"}, kind).a39)

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=meet) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == ["a39 is set"] * 2400, set(found)
print("done")
"""

# Every thread takes all public names, in an order of its own, then has an engine.
EVERYTHING = """
import logging, random, sys, tempfile, threading
from pathlib import Path

import kvwire

folder = tempfile.mkdtemp()
barrier = threading.Barrier(8)
failures = []
done = []

def use(number):
    names = [*kvwire.__all__]
    random.Random(int(sys.argv[1]) * 8 + number).shuffle(names)
    barrier.wait()
    try:
        for name in names:
            getattr(kvwire, name)
        logging.getLogger("kvwire").warning("thread %d", number)
        options = {"name": f"e{number}", "lanes": 1, "inspect": folder}
        with kvwire.Engine(**options) as engine, kvwire.Engine(lanes=1) as other:
            barrier.wait()
            connection = other.connect(engine.listen("127.0.0.1:0"))
            accepted = engine.run(engine.communicator.accept())

            async def ask():
                await connection.send(1, b"hello")

            async def answer():
                return bytes(await accepted.recv(1))

            other.run(ask())
            assert engine.run(answer()) == b"hello"
            barrier.wait()
            from kvwire.observe.inspect import snapshots

            found, silent = snapshots(sorted(Path(folder).iterdir()))
            assert (len(found), silent) == (8, []), silent
            barrier.wait()
        done.append(number)
    except BaseException as exc:
        failures.append(exc)
        barrier.abort()

logging.basicConfig(level=logging.CRITICAL)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for failure in failures:
    print(f"{type(failure).__name__}: {failure}", file=sys.stderr)
print("done" if len(done) == 8 else "failed")
"""


def said(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return f"{done.stdout}status {done.returncode} {done.stderr}"


def test_a_type_is_built_by_one_thread_while_the_others_wait() -> None:
    assert said(TYPES) == "done\nstatus 0 "


@pytest.mark.parametrize("seed", parameters(range(20), 20))
def test_names_modules_and_engines_are_first_used_by_eight_threads(seed: int) -> None:
    assert said(EVERYTHING, str(seed)) == "done\nstatus 0 "
