"""Every backend at hand keeps every promise: one test for each check."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwire import registry
from kvwire.testing.conformance import CHECKS, Check, run_check
from kvwire.types import Address

THIRD_PARTY = "unix"


def _address(scheme: str, folder: Path) -> Address:
    if scheme == THIRD_PARTY:
        return Address(scheme, f"{folder}/")
    return Address(scheme, "127.0.0.1" if scheme == "tcp" else "")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
@pytest.mark.parametrize("scheme", ["inproc", "tcp", THIRD_PARTY])
async def test_backend(scheme: str, check: Check, tmp_path: Path) -> None:
    if scheme not in registry.names():
        pytest.skip(f"no backend {scheme!r} is installed; `make test` installs it")
    cls = registry.load(scheme)
    result = await run_check(check, cls, _address(scheme, tmp_path))
    assert result.passed, result.reason
