"""The backend: where it runs, and what it says to who takes it for a transport."""

from __future__ import annotations

import sys

import pytest

from kvwire.backend import registry
from kvwire_local import LocalBackend


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
