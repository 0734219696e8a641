"""``kvwire bench``: what its commands refuse before anything runs."""

from __future__ import annotations

import pytest

from kvwire.cli.main import CALLED_WRONG, main

NOBODY = "--transport pigeons: no such backend"
ONE_PROCESS = "--transport inproc joins two loops of one process"


@pytest.mark.parametrize(
    ("name", "option", "value", "says"),
    [
        *(
            (name, "--transport", "pigeons", NOBODY)
            for name in ("messages", "overlap", "many", "ops", "setup", "store")
        ),
        ("fragments", "--transport", "pigeons", "--transport pigeons: "),
        ("messages", "--transport", "inproc", ONE_PROCESS),
        ("ops", "--transport", "inproc", ONE_PROCESS),
        ("store", "--transport", "inproc", ONE_PROCESS),
        ("messages", "--rounds", "0", "--rounds"),
        ("messages", "--loop", "trio", "--loop"),
        ("messages", "--round", "1", "--round"),
        ("overlap", "--layer-kib", "65", "a multiple of 64"),
        ("store", "--tiers", "tape", "--tiers tape: there are memory, disk, server,"),
        ("store", "--directory", "/no/such", "/no/such: there is no such"),
        ("store", "--round-mib", "1", "Must be >= 4"),
        ("store", "--blocks", "huge", '"huge"'),
    ],
)
def test_what_is_refused(
    name: str, option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, option, value]) == CALLED_WRONG
    assert says in " ".join(capsys.readouterr().err.split())
