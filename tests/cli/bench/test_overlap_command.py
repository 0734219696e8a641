"""Options of ``kvwire bench overlap``."""

from __future__ import annotations

import pytest

from kvwire.cli.main import CALLED_WRONG, main


@pytest.mark.parametrize(
    "wrong",
    [
        ["--layers", "1"],
        ["--layer-kib", "100"],
        ["--rounds", "0"],
        ["--transport", "inproc"],
    ],
)
def test_options_that_make_no_sense(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "overlap", *wrong]) == CALLED_WRONG
    assert capsys.readouterr().err
