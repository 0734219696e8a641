"""The picture of the demo: what is refused before a run, and what is written."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvwire import UsageError
from kvwire.cli.demo import picture
from kvwire.cli.demo.picture import draw, save
from kvwire.cli.main import CALLED_WRONG, main
from tests.cli.demo.test_show import broken, whole

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("found.svg", None, "a picture needs matplotlib: pip install"),
        ("found.gif", object(), "ends in .svg, .png, .pdf"),
        ("found", object(), "ends in .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_started(
    name: str,
    found: object,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda _: found)
    assert main(["demo", "--plot", name]) == CALLED_WRONG
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_it_has_a_panel_for_each_request(tmp_path: Path) -> None:
    save(draw([broken(), whole()]), tmp_path / "found.svg")
    root = ET.parse(tmp_path / "found.svg").getroot()
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    titles = [text.partition(":")[0] for text in texts if "prompt of 65 tokens" in text]
    # In the order in which they were prefilled.
    assert titles == ["whole", "broken"]
    assert "computed by decode, because it was lost" in texts


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")]
)
def test_the_name_says_the_format(suffix: str, magic: bytes, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in ("one", "two")]
    for path in paths:
        save(draw([whole()]), path)
        assert path.read_bytes().startswith(magic)
    if suffix == ".svg":
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no/found\.svg: No such file or directory"):
        save(draw([whole()]), tmp_path / "no" / "found.svg")
