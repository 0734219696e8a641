"""What overlap found, as a table, a document and a picture."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from kvwire.cli.bench.overlap import Bulk, Control, Overlap
from kvwire.cli.bench.overlap_report import document, draw, render
from tests.cli.bench.settings import MS, setting


@pytest.fixture
def scripted() -> Overlap:
    return Overlap(
        settings=[
            setting(layers=8),
            setting(layers=8, compute_ms=1.0, streamed_ms=15.0),
            setting(layers=80, whole_ms=200.0),
            setting(layers=32, streamed_ms=3.0, whole_ms=2.0, judged=False),
        ],
        bulk=[Bulk(8, 1 << 20, [0.0205], [0.02]), Bulk(80, 1 << 20, [0.3], [0.2])],
        control=Control([1.0 * MS], [1.25 * MS], [9.0 * MS]),
        facts={"transport": "tcp"},
    )


def test_the_table_says_what_was_met(scripted: Overlap) -> None:
    screen = io.StringIO()
    Console(file=screen, width=80).print(render(scripted))
    text = " ".join(screen.getvalue().split())
    assert "8 4.00 2.00 20.00 2.00 1.000 met" in text
    assert "streaming costs 1.00 ms of 2.00 ms, CPU 3.00 beside 2.00 ms." in text
    assert "ratio 1.025, target <= 1.03: met" in text
    assert "ratio 1.500, target <= 1.03: missed" in text
    assert "add 0.25 ms to a transfer of one (1.00 ms), target <= 0.5 ms: met." in text
    assert "by itself they add 8.00 ms." in text


def test_the_document_has_every_sample(scripted: Overlap) -> None:
    found = document(scripted, {"rounds": 1})
    assert json.loads(json.dumps(found))["exposed"] == found["exposed"]
    assert [row["met"] for row in found["exposed"]] == [True, False, True, None]
    assert found["exposed"][0]["streamed_s"] == [2 * MS]
    assert [row["met"] for row in found["bulk"]] == [True, False]
    assert found["control"]["met"]
    assert found["machine"]["cpus"]


def test_the_picture_shows_where_compute_is_longer(scripted: Overlap) -> None:
    # A layer of 8 took long once: that is no reason to leave it out.
    scripted.settings[0].layer_s = [9.0 * MS]
    (figure,) = draw(scripted).values()
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["8 layers", "80 layers"]
    lines = axes.get_lines()
    shown = {
        str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in lines
    }
    assert shown == {
        "sent whole": pytest.approx([20, 200]),
        "streamed": pytest.approx([2, 2]),
        "what no schedule can hide": pytest.approx([9, 2]),
    }
    assert len({line.get_color() for line in lines}) == len(shown)
