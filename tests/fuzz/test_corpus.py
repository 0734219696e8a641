"""Every input that was kept, and mutations of it, without a fuzzer: S2, S7, S9."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz.corpus import TARGETS, inputs, seeds, target
from tests.fuzz.guard import (
    FORBIDDEN,
    Ran,
    allowed_bytes,
    nothing_runs,
    peak_bytes,
)
from tests.fuzz.mutate import INPUT_BYTES_MAX, mutations

MUTATIONS = {
    "header": 4000,
    "frames": 1000,
    "handshake": 1000,
    "connection": 400,
    "plans": 500,
}
FILES_MAX = 150

every_target = pytest.mark.parametrize("name", TARGETS)


@every_target
def test_kept_inputs(name: str) -> None:
    """Nothing but events and documented exceptions, and no code is run."""
    run = target(name)
    for data in inputs(name):
        with nothing_runs():
            assert run(data) >= 0


@every_target
def test_seeds_from_golden_transcripts(name: str) -> None:
    """Also those that a later transcript adds."""
    run = target(name)
    for data in seeds(name):
        with nothing_runs():
            assert run(data) >= 0


@every_target
def test_mutations_of_them(name: str) -> None:
    """The same ones in every run; a failing one is shown in full by pytest."""
    run = target(name)
    for data in mutations(inputs(name), MUTATIONS.get(name, 1000), seed=name):
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


@every_target
def test_the_corpus_is_small(name: str) -> None:
    """It is for finding what was found, and runs in seconds."""
    found = inputs(name)
    assert 5 <= len(found) <= FILES_MAX
    assert max(map(len, found)) <= INPUT_BYTES_MAX


@pytest.mark.parametrize("event", sorted(FORBIDDEN))
def test_running_code_is_noticed(event: str) -> None:
    """Each of the events stops a run; outside the block they are allowed."""
    sys.audit(event)
    with pytest.raises(Ran, match=event), nothing_runs():
        sys.audit(event)
    sys.audit(event)


def test_a_real_one_is_noticed() -> None:
    """And no ``except Exception`` on the way hides it."""
    with pytest.raises(Ran, match="subprocess"), nothing_runs():
        _swallow_errors()


def _swallow_errors() -> None:
    try:
        subprocess.run(["true"], check=False)
    except Exception:  # noqa: BLE001 - what a careless callback would do
        return


def test_too_much_memory_is_noticed() -> None:
    """A target that takes what a number says."""

    def greedy(data: bytes) -> int:
        return len(bytearray(1000 * len(data)))

    data = bytes(1000)
    peak, _ = peak_bytes(greedy, data)
    assert peak > allowed_bytes(data, len(data))
