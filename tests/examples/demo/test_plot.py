"""Pictures: what is refused before the demo runs, and what is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from demo import command, plot
from demo.plot import add_legend, new_figure, save
from kvwire import UsageError
from kvwire.cli.main import CALLED_WRONG, main


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("found.svg", None, "a picture needs matplotlib: pip install"),
        ("found.gif", object(), "ends in .svg, .png, .pdf"),
        ("found", object(), "ends in .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_runs(
    name: str,
    found: object,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[object] = []

    def run(*requests: object, **_: object) -> None:
        ran.append(requests)

    monkeypatch.setattr(plot, "find_spec", lambda _: found)
    monkeypatch.setattr(command, "run", run)
    assert main(["--plot", name], command.app) == CALLED_WRONG
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ran == []


def test_without_matplotlib_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="needs matplotlib: pip install"):
        new_figure(1, 1)


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")]
)
def test_the_name_says_the_format(suffix: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"found{suffix}"
    save(new_figure(1, 1), path)
    assert path.read_bytes().startswith(magic)


def test_the_same_figure_is_the_same_file_and_its_text_is_text(tmp_path: Path) -> None:
    written = []
    for name in ("one.svg", "two.svg"):
        figure = new_figure(3, 2)
        figure.subplots().plot([1, 2], [3, 4], "o")
        add_legend(figure, {"kvwire & others": "#123456"})
        save(figure, tmp_path / name)
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1]
    assert "kvwire &amp; others" in written[0]
    assert "#123456" in written[0]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no/found\.svg: No such file or directory"):
        save(new_figure(1, 1), tmp_path / "no" / "found.svg")
