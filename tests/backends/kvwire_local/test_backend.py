"""The backend: where it runs, and what it says to who takes it for a transport."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from kvwire.backend import registry
from kvwire.memory import cma
from kvwire_local import LocalBackend
from kvwire_local import backend as diagnosis
from kvwire_local.tracer_slot import TracerSlot


def test_it_is_registered() -> None:
    assert registry.load("local") is LocalBackend
    assert LocalBackend.availability().available
    assert LocalBackend.rank() < registry.load("tcp").rank()


def test_elsewhere_than_on_linux_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = LocalBackend.availability()
    assert not found.available
    assert "this is darwin" in found.reason
    assert found.remedy == "use tcp"


def found() -> dict[str, str]:
    return {finding.name: finding.state for finding in LocalBackend.diagnose()}


def test_this_machine_is_looked_at() -> None:
    assert set(found()) == {"ptrace scope", "process_vm_readv", "arenas"}
    assert all(finding.text for finding in LocalBackend.diagnose())


@pytest.mark.parametrize(
    ("scope", "state", "text"),
    [
        ("0", "ok", "0: peers of this user"),
        ("1", "ok", "1: one peer process at a time"),
        ("2", "warn", "2: only a process with CAP_SYS_PTRACE"),
        ("3", "warn", "3: no process may read"),
        ("7", "warn", "7: a value that this version does not know"),
        ("", "ok", "not restricted"),
    ],
)
def test_each_scope_is_explained(
    scope: str, state: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ptrace_scope"
    file.write_text(scope)
    place = TracerSlot(lambda pid: True, file)
    monkeypatch.setattr(diagnosis, "tracers", lambda: place)
    finding = diagnosis.findings()[0]
    assert finding.state == state
    assert finding.text.startswith(text)
    assert bool(finding.remedy) is (state == "warn")


def test_refusals_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(cma, "read_bytes", refuse)
    monkeypatch.setattr(diagnosis, "Arena", refuse)
    assert found()["process_vm_readv"] == "warn"
    assert found()["arenas"] == "missing"


def test_elsewhere_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert LocalBackend.diagnose() == ()
