"""``kvwire bench messages``, from the command line to the files it writes."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvwire.cli.bench import messages
from kvwire.cli.bench.messages import SIZES
from kvwire.limits import KIB
from tests.cli.bench.conftest import Bench

VERBS = ("send", "put", "get")


@pytest.mark.timeout(120)
def test_messages_measures_everything_once(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round, with small bulk sizes; every case has our samples and the peers'."""
    monkeypatch.setattr(messages, "SIZES", (64 * KIB, 256 * KIB))
    plot = tmp_path / "found.svg"
    arguments = "--rounds", "1", "--round-mib", "1", "--plot", str(plot)
    found, printed = bench("messages", *arguments)
    assert "64 B round trip, us" in printed
    ping, *bulk = found["cases"]
    assert ping["best"] == "uvloop streams"
    assert len(ping["contenders"]["kvwire"]["rounds"][0]) == messages.PINGS
    assert len(bulk) == 2 * len(VERBS)
    for row in found["cases"]:
        assert row["ratio"] > 0
        assert row["met"] in (True, False)
    assert found["contenders"]["kvwire"]["loop"] == "uvloop"
    for picture in (plot, tmp_path / "found-times.svg"):
        assert ET.parse(picture).getroot().tag.endswith("svg")


def test_the_cases_are_those_of_the_documentation() -> None:
    found = messages.messages(transport="tcp", loop="asyncio", round_bytes=1 << 26)
    names = [row.name for row in found.cases]
    assert names == [
        "64 B round trip",
        *(f"1 MiB {verb}" for verb in VERBS),
        *(f"16 MiB {verb}" for verb in VERBS),
    ]
    assert [row.target for row in found.cases] == [1.3] + [0.9] * 6
    assert found.cases[0].contenders[1].name == "asyncio streams"
    assert {row.work.nbytes for row in found.cases[1:]} == set(SIZES)
    for row in found.cases[1:]:
        assert row.work.count >= row.work.in_flight
