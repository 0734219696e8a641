"""The soak: short ones of each way, and what makes it fail."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kvwire.limits import MIB
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.backends.kvwire_ucx.support import needs_reading, needs_ucx
from tests.programs.soak.__main__ import main
from tests.programs.soak.processes import Soak
from tests.programs.soak.transfers import NUM_BLOCKS, SPEC, compared
from tests.programs.soak.windows import WAYS
from tests.support.caches import POISON, StampedCache

FOUND = "0 wrong bytes, 0 late bytes, 0 false reports"
# A million blocks in all; each way's share takes about as long.
SHARES = {
    "mapped": 400_000,
    "process_vm_readv": 350_000,
    "tcp": 100_000,
    "inproc": 50_000,
    "ucx": 100_000,
}
every_window = pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=needs_reading if way == "ucx" else ()) for way in WAYS],
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "taken"),
    [
        (["--psk"], "tcp: taken"),
        (["--way", "tcp"], "tcp: taken"),
        (["--way", "local"], "local: taken"),
        pytest.param(["--way", "ucx"], "ucx: taken", marks=needs_ucx),
        pytest.param(["--way", "nixl"], "nixl: taken", marks=needs_nixl),
    ],
    ids=str,
)
def test_no_byte_is_wrong_while_processes_are_stopped_and_killed(
    options: list[str], taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["transfers", "--gib", "0.2", "--fault-s", "0.2", "--seed", "1"]
    assert main([*arguments, *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for what in (FOUND, "complete: ", "cut: ", "in several chunks: ", taken):
        assert what in said


@pytest.mark.slow
@every_window
def test_nothing_torn_or_stale_lands(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside an owner that changes its blocks; and nothing comes late."""
    options = ["--way", way, "--blocks", str(SHARES[way]), "--fault-s", "0"]
    assert main(["windows", "--seed", "1", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for what in (FOUND, f"gets, {WAYS[way].taken}: ", "missing: ", "windows: "):
        assert what in said


@every_window
def test_nor_while_owners_and_readers_are_stopped_and_killed(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--way", way, "--blocks", "20000", "--fault-s", "0.2"]
    assert main(["windows", "--seed", "1", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for what in (FOUND, f"gets, {WAYS[way].taken}: ", "missing: ", "cut: "):
        assert what in said


@every_window
def test_without_the_look_after_the_bytes_torn_blocks_are_found(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--way", way, "--blocks", "1000000", "--fault-s", "0", "--plant"]
    assert main(["windows", "--seed", "1", *options]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert " 0 wrong bytes" not in said
    assert "0 late bytes" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("windows --way local", "one of mapped, process_vm_readv, tcp, inproc, ucx"),
        ("transfers --way mapped", "one of tcp, local, ucx, nixl"),
        ("transfers --plant", "--plant is for windows alone"),
    ],
)
def test_what_a_soak_has_not_is_refused_before_a_process_starts(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*given.split(), "--gib", "0.001", "--blocks", "1"])
    assert said in capsys.readouterr().err


def soak(folder: Path, kind: type[Soak] = Soak) -> Soak:
    return kind("transfers", seed=1, goal=MIB, fault_s=0.001, way="tcp", folder=folder)


async def test_a_process_that_ends_by_itself_is_a_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "print({})"]
    kind = type("Dies", (Soak,), {"command": lambda *_: command})
    with pytest.raises(RuntimeError, match="has ended by itself"):
        await soak(tmp_path, kind).run()


@pytest.mark.parametrize("what", ["wrong", "late", "false"])
def test_what_a_process_has_found_is_a_failure(what: str, tmp_path: Path) -> None:
    running = soak(tmp_path)
    running.heard({"bytes": 100, "complete": 1})
    assert not running.failed
    assert running.reached == 100
    running.heard({what: 1})
    assert running.failed


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

    nbytes = 2 * SPEC.layers * cache.words[0][0].nbytes
    found = compared(cache, 9, blocks, Result())  # type: ignore[arg-type]
    assert found == (nbytes, 8 * wrong)


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
