"""kvwire with and without the functions that a C compiler has made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

import kvwire_local.blocks
import kvwire_ucx.requests
from kvwire.memory import generations, pieces
from kvwire.memory.compiled import LIBRARY, CompiledFunction, compiled_function
from tests.support.runs import ran

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


def blind(function: CompiledFunction | None, folder: Path) -> CompiledFunction | None:
    """The same without its look after the bytes; None where that cannot be compiled."""
    source, library = LIBRARY.with_suffix(".c"), folder / f"planted-{os.getpid()}.so"
    if function is None or not source.exists() or not shutil.which("cc"):
        return None
    flags = ("-O2", "-fPIC", "-shared", "-DKVWIRE_PLANTED")
    ran("cc", *flags, "-o", library, source, check=True)
    held: Any = function.held
    return compiled_function(
        held.__name__, *held.argtypes, result=held.restype, library=library
    )
