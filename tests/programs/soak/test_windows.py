"""The soak of windows: on each transport, and without the look after the bytes."""

from __future__ import annotations

import pytest

from tests.backends.kvwire_ucx.support import needs_reading
from tests.programs.soak.windows import WAYS, main

# A million blocks in all; each way's share takes about as long.
SHARES = {
    "mapped": 400_000,
    "process_vm_readv": 350_000,
    "tcp": 100_000,
    "inproc": 50_000,
    "ucx": 100_000,
}
_WAYS = [
    pytest.param("mapped"),
    pytest.param("process_vm_readv"),
    pytest.param("tcp"),
    pytest.param("inproc"),
    pytest.param("ucx", marks=needs_reading),
]
FOUND = "0 wrong bytes, 0 late bytes"


def soaked(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run it with a seed; what it printed."""
    main(["--seed", "1", *options])
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
def test_nothing_torn_or_stale_lands(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside an owner that changes its blocks; and nothing comes late."""
    said = soaked(capsys, "--way", way, "--blocks", str(SHARES[way]), "--fault-s", "0")
    assert FOUND in said
    for what in (f"gets, {WAYS[way].taken}: ", "missing: ", "windows: "):
        assert what in said


@pytest.mark.parametrize("way", _WAYS)
def test_nor_while_processes_are_stopped_and_killed(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of either side, at any moment."""
    options = ("--way", way, "--blocks", "20000", "--fault-s", "0.2")
    said = soaked(capsys, *options)
    assert FOUND in said
    for what in (f"gets, {WAYS[way].taken}: ", "missing: ", "cut: "):
        assert what in said


@pytest.mark.parametrize("way", _WAYS)
def test_without_the_look_after_the_bytes(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torn blocks land, and are found."""
    options = ("--way", way, "--blocks", "1000000", "--fault-s", "0", "--plant")
    assert main(["--seed", "1", *options]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert " 0 wrong bytes" not in said
    assert "0 late bytes" in said
