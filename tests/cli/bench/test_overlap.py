"""``kvwire bench overlap``: the arithmetic of overlap, and a small real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kvwire.cli.bench import overlap, overlap_pair
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.errors import BenchError
from kvwire.cli.bench.overlap import Setting
from kvwire.cli.bench.overlap_pair import Pair, started
from kvwire.cli.bench.sides.overlap_half import BLOCK_BYTES, Cache, OverlapHalf
from kvwire.cli.main import main
from tests.cli.bench.settings import MS, setting


@pytest.mark.parametrize(
    ("found", "ideal_ms", "efficiency", "met"),
    [
        (setting(), 2.0, 1.0, True),
        (setting(streamed_ms=20.0), 2.0, 0.0, False),
        (setting(streamed_ms=11.0), 2.0, 0.5, False),
        # Little more than one layer, of much that could be hidden: still too late.
        (
            setting(compute_ms=100.0, whole_ms=200.0, streamed_ms=3.5),
            2.0,
            196.5 / 198,
            False,
        ),
        # The compute of the other nine layers hides 9 ms and no more.
        (setting(compute_ms=1.0, streamed_ms=11.0), 11.0, 1.0, True),
        # Nothing can be hidden of a transfer that takes as long as one layer.
        (setting(whole_ms=2.0), 2.0, 0.0, False),
    ],
)
def test_the_efficiency(
    found: Setting, ideal_ms: float, efficiency: float, met: bool
) -> None:
    """What was hidden of what could be, and whether that is enough."""
    assert found.ideal_s == pytest.approx(ideal_ms * MS)
    assert found.efficiency == pytest.approx(efficiency)
    assert found.met == met


class Scripted:
    """Answers what a perfect schedule would take; notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, float, int | None]] = []
        self.facts: dict[str, Any] = {}

    def check(self, layers: int, layer_bytes: int) -> None:
        self.asked.append(("check", layers, layer_bytes, 0.0, None))

    def move(
        self,
        way: str,
        layers: int,
        layer_bytes: int,
        *,
        compute_s: float = 0.0,
        repeat: int = 1,
        group_bytes: int | None = None,
    ) -> overlap_pair.Span:
        assert repeat >= 1
        self.asked.append((way, layers, layer_bytes, compute_s, group_bytes))
        left_s = {"whole": layers * MS, "last": MS, "streamed": MS}[way]
        return overlap_pair.Span(layers * MS, left_s, layers * 1e-6)


def test_everything_is_measured_in_turns() -> None:
    pair = Scripted()
    steps: list[str] = []
    found = overlap.overlap(pair, (8, 32), 1 << 20, 3, steps.append)  # type: ignore[arg-type]
    assert len(steps) == overlap.steps((8, 32), 3)
    assert [s.layers for s in found.settings] == [8, 8, 32, 32, 32]
    assert [s.compute_s / MS for s in found.settings[:2]] == [2.0, 0.5]
    perfect = [s for s in found.settings if s.compute_s > MS]
    assert [s.efficiency for s in perfect] == [pytest.approx(1.0)] * 2
    assert [bulk.ratio for bulk in found.bulk] == [1.0, 1.0]
    assert found.control.added_s == pytest.approx(31e-6)
    for samples in (found.control.apart_s, found.settings[0].layer_s):
        assert len(samples) == 3
    ways = [way for way, *_ in pair.asked if way != "check"]
    assert ways[4:13] == [
        *("streamed", "whole", "last"),
        *("whole", "last", "streamed"),
        *("last", "streamed", "whole"),
    ]
    checked = {(n, size) for way, n, size, *_ in pair.asked if way == "check"}
    assert checked == {(8, 1 << 20), (32, 1 << 20), (32, overlap.SHORT_LAYER_BYTES)}


# --- real transfers -------------------------------------------------------------------


@pytest.mark.usefixtures("sides")
def test_a_small_real_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it once; the figures of a busy machine are not looked at."""
    monkeypatch.setattr(overlap, "CONTROL_REPEAT", 2)
    out, plot = tmp_path / "found.json", tmp_path / "found.svg"
    options = ["--layers", "2", "4", "--layer-kib", "128", "--rounds", "1"]
    files = ["--json", str(out), "--plot", str(plot)]
    assert main(["bench", "overlap", *options, *files]) == 0
    assert "exposed after the last mark" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [row["layers"] for row in found["exposed"]] == [2, 2, 4, 4, 32]
    for row in found["exposed"]:
        for name in ("streamed_s", "whole_s", "layer_s"):
            assert 0 < row[name][0] < 10
    assert "tcp: taken" in found["facts"]["transport"]
    assert ET.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.usefixtures("threads")
def test_damaged_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with started("tcp", "asyncio") as pair:
        pair.check(2, BLOCK_BYTES)
        answer = pair._prefill.answer
        monkeypatch.setattr(
            pair._prefill, "answer", lambda: {**answer(), "digest": "another"}
        )
        with pytest.raises(BenchError, match="is not what was sent"):
            pair.check(2, BLOCK_BYTES)


def test_a_pair_that_cannot_start_leaves_no_process() -> None:
    with pytest.raises(BenchError, match="carrier"):
        Pair("carrier", "asyncio")


def test_caches_of_any_size_move_all_their_bytes() -> None:
    """Real blocks, and those of a toy model of which the payload is next to nothing."""
    for layers, layer_bytes, blocks in ((2, 4, 1), (3, 3 * BLOCK_BYTES, 3)):
        cache = Cache(layers, layer_bytes)
        assert cache.memory.nbytes == layers * layer_bytes
        assert len(cache.blocks) == blocks
        assert cache.cache.groups["kv"].spec.layers == layers
        assert np.shares_memory(cache.memory, cache.memory.view(np.float16))


def test_only_the_last_cache_is_kept() -> None:
    half = OverlapHalf("tcp")
    first = Work(verb="streamed", nbytes=4, count=2)
    kept = half._cache(first)
    assert half._cache(first) is kept
    half._cache(Work(verb="streamed", nbytes=4, count=3))
    assert half._cache(first) is not kept
