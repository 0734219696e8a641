"""The compiled functions of ``_copy.c``, if kvwire was installed with a C compiler.

The library knows nothing of Python. It is loaded twice: its functions as ones that keep
the GIL, and as ones that release it. Without it, and with one of another version, each
caller does the same in Python.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple


class CompiledFunction(NamedTuple):
    """A C function, in a version that keeps the GIL and one that releases it."""

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
    """Return a function of the library, or None if it is missing.

    Args:
        name: Its name.
        *kinds: The ctypes of its arguments.
        result: The ctype of its result.
        library: Where the library is.
    """
    if _is_outdated(library):
        return None
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


@functools.cache
def _is_outdated(library: Path) -> bool:
    """Return whether a library was compiled from another source than the present one.

    In a tree of sources the functions' arguments may have changed since. A wheel has no
    source, and its library is of its own version.
    """
    source = library.with_suffix(".c")
    if not (source.exists() and library.exists()):
        return False
    try:
        stamp = ctypes.c_uint32.in_dll(ctypes.CDLL(str(library)), "kvwire_source").value
    except (OSError, ValueError):
        stamp = None
    if stamp == zlib.crc32(source.read_bytes()):
        return False
    warnings.warn(
        f"{library.name} was compiled from another {source.name} and is not used, so "
        f"copies are slower; install kvwire again: pip install --editable .",
        RuntimeWarning,
        stacklevel=2,
    )
    return True
