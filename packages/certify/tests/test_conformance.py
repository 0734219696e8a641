"""The conformance kits themselves: what they run, report and refuse."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from kvwire.backend import Availability, Capabilities, Link
from kvwire.cli.main import main
from kvwire.errors import BackendUnavailable, UsageError
from kvwire.types import Address
from kvwire_certify.conformance import (
    CHECKS,
    CheckFailed,
    Result,
    check_backend,
    check_lanes,
)
from kvwire_certify.conformance.runner import LANE_CHECKS
from kvwire_inproc import InprocBackend
from kvwire_inproc.lane import InprocLane
from tests.support.runs import python

_TWO = ("address.bound", "address.conflict")


def test_the_kit_needs_no_test_framework() -> None:
    said = "import sys, kvwire_certify.conformance; print('pytest' in sys.modules)"
    done = python("-c", said, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("checks", [CHECKS, LANE_CHECKS])
def test_there_are_enough_checks_and_each_says_what_it_is(
    checks: tuple[Any, ...],
) -> None:
    """Reliability goal Q3."""
    assert len({check.id for check in checks}) == len(checks) >= 120
    assert all(check.promise and "\n" not in check.promise for check in checks)


async def test_a_class_an_instance_and_a_scheme_are_checked() -> None:
    for backend in (InprocBackend, InprocBackend(), "inproc"):
        only = ["payload.size[33]", "close.both"]
        report = await check_backend(backend, only=only)
        assert [result.check.id for result in report] == only
        assert not report.failed
        assert "2 of 2 checks passed" in str(report)
        if not isinstance(backend, InprocBackend):
            only = ["join.idle", "payload.size[33]"]
            report = await check_lanes(backend, only=only)
            assert [result.check.id for result in report] == only


async def test_failures_raise_unless_only_reported() -> None:
    old = type("Old", (InprocBackend,), {"api_version": 0})
    seen: list[Result] = []
    only = ["address.class", "address.free"]
    with pytest.raises(
        CheckFailed, match=r"address\.class: its api_version is 0, not 1"
    ):
        await check_backend(old, only=only, progress=seen.append)
    assert [result.passed for result in seen] == [False, True]
    report = await check_backend(old, only=only, raising=False)
    assert [result.check.id for result in report.failed] == ["address.class"]
    assert "FAILED  address.class" in str(report)
    with pytest.raises(CheckFailed, match="1 of 2 checks passed"):
        report.raise_for_failures()


async def test_a_backend_that_cannot_be_made_fails_every_check() -> None:
    class Unmade(InprocBackend):
        def __init__(self) -> None:
            raise RuntimeError("no such library")

    report = await check_backend(Unmade, only=["payload.size[0]"], raising=False)
    assert report.failed[0].reason == "RuntimeError: no such library"


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
async def test_what_a_backend_raises_ends_its_check_and_not_the_kit(
    error: BaseException,
) -> None:
    class Rude(InprocBackend):
        async def connect(self, address: Address) -> Link:
            raise error

    report = await check_backend(Rude, only=["address.class", *_TWO], raising=False)
    assert report.failed[0].reason.startswith(type(error).__name__)
    assert [result.passed for result in report] == [True, False, False]


async def test_the_kit_itself_can_be_cancelled() -> None:
    begun = asyncio.Event()

    class Waits(InprocBackend):
        async def connect(self, address: Address) -> Link:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

    task = asyncio.create_task(check_backend(Waits, only=_TWO))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_rank_that_is_no_number_is_found() -> None:
    """Such a backend goes last, wherever it wanted to be."""
    rank = classmethod(lambda cls: "high")
    high = type("High", (InprocBackend,), {"rank": rank})
    for kit, check in (
        (check_backend, "address.available"),
        (check_lanes, "address.available"),
    ):
        report = await kit(high, only=[check], raising=False)
        assert (
            report.failed[0].reason == "its rank is 'high', which is not a whole number"
        )


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        ("window_bytes", 0, "window_bytes is 0, not 1 or more"),
        ("span_bytes", -1, "span_bytes is -1, not 0 or more"),
        ("bytes_min", "1 MiB", "bytes_min is '1 MiB', not 1 or more"),
        ("intact", None, "intact is None"),
        ("memory_kinds", None, "memory_kinds is None"),
        ("memory_kinds", frozenset({"host"}), "memory_kinds is frozenset({'host'})"),
        ("description", None, "the description is None"),
    ],
)
async def test_what_a_lane_says_of_itself_is_checked(
    fact: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data waited for ever on a lane with a window of 0, and the kit passed it."""
    monkeypatch.setattr(InprocLane, fact, value)
    report = await check_lanes(InprocBackend, only=["join.idle"], raising=False)
    assert [result.reason for result in report] == [f"left: {said}"]


@pytest.mark.parametrize("kit", [check_backend, check_lanes])
async def test_what_is_no_backend_is_refused(kit: Any) -> None:
    class Careless(InprocBackend):
        capabilities: ClassVar[Any] = {"links": True}

    for what in (3, None, object):
        with pytest.raises(UsageError, match=r"a kvwire\.backend\.Backend"):
            await kit(what)
    with pytest.raises(UsageError, match=r"Careless\.capabilities must be .*, not \{"):
        await kit(Careless)


async def test_what_is_not_known_or_has_no_lanes_is_refused() -> None:
    for kit, what in ((check_backend, "check"), (check_lanes, "check of lanes")):
        with pytest.raises(BackendUnavailable, match="no backend called 'nowhere'"):
            await kit("nowhere")
        with pytest.raises(UsageError, match=f"unknown {what} frame"):
            await kit("inproc", only=["frame"])

    class Laneless(InprocBackend):
        capabilities = Capabilities(same_process=True)

    with pytest.raises(UsageError, match="has no lanes"):
        await check_lanes(Laneless)
    with pytest.raises(UsageError, match="has no links; use check_lanes"):
        await check_backend("local")


def certify_backend(*arguments: str) -> int:
    return main(["certify", "backend", *arguments])


def test_the_command_prints_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert certify_backend("inproc", "--only", "close.t*", "--loop", "uvloop") == 0
    printed = capsys.readouterr().out
    assert "passed  close.twice" in printed
    assert "2 of 2 checks passed" in printed
    assert certify_backend("inproc", "--lanes", "--only", "close.t*") == 0
    assert "2 of 2 checks passed" in capsys.readouterr().out
    assert certify_backend("local", "--lanes", "-x", "--setting", "way=none") == 1
    assert "KeyError: 'none'" in capsys.readouterr().out


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
    assert certify_backend("inproc", "--only", broken) == 1
    printed = capsys.readouterr().out
    every, failed = printed.split("2 failed:\n")
    assert "passed  address.free" in every
    assert "FAILED  address.class" in every
    lines = failed.splitlines()
    assert lines[0] == "address.class: its capabilities are a Odd"
    assert lines[1] == "address.available: it reports that it cannot run here: planted"
    assert lines[-1].startswith("backend 'inproc': ")


def test_it_stops_at_the_first_failure(
    broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify_backend("inproc", "-x", "--only", broken) == 1
    printed = capsys.readouterr().out
    assert "1 failed:\naddress.class: " in printed
    assert "address.available" not in printed
    assert "0 of 1 checks passed" in printed


@pytest.mark.parametrize("arguments", [["nowhere"], ["inproc", "--only", "nothing"]])
def test_the_command_says_what_it_does_not_know(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify_backend(*arguments) != 0
    printed = capsys.readouterr().err
    assert "nowhere" in printed or "no check matches 'nothing'" in printed
