"""Every backend is asked; one that breaks its promise does not break the doctor."""

from __future__ import annotations

import pytest

from kvwire.backend import Availability, Finding, registry
from kvwire.cli.doctor.transports import installed
from kvwire_tcp import TcpBackend

SLOW = Finding(name="buffers", state="warn", text="small", remedy="sysctl")


class Chatty(TcpBackend):
    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        return (SLOW,)


class Broken(TcpBackend):
    @classmethod
    def availability(cls) -> Availability:
        return Availability(available=False, reason="no device", remedy="buy one")

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        raise ZeroDivisionError("who would have thought")


def test_what_is_installed() -> None:
    found = {transport.name: transport for transport in installed()}
    assert {"inproc", "tcp"} <= set(found)
    assert found["tcp"].available


def test_a_backend_tells_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "names", lambda: ("tcp",))
    monkeypatch.setattr(registry, "load", lambda _: Chatty)
    (transport,) = installed()
    assert transport.findings == (SLOW,)


def test_a_backend_that_raises_is_shown_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "names", lambda: ("tcp",))
    monkeypatch.setattr(registry, "load", lambda _: Broken)
    (transport,) = installed()
    assert not transport.available
    assert (transport.reason, transport.remedy) == ("no device", "buy one")
    (finding,) = transport.findings
    assert "ZeroDivisionError: who would have thought" in finding.text


def test_a_backend_that_cannot_be_loaded_has_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "names", lambda: ("nobody",))
    (transport,) = installed()
    assert not transport.available
    assert "no backend called 'nobody'" in transport.reason
    assert transport.findings == ()
