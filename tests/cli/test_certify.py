"""``kvwire certify``: its exit status, files and reports."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from kvwire.cli.main import main
from kvwire.testing.certify import Breach, Certificate
from kvwire.testing.certify.transport import TARGETS
from kvwire.testing.oracle import RULES
from tests.support.tree import ROOT

PLANTS = ROOT / "tests" / "testing" / "certify" / "plants.py"


def test_a_healthy_transport(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit, html = tmp_path / "junit.xml", tmp_path / "page.html"
    files = ["--junit", str(junit), "--html", str(html), "--into", str(tmp_path)]
    assert main(["certify", "toy", "--schedules", "2", *files]) == 0
    said = capsys.readouterr().out
    assert "toy 1: 2 schedules" in said
    assert said.count("kept ") == len(RULES)
    suite = ET.parse(junit).getroot()
    assert [case.get("name") for case in suite] == list(RULES)
    assert suite.get("failures") == "0"
    assert "Every call ends in time." in html.read_text()
    assert not list(tmp_path.glob("*.json"))


def test_a_breach_is_kept_and_plays_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junit = tmp_path / "junit.xml"
    options = ["--schedules", "1", "--seed", "9", "--times", "1", "--json"]
    options += ["--into", str(tmp_path), "--junit", str(junit)]
    assert main(["certify", f"{PLANTS}:Hole", *options]) == 1
    said, progress = capsys.readouterr()
    assert progress.startswith("seed 9: hole: ")
    (breach,) = msgspec.json.decode(said, type=Certificate).breaches
    assert breach.seeds == (9,)
    (file,) = tmp_path.glob("*.json")
    assert f"run it again: kvwire certify {file}" in progress
    assert msgspec.json.decode(file.read_bytes(), type=Breach) == breach
    assert ET.parse(junit).getroot().get("failures") == "1"

    assert main(["certify", str(file), "--times", "1"]) == 1
    assert "bytes that landed were never written" in capsys.readouterr().out


def test_what_comes_with_kvwire() -> None:
    """In a process of its own: libraries leave descriptors and threads behind."""
    command = [sys.executable, "-m", "kvwire", "certify"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if not line.startswith(" ")]
    assert [row[0] for row in rows[1:]] == list(TARGETS)
    assert ["toy", "1"] in rows


@pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is not None, reason="ucxx is installed here"
)
def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "ucxx"]) != 0
    text = "certify ucxx needs ucxx, which is not installed: pip install ucxx-cu12"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("tory", "is neither module:Class nor file.py:Class; did you mean 'toy'?"),
        ("nowhere.py:Thing", "file nowhere.py does not exist"),
        (f"{PLANTS}:KEPT", "must be a subclass of kvwire.testing.certify.End"),
        ("kvwire.testing.certify:End", "has neither get nor put"),
        (f"{ROOT / 'package.json'}", "package.json"),
    ],
)
def test_no_target(target: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", target]) != 0
    assert text in capsys.readouterr().err
