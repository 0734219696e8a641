"""Which CPUs vLLM leaves to the connector."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Final

import pytest

from kvwire.config import Config
from kvwire.integrations.vllm import cpus
from kvwire.integrations.vllm.cpus import reserved_cpus

ALL: Final = set(range(8))
# A worker whose thread is bound to all CPUs of the test but the first, as vLLM binds
# the threads that compute.
_WORKER: Final = """
import os, threading
from kvwire.integrations.vllm.cpus import own_reserved_cpus

every = os.sched_getaffinity(0)
print(*own_reserved_cpus())
bound, over = threading.Event(), threading.Event()

def compute():
    os.sched_setaffinity(0, every - {min(every)})
    bound.set()
    over.wait()

thread = threading.Thread(target=compute)
thread.start()
bound.wait()
print(*own_reserved_cpus())
over.set()
thread.join()
"""


@pytest.mark.parametrize(
    ("own", "device", "found"),
    [((), "cpu", (3,)), ((5,), "cpu", (5,)), ((), "cuda", ())],
)
def test_a_choice_and_a_gpu_change_nothing(
    own: tuple[int, ...],
    device: str,
    found: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpus, "own_reserved_cpus", lambda: (3,))
    vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    assert cpus.beside_compute(Config(io_cpus=own), vllm_config).io_cpus == found


@pytest.mark.parametrize(
    ("threads", "left"),
    [
        # The thread that computes and its helpers; others may run anywhere.
        ([{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}, ALL], (6, 7)),
        # One core a thread, and another rank beside it.
        ([{0}, {1}, {4}, {5}], (2, 3, 6, 7)),
        # Nothing is bound, or nothing is left.
        ([ALL, ALL], ()),
        ([{0, 1, 2, 3}, {4, 5, 6, 7}], ()),
        ([], ()),
    ],
)
def test_the_cpus_that_are_left(threads: list[set[int]], left: tuple[int, ...]) -> None:
    assert reserved_cpus(ALL, threads) == left


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2,
    reason="only Linux binds threads, and it takes two CPUs",
)
def test_a_worker_sees_what_its_threads_are_bound_to() -> None:
    said = subprocess.run(
        [sys.executable, "-c", _WORKER], capture_output=True, text=True, check=True
    )
    before, after = said.stdout.splitlines()
    assert before == ""
    assert after == str(min(os.sched_getaffinity(0)))
