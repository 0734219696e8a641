"""Every backend at hand keeps every promise: one test for each check.

The third one, for Unix sockets, is a distribution of its own that `make test` installs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from kvwire.backend import Availability, Backend, Capabilities, registry
from kvwire.errors import BackendUnavailable, UsageError
from kvwire.testing import check_backend
from kvwire.testing.conformance import CHECKS, Check, CheckFailed, Result, run_check
from kvwire.testing.conformance.__main__ import main
from kvwire.types import Address
from kvwire_inproc import InprocBackend

THIRD_PARTY = "unix"
ANY = Address("inproc", "")


@pytest.fixture
def address(scheme: str) -> Iterator[Address]:
    """Any free address of a scheme."""
    if scheme == THIRD_PARTY:
        # Not `tmp_path`: the path of a Unix socket has 104 bytes on macOS.
        with tempfile.TemporaryDirectory(prefix="kvwire-") as folder:
            yield Address(scheme, f"{folder}/")
    else:
        yield Address(scheme, "127.0.0.1" if scheme == "tcp" else "")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
@pytest.mark.parametrize(
    "scheme",
    ["inproc", "tcp", pytest.param(THIRD_PARTY, marks=pytest.mark.matrix)],
)
async def test_backend(scheme: str, check: Check, address: Address) -> None:
    if scheme == THIRD_PARTY and scheme not in registry.names():
        pytest.skip(
            "examples/third_party_backend is not installed; `make test` does it"
        )
    result = await run_check(check, registry.load(scheme), address)
    assert result.passed, result.reason


# --- the kit itself -------------------------------------------------------------------


def test_the_kit_needs_no_test_framework() -> None:
    said = (
        "import sys, kvwire.testing; assert 'kvwire.testing.conformance' not in "
        "sys.modules; kvwire.testing.check_backend; print('pytest' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_there_are_enough_checks() -> None:
    """Reliability goal Q3."""
    assert len(CHECKS) >= 120


def test_checks_have_distinct_ids_and_say_one_line() -> None:
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    assert all(check.promise and "\n" not in check.promise for check in CHECKS)


async def test_a_class_an_instance_and_a_scheme_are_checked() -> None:
    only = ["frame.size[33]", "close.both"]
    for backend in (InprocBackend, InprocBackend(), "inproc"):
        report = await check_backend(backend, only=only)
        assert [result.check.id for result in report] == only
        assert not report.failed
        assert "2 of 2 checks passed" in str(report)


async def test_failures_raise_unless_only_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InprocBackend, "api_version", 0)
    seen: list[Result] = []
    only = ["address.class", "address.free"]
    with pytest.raises(
        CheckFailed, match=r"address\.class: its api_version is 0, not 1"
    ):
        await check_backend(InprocBackend, only=only, progress=seen.append)
    assert [result.passed for result in seen] == [False, True]
    report = await check_backend(InprocBackend, only=only, raising=False)
    assert [result.check.id for result in report.failed] == ["address.class"]
    assert "FAILED  address.class" in str(report)
    with pytest.raises(CheckFailed, match="1 of 2 checks passed"):
        report.raise_for_failures()


async def test_a_backend_that_cannot_be_made_fails_every_check() -> None:
    class Unmade(InprocBackend):
        def __init__(self) -> None:
            raise RuntimeError("no such library")

    report = await check_backend(Unmade, only=["frame.none"], raising=False)
    assert report.failed[0].reason == "RuntimeError: no such library"


async def test_unknown_names_are_refused() -> None:
    with pytest.raises(BackendUnavailable, match="no backend called 'nowhere'"):
        await check_backend("nowhere")
    with pytest.raises(UsageError, match="no check is called frame"):
        await check_backend("inproc", only=["frame"])


def test_the_command_prints_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inproc", "--only", "close.t*", "--loop", "uvloop"]) == 0
    printed = capsys.readouterr().out
    assert "passed  close.twice" in printed
    assert "2 of 2 checks passed" in printed


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> str:
    """Names three checks, of which the first two fail and the last one passes."""
    odd = type("Odd", (Capabilities,), {})
    monkeypatch.setattr(InprocBackend, "capabilities", odd(same_process=True))
    unavailable = Availability(available=False, reason="planted")
    monkeypatch.setattr(
        InprocBackend, "availability", classmethod(lambda cls: unavailable)
    )
    return "address.[acf][lvr][are]*"


def test_what_failed_is_repeated_at_the_end(
    broken: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whole ids, however narrow the terminal is; they select it with --only."""
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["inproc", "--only", broken]) == 1
    printed = capsys.readouterr().out
    every, failed = printed.split("2 failed:\n")
    assert "passed  address.free" in every
    assert "FAILED  address.class" in every
    lines = failed.splitlines()
    assert lines[0] == "address.class: its capabilities are a Odd"
    assert lines[1] == "address.available: it says it cannot run here: planted"


def test_quiet_prints_what_failed_and_the_summary(
    broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inproc", "-q", "--only", broken]) == 1
    printed = capsys.readouterr().out
    assert "passed  " not in printed
    assert printed.count("address.class") == 1
    assert printed.splitlines()[-1].startswith("backend 'inproc': ")


def test_it_stops_at_the_first_failure(
    broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inproc", "-x", "--only", broken]) == 1
    printed = capsys.readouterr().out
    assert "1 failed:\naddress.class: " in printed
    assert "address.available" not in printed
    assert "0 of 1 checks passed" in printed


def test_json_is_all_that_it_prints(
    broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inproc", "--json", "--only", broken]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["backend"] == "inproc"
    assert document["failed"] == 2
    assert document["passed"] == len(document["checks"]) - 2
    failed = [check for check in document["checks"] if not check["passed"]]
    assert [check["id"] for check in failed] == ["address.class", "address.available"]
    assert failed[0]["reason"] == "its capabilities are a Odd"
    assert failed[0]["seconds"] > 0
    assert failed[0]["promise"]


def test_the_command_fails_with_its_backend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(cls: type[Backend]) -> Availability:
        return Availability(available=False, reason="planted")

    monkeypatch.setattr(InprocBackend, "availability", classmethod(unavailable))
    assert main(["inproc", "--only", "address.available"]) == 1
    assert "it says it cannot run here: planted" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nowhere"], ["inproc", "--only", "nothing"]])
def test_the_command_says_what_it_does_not_know(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "nowhere" in printed or "no check matches 'nothing'" in printed
