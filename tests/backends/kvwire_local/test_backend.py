"""The backend: where it runs, and what it says to who takes it for a transport."""

from __future__ import annotations

import sys

import pytest

from kvwire.backend import registry
from kvwire.errors import BackendUnavailable
from kvwire.types import Address
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


async def test_it_has_no_addresses() -> None:
    backend, address = LocalBackend(), Address("local", "here")
    with pytest.raises(BackendUnavailable, match="listen on a tcp address of this"):
        await backend.listen(address, print)
    with pytest.raises(BackendUnavailable, match="connect to a tcp address of this"):
        await backend.connect(address)
