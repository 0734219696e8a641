"""The soak: short ones, and what makes it fail."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvwire.limits import MIB
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.backends.kvwire_ucx.support import needs_ucx
from tests.programs.soak.__main__ import main
from tests.programs.soak.processes import ProcessSoak
from tests.programs.soak.stamps import NUM_BLOCKS, SPEC, Tally
from tests.support.caches import POISON, StampedCache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "taken"),
    [
        (["--psk"], "tcp: taken"),
        (["--transport", "tcp"], "tcp: taken"),
        (["--transport", "local"], "local: taken"),
        pytest.param(["--transport", "ucx"], "ucx: taken", marks=needs_ucx),
        pytest.param(["--transport", "nixl"], "nixl: taken", marks=needs_nixl),
    ],
    ids=str,
)
def test_no_byte_is_wrong_while_processes_are_stopped_and_killed(
    options: list[str], taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gib", "0.2", "--fault-s", "0.2", "--seed", "1"]
    assert main([*arguments, *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0 wrong bytes, 0 late bytes, 0 false reports" in said
    for what in ("complete: ", "cut: ", "in several chunks: ", taken):
        assert what in said


def soak() -> ProcessSoak:
    return ProcessSoak(seed=1, goal=MIB, fault_s=0.0, way="tcp")


async def test_a_process_that_ends_by_itself_is_a_failure() -> None:
    command = [sys.executable, "-S", "-c", "print({})"]
    kind = type("Dies", (ProcessSoak,), {"command": lambda *_: command})
    dies = kind(seed=1, goal=MIB, fault_s=0.001, way="tcp")
    with pytest.raises(RuntimeError, match="has ended by itself"):
        await dies.run()


@pytest.mark.parametrize("what", ["wrong", "late", "false"])
def test_what_a_process_has_found_is_a_failure(what: str) -> None:
    running = soak()
    running.heard({"bytes": 100, "complete": 1})
    assert not running.tally.failed
    assert running.tally.nbytes == 100
    running.heard({what: 1})
    assert running.tally.failed


@pytest.mark.parametrize("wrong", [0, 3])
def test_blocks_that_landed_are_compared_with_their_stamps(wrong: int) -> None:
    """And those that did not may hold anything."""
    cache, blocks = StampedCache(SPEC, NUM_BLOCKS), [4, 7, 1]
    for position, block in enumerate(blocks[:2]):
        cache.write(block, 9, position)
    cache.words[2][7][:wrong] += np.uint64(1)

    class Landed:
        def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.array(blocks[:2])

    class Result:
        landed = Landed()

    tally = Tally()
    tally.check(cache, 9, blocks, Result())  # type: ignore[arg-type]
    assert tally.wrong_bytes == 8 * wrong
    assert tally.nbytes == 2 * SPEC.layers * cache.words[0][0].nbytes


def test_stamps_name_every_word_and_poison_is_none() -> None:
    """No two words of any life and position are alike."""
    cache = StampedCache(SPEC, NUM_BLOCKS)
    words = np.concatenate([cache.stamp(*name) for name in ((1,), (2,), (1, 1))])
    assert np.unique(words).size == words.size
    assert POISON not in words
    assert not cache.late(list(range(NUM_BLOCKS)))
    for block in (5, 6):
        cache.write(block, 1, layers=2)
    assert cache.late([5, 6]) == 2 * cache.words[2][5].nbytes
    assert not cache.late([4, 7])
    cache.poison([5, 6])
    assert not cache.late([5, 6])
