"""The soak: a short one, and that it finds what it is there to find."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop

from kvwire.limits import GIB
from tests.soak import stamps
from tests.soak.__main__ import main
from tests.soak.one_process import Soak
from tests.soak.stamps import POISON, SPEC, StampedCache

SHORT_GIB = 0.25


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--psk"]], ids=["loopback", "psk"])
def test_no_byte_is_wrong_while_connections_are_cut(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gib", str(SHORT_GIB), "--drop-s", "0.03", "--seed", "1"]
    assert main([*arguments, *options]) == 0
    said = capsys.readouterr().out
    assert "0 wrong bytes, 0 late bytes, 0 false reports" in " ".join(said.split())
    for what in ("complete: ", "connections cut: ", "in several chunks: "):
        assert what in said


def _run(gib: float = SHORT_GIB / 8) -> stamps.Tally:
    return uvloop.run(Soak(seed=0, goal_bytes=int(gib * GIB), drop_s=0).run())


def test_without_cuts_whole_transfers_are_the_rule() -> None:
    tally = _run()
    assert not tally.failed
    assert tally.nbytes >= SHORT_GIB / 8 * GIB
    assert tally.counts["complete"] > tally.counts["partial"]
    assert not tally.counts["connections cut"]


# --- what it finds --------------------------------------------------------------------


def test_a_stale_byte_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line keeps what it held before; the command says how to repeat that."""
    write = StampedCache.write

    def stale(
        self: StampedCache,
        transfer: int,
        layer: int,
        blocks: list[int],
        generation: int,
        positions: range,
    ) -> None:
        line = self.words[layer][blocks[positions[0]]][:8]
        before = line.copy()
        write(self, transfer, layer, blocks, generation, positions)
        if layer == 3:
            line[:] = before

    monkeypatch.setattr(StampedCache, "write", stale)
    assert main(["--gib", "0.01", "--drop-s", "0", "--seed", "7"]) == 1
    assert "again with --seed 7" in capsys.readouterr().out


def test_a_late_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes to a block after its transfer has drained."""
    poison = StampedCache.poison

    def late(self: StampedCache, blocks: list[int]) -> None:
        poison(self, blocks)
        self.words[0][blocks[0]][0] = 0

    monkeypatch.setattr(StampedCache, "poison", late)
    tally = _run(1.0)
    assert tally.late_bytes
    assert not tally.wrong_bytes
    assert tally.failed


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("claims", [True, False])
def test_a_false_report_is_found(whole: bool, claims: bool) -> None:
    """The producer says that all has landed, and the consumer lacks some of it."""
    landed = SimpleNamespace(ids=lambda: np.empty(0, np.int64))
    outcome: Any = SimpleNamespace(complete=whole, landed=landed)
    claimed: Any = SimpleNamespace(complete=claims)
    soaked = Soak(seed=0, goal_bytes=1, drop_s=0)
    soaked._check(1, [0, 1], outcome, claimed)
    assert soaked.tally.false_reports == (claims and not whole)
    assert soaked.tally.failed == (claims and not whole)


def test_stamps_name_every_line() -> None:
    """No two lines of any transfer, layer, position and generation are alike."""
    cache = StampedCache()
    names = [(1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)]
    lines = np.concatenate([np.unique(cache.stamp(*name)) for name in names])
    assert np.unique(lines).size == lines.size
    assert lines.size == len(names) * cache.words[0].shape[1] * 8 // stamps.LINE_BYTES
    assert POISON not in lines


def test_poison_is_counted_in_bytes() -> None:
    cache = StampedCache()
    assert not cache.poisoned(list(range(stamps.NUM_BLOCKS)))
    cache.write(1, 2, [5, 6], 0, range(2))
    assert cache.poisoned([5, 6]) == 2 * cache.words[2][5].nbytes
    assert not cache.poisoned([4, 7])
    cache.poison([5, 6])
    assert not cache.poisoned([5, 6])


def test_chunks_cover_a_list_in_order() -> None:
    soaked = Soak(seed=3, goal_bytes=1, drop_s=0)
    for count in (1, 2, 3, stamps.BLOCKS_EACH_MAX):
        for _ in range(50):
            chunks = soaked._chunks(count)
            assert 1 <= len(chunks) <= stamps.CHUNKS_MAX
            assert [n for chunk in chunks for n in chunk] == list(range(count))
    assert SPEC.layers > 1
