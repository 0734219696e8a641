"""Where findings go: the table, the document, the picture, and the bar meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from kvwire import UsageError
from kvwire.cli.bench.output import measure, progress_bar, show
from kvwire.cli.plot import new_figure
from tests.cli.bench.contenders import Scripted, benchmark, case

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOUND: dict[str, Any] = {"found": [1, 2.5], "met": True}


def two_pictures() -> dict[str, Figure]:
    return {"": new_figure(1, 1), "-times": new_figure(1, 1)}


def never() -> Any:
    raise AssertionError("nobody asked for it")


def test_the_table_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What nobody asks for is not even made."""
    show("a table", never, never, json=None, plot=None)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a table\n", "")


def test_files_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, plot = tmp_path / "found.json", tmp_path / "found.svg"
    show("a table", lambda: FOUND, two_pictures, json=json_file, plot=plot)
    assert json.loads(json_file.read_text()) == FOUND
    for name in ("found.svg", "found-times.svg"):
        assert ET.parse(tmp_path / name).getroot().tag.endswith("svg")
    assert capsys.readouterr().out == "a table\n"


def test_the_document_alone_on_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    """So that it can be piped; the table is for whoever watches."""
    show("a table", lambda: FOUND, None, json=Path("-"), plot=None)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == FOUND
    assert captured.err == "a table\n"


def test_a_benchmark_without_a_picture_writes_none(tmp_path: Path) -> None:
    plot = tmp_path / "found.svg"
    show("a table", never, None, json=None, plot=plot)
    assert not plot.exists()


@pytest.mark.parametrize("option", ["json", "plot"])
def test_a_file_that_cannot_be_written_is_named(option: str, tmp_path: Path) -> None:
    files = {"json": None, "plot": None, option: tmp_path / "no" / "file.svg"}
    with pytest.raises(UsageError, match=r"no/file\.svg: No such file or directory"):
        show("a table", lambda: FOUND, two_pictures, **files)


def test_the_bar_is_drawn_beside_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2) as progress:
        progress("the first")
        progress("the second")
    assert capsys.readouterr().out == ""


def test_measuring_gives_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    ours = Scripted("ours", [[1.0]])
    (finding,) = measure(benchmark(case(ours)), rounds=3)
    assert finding.samples["ours"].values == [1.0] * 3
    assert capsys.readouterr().out == ""
