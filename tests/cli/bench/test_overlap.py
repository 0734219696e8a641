"""``kvwire bench overlap``: the arithmetic of overlap, and a small real run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvwire.cli.bench import overlap
from kvwire.cli.bench.overlap import (
    BLOCK_BYTES,
    EXPOSED,
    ONE_LAYER,
    STREAMED,
    WHOLE,
    OverlapSide,
    OverlapWork,
    efficiency,
)
from kvwire.cli.bench.side import JoinedSide
from tests.cli.bench.conftest import Bench
from tests.cli.bench.contenders import Scripted, case, measured

# Starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(180)

MS = 1e-3


@pytest.mark.parametrize(
    ("compute_ms", "streamed_ms", "whole_ms", "ideal_ms", "expected", "met"),
    [
        (4.0, 2.0, 20.0, 2.0, 1.0, True),
        (4.0, 20.0, 20.0, 2.0, 0.0, False),
        (4.0, 11.0, 20.0, 2.0, 0.5, False),
        # Little more than one layer, of much that could be hidden: still too late.
        (100.0, 3.5, 200.0, 2.0, 196.5 / 198, False),
        # The compute of the other nine layers hides 9 ms and no more.
        (1.0, 11.0, 20.0, 11.0, 1.0, True),
        # Nothing can be hidden of a transfer that takes as long as one layer.
        (4.0, 2.0, 2.0, 2.0, 0.0, False),
    ],
)
def test_the_efficiency(
    compute_ms: float,
    streamed_ms: float,
    whole_ms: float,
    ideal_ms: float,
    expected: float,
    met: bool,
) -> None:
    """What was hidden of what could be, and whether that is enough."""
    work = OverlapWork(
        verb=EXPOSED, nbytes=BLOCK_BYTES, count=10, compute_s=compute_ms * MS
    )
    times_ms = {STREAMED: streamed_ms, WHOLE: whole_ms, ONE_LAYER: 2.0}
    ways = [Scripted(way, [[ms * MS]]) for way, ms in times_ms.items()]
    (finding,) = measured(case(*ways, work=work))
    found = efficiency(finding)
    assert found.ideal_s == pytest.approx(ideal_ms * MS)
    assert found.efficiency == pytest.approx(expected)
    assert found.met == met


def test_a_small_real_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it once; the figures of a busy machine are not looked at."""
    monkeypatch.setattr(overlap, "CONTROL_REPEAT", 2)
    plot = tmp_path / "found.svg"
    options = ["--layers", "2", "4", "--layer-kib", "128", "--rounds", "1"]
    found, printed = bench("overlap", *options, "--plot", str(plot))
    assert "exposed after the last mark" in printed
    assert "more tiny layers add" in printed
    assert [row["work"]["count"] for row in found["cases"]] == [
        *(2, 2, 4, 4, 32),
        *(2, 4),
        *(1, 32, 32),
    ]
    for row in found["cases"]:
        for way in row["contenders"].values():
            assert 0 < way["median"] < 10
    assert len(found["efficiencies"]) == 5
    assert "tcp: taken" in found["contenders"][STREAMED]["transport"]
    assert ET.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.parametrize("way", [STREAMED, WHOLE, ONE_LAYER])
@pytest.mark.parametrize(("layers", "nbytes"), [(2, 4), (3, 3 * BLOCK_BYTES)])
async def test_every_way_moves_its_bytes(way: str, layers: int, nbytes: int) -> None:
    """Real blocks, and those of a toy model of which the payload is next to nothing."""
    options = {"transport": "tcp", "way": way}
    both = JoinedSide(OverlapSide(options), OverlapSide(options))
    work = OverlapWork(verb=EXPOSED, nbytes=nbytes, count=layers, repeat=2)
    try:
        await both.connect(None)
        await both.fill(work)
        assert len((await both.drive(work))["values"]) == 2
        assert await both.digest(work)
    finally:
        await both.close()
