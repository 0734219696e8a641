"""The compiled functions of ``_copy.c``, where kvwire was installed with a C compiler.

The library knows nothing of Python. It is loaded twice: its functions as ones that keep
the GIL, and as ones that release it. Without it, and with one of another version, each
caller does the same in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple


class CompiledFunction(NamedTuple):
    """A function in C, as one that keeps the GIL and as one that releases it."""

    held: Callable[..., Any]
    released: Callable[..., Any]


LIBRARY: Final = Path(__file__).with_name("_copy.so")
as_argument: Final[Callable[[Any], Any]] = (ctypes.c_char * 0).from_buffer
"""Passes an array that is written to, in a quarter of the time its address takes.

A short array that is only read is passed as ``array.tobytes()``: the copy takes a tenth
of that time.
"""


def compiled_function(
    name: str, *kinds: Any, result: Any = None, library: Path = LIBRARY
) -> CompiledFunction | None:
    """Return a function of the library; None if it is not built or has no such name.

    Args:
        name: Its name.
        *kinds: The ctypes of its arguments.
        result: The ctype of its result.
        library: Where the library is.
    """
    try:
        found = [
            getattr(load(str(library)), name) for load in (ctypes.PyDLL, ctypes.CDLL)
        ]
    except (OSError, AttributeError):
        return None
    for function in found:
        function.argtypes = kinds
        function.restype = result
    return CompiledFunction(*found)
