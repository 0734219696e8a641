"""Tools for testing kvwire and programs that use it; pytest is not needed.

Names are imported on first use, because the pytest plugin imports this package in every
pytest run where kvwire is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvwire.testing.harness import Loopback, loopback

_HOMES = {
    "Loopback": "kvwire.testing.harness",
    "loopback": "kvwire.testing.harness",
}

__all__ = ["Loopback", "loopback"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
