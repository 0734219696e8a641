"""kvwire with and without the functions that a C compiler has made."""

from __future__ import annotations

from typing import Final

import pytest

import kvwire_local.blocks
import kvwire_ucx.requests
from kvwire.memory import generations, pieces

_FUNCTIONS: Final = (
    (pieces, "compiled"),
    *((generations, name) for name in ("renew_compiled", "same_compiled")),
    *((kvwire_local.blocks, f"{way}_compiled") for way in ("mapped", "process")),
    *((kvwire_ucx.requests, f"{w}_compiled") for w in ("post", "reap", "progress")),
)


def without_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there was no compiler when kvwire was installed."""
    for module, name in _FUNCTIONS:
        monkeypatch.setattr(module, name, None)


def need_compiled() -> None:
    if any(getattr(module, name) is None for module, name in _FUNCTIONS):
        pytest.skip("kvwire was installed without a C compiler: there is no _copy.so")
