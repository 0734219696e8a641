"""Every input that was kept, and mutations of it, without a fuzzer: S2, S7, S9."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from tests.programs.fuzz.corpus import (
    INPUT_BYTES_MAX,
    TARGETS,
    inputs,
    mutations,
    target,
)
from tests.programs.fuzz.guard import (
    FORBIDDEN,
    Ran,
    allowed_bytes,
    nothing_runs,
    peak_bytes,
)

MUTATIONS = {"frames": 1000, "handshake": 1000, "connection": 400, "plans": 500}
FILES_MAX = 150

every_target = pytest.mark.parametrize("name", TARGETS)


@every_target
def test_kept_inputs_and_mutations_of_them(name: str) -> None:
    """Nothing but events and documented exceptions, and no code is run.

    The same ones in every run; a failing one is shown in full by pytest.
    """
    run, found = target(name), inputs(name)
    assert 5 <= len(found) <= FILES_MAX
    assert max(map(len, found)) <= INPUT_BYTES_MAX
    for data in (*found, *mutations(found, MUTATIONS.get(name, 1000), seed=name)):
        with nothing_runs():
            assert run(data) >= 0


@every_target
def test_memory_is_bounded_by_what_was_fed(name: str) -> None:
    """Goal S7: at most four bytes for each, and 64 KiB for everything else."""
    run = target(name)
    run(b"")  # what is made once is made now
    every = [*inputs(name), *mutations(inputs(name), 100, seed=f"{name} memory")]
    for data in every:
        peak, fed = peak_bytes(run, data)
        assert peak <= allowed_bytes(data, fed), f"{peak} bytes for {data.hex()}"


def test_running_code_is_noticed() -> None:
    """Each of the events stops a run, and no ``except Exception`` hides it."""
    for event in sorted(FORBIDDEN):
        sys.audit(event)
        with pytest.raises(Ran, match=event), nothing_runs():
            sys.audit(event)
    with (
        pytest.raises(Ran, match="subprocess"),
        nothing_runs(),
        contextlib.suppress(Exception),
    ):
        subprocess.run(["true"], check=False)


def test_too_much_memory_is_noticed() -> None:
    """A target that takes what a number says."""

    def greedy(data: bytes) -> int:
        return len(bytearray(1000 * len(data)))

    data = bytes(1000)
    peak, _ = peak_bytes(greedy, data)
    assert peak > allowed_bytes(data, len(data))
