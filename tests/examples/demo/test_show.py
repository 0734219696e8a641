"""What the demo makes of a run: figures and picture, from a run made up here."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from demo.lines import Arrived, LayerSpan, Prefilled, Recomputed
from demo.plot import draw, save
from demo.record import RequestTimes
from demo.show import print_report, summary, timeline
from kvwire import UsageError

LAYERS = 4
SVG = "{http://www.w3.org/2000/svg}"


def spans(tokens: int, began: float) -> list[LayerSpan]:
    """Each layer takes 10 ms."""
    return [
        LayerSpan(layer, tokens, began + layer * 0.01, began + (layer + 1) * 0.01)
        for layer in range(LAYERS)
    ]


def whole(began: float = 100.0) -> RequestTimes:
    """Everything arrived, 2 ms after the last mark; each layer took 3 ms."""
    record = RequestTimes("whole")
    marked = [began + layer * 0.01 + 0.001 for layer in range(LAYERS)]
    record.note(Prefilled("whole", spans(64, began), marked))
    record.landed = {layer: at + 0.003 for layer, at in enumerate(marked)}
    record.note(arrived("whole", marked[-1] + 0.002, missing=[]))
    record.tokens = [7]
    record.single = [7]
    return record


def broken() -> RequestTimes:
    """Two of four blocks did not arrive, and were computed."""
    record = whole(began=100.04)
    record.request = "broken"
    record.landed = {}
    record.note(arrived("broken", 100.08, missing=[1, 2]))
    record.note(Recomputed("broken", spans(48, 100.09)))
    record.tokens = [7]
    return record


def arrived(request: str, at: float, missing: list[int]) -> Arrived:
    return Arrived(
        request=request,
        at=at,
        blocks=4,
        missing=missing,
        why="kept back" if missing else "",
        tokens=64,
        usable_tokens=16 if missing else 64,
        to_prefill=[(16, 64)] if missing else [],
        nbytes=1_000_000,
        wire_s=0.02,
        commit_s=0.001,
        layers_grouped=1,
        transport="tcp",
    )


def test_the_figures_are_those_of_their_definitions() -> None:
    record = whole()
    assert record.exposed_s == pytest.approx(0.002)
    # Prefill until the last mark took 31 ms.
    assert record.overlap_efficiency == pytest.approx(31 / 33)
    assert list(record.faults()) == []
    record.note(arrived("whole", record.marked[-1] - 1, missing=[]))
    assert (record.exposed_s, record.overlap_efficiency) == (0, 1)


def test_other_tokens_and_other_prefill_are_faults() -> None:
    record = whole()
    record.single = [8]
    assert not record.equal
    assert "tokens differ" in next(iter(record.faults()))
    record = broken()
    assert list(record.faults()) == []
    record.recomputed = spans(47, 100.09)
    assert "48 tokens did not arrive, and 47" in next(iter(record.faults()))


def test_a_picture_shows_each_layer_and_what_moved_of_a_broken_request() -> None:
    assert Counter(bar.kind for bar in whole().bars()) == {
        "prefill": LAYERS,
        "transfer": LAYERS,
    }
    record = broken()
    assert record.rows == [*(f"layer {layer}" for layer in range(LAYERS)), "sent"]
    bars = list(record.bars())
    assert [bar.row for bar in bars if bar.kind == "recompute"] == record.rows[:-1]
    (moved,) = (bar for bar in bars if bar.kind == "transfer")
    assert moved.row == "sent"
    # It ended 1 ms before the outcome, and took 20 ms.
    assert (moved.start, moved.stop) == pytest.approx((100.059, 100.079))


def test_the_picture_is_an_svg_with_a_panel_for_each_request(tmp_path: Path) -> None:
    """The same run is the same file, and its text is text."""
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    for file in files:
        save(draw([broken(), whole()]), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    texts = [text.text or "" for text in ET.parse(files[0]).iter(f"{SVG}text")]
    titles = [text.partition(":")[0] for text in texts if "prompt of 65 tokens" in text]
    # In the order in which they were prefilled.
    assert titles == ["whole", "broken"]
    assert "computed by decode, because it was lost" in texts
    with pytest.raises(UsageError, match=r"no/found\.svg: No such file or directory"):
        save(draw([whole()]), tmp_path / "no" / "found.svg")


@pytest.mark.parametrize(("encoding", "letters"), [("utf-8", "▀▄█"), ("ascii", "=~#")])
def test_the_timeline_has_compute_above_transfer(encoding: str, letters: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=9 + 40)
    upper, lower, both = iter(letters)
    rows = timeline(whole(), console).plain.splitlines()
    # 40 ms are 40 letters; what leaves after 1 ms is there after 4.
    assert rows[0].split() == ["0", "ms", "40", "ms"]
    assert rows[1] == f"{'layer 0':9}{upper}{both * 4}{upper * 6}".ljust(49)
    assert [row[:7] for row in rows[1:]] == [f"layer {n}" for n in range(LAYERS)]
    assert lower in timeline(broken(), console).plain.splitlines()[-1]


def test_the_report_says_what_was_lost_and_what_was_equal() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    prompts = {"whole": [1, 2], "broken": [3]}
    print_report(console, [whole(), broken()], prompts, lambda t: f"<{t}>")
    said = out.getvalue()
    assert max(map(len, said.splitlines())) <= 80
    assert "<[7]>" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["whole", "65", "4", "1.00", "40.0", "2.00", "0.939", "4/4", "yes"] in lines
    words = " ".join(said.split())
    assert "in 2 of 2 requests the 1 new tokens are the same as in one process" in words
    assert "31 ms up to the last layer's KV; 5.5 ms later" in words
    assert "blocks 1 to 2 of 4 did not arrive (kept back)" in words
    assert "decode computed tokens 16 to 63" in words
    (row,) = json.loads(json.dumps(summary([broken()])))
    assert (row["lost_blocks"], row["prefilled_by_decode"]) == ([1, 2], [[16, 64]])
    assert row["equal"] is True
