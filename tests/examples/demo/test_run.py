"""The demo itself, small: three processes, a real transformer, tokens compared."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from demo import command, plot
from demo.book import ANCHORS
from demo.lines import Prompt
from demo.run import RoleFailed, run
from kvwire.cli.main import CALLED_WRONG, main

_WHY = "not installed here; `make test-torch` installs torch and transformers"

with_torch = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason=f"transformers: {_WHY}",
)


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=with_torch)])
def test_two_processes_say_what_one_says(
    library: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of three requests loses blocks, and exactly what is missing is computed."""
    size = ["--requests", "3", "--prompt", "96", "--new", "4", "--wire-gbit", "1"]
    option = ["--torch"] if library == "torch" else []
    assert run_demo(*size, *option, "--json") == 0
    said, progress = capfd.readouterr()
    assert f"weights in {library}" in progress
    rows: list[dict[str, Any]] = json.loads(said)
    names = list(ANCHORS)[:3]
    assert [row["request"] for row in rows] == names
    for row in rows:
        assert row["equal"] is True
        assert (row["prompt_tokens"], row["new_tokens"]) == (96, 4)
        assert (row["layers"], row["layers_grouped"]) == (8, 1)
        assert row["transport"] == "tcp"
    whole = [row for row in rows if row["request"] != names[1]]
    # 95 tokens are 6 blocks, which move whole: 16 tokens, 8 layers, keys and values,
    # 2 heads of 32 float32 each.
    assert {row["bytes"] for row in whole} == {6 * 16 * 8 * 2 * 2 * 32 * 4}
    assert [row["prefilled_by_decode"] for row in whole] == [[], []]
    # The third in the middle begins at block 2.
    assert rows[1]["lost_blocks"] == [2, 3]
    assert rows[1]["usable_tokens"] == 32
    assert rows[1]["prefilled_by_decode"] == [[32, 95]]


async def test_a_process_that_ends_early_is_named() -> None:
    with pytest.raises(RoleFailed, match=r"the \w+ process ended with exit status"):
        await run([Prompt("x", [-(10**9)] * 20, 1)], lambda event: None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", "500", "--new", "64"], "at most 512 tokens"),
        (["--prompt", "63"], "--prompt"),
        (["--requests", "9"], "--requests"),
        (["--wire-gbit", "0"], "--wire-gbit"),
    ],
)
def test_what_it_cannot_do_is_refused_before_it_starts(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(*options) == CALLED_WRONG
    out, err = capsys.readouterr()
    assert says in out + err


def test_without_torch_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert run_demo("--torch") == CALLED_WRONG
    assert "packages/engines[transformers]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("found.svg", None, "a plot needs matplotlib: pip install"),
        ("found.gif", object(), "must end in .svg, .png, .pdf"),
        ("found", object(), "must end in .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_runs(
    name: str,
    found: object,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _: found)
    monkeypatch.setattr(command, "run", None)  # it would raise another error
    assert run_demo("--plot", name) == CALLED_WRONG
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def run_demo(*arguments: str) -> int:
    return main(arguments, command.app)
