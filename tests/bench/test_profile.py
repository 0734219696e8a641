"""``python -m tests.bench profile``."""

import pytest

from kvwire.cli.main import main
from tests.bench.__main__ import app
from tests.bench.profile import COSTS, SIDES


@pytest.mark.slow
def test_both_sides_say_where_their_time_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--transport", "tcp", "--kib", "64", "--mib", "1", "--rounds", "1"]
    assert main(["profile", *arguments, "--top", "999"], app) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("a round of 1 MiB: ")
    for side, line in zip(SIDES, lines, strict=False):
        assert line.startswith(f"{side}: wall ms ")
        assert all(name in line for name in COSTS)
    run = "kvwire/driver/connection_driver.py ConnectionDriver.run"
    assert sum(line.endswith(run) for line in lines) == len(SIDES)
