"""The compiled functions of ``_copy.c``, if kvwire was installed with a C compiler.

The library does not use Python's API. It is loaded twice, once with functions that keep
the GIL and once with functions that release it. If the library is missing or belongs to
another version, the callers do the same work in Python.
"""

from __future__ import annotations

import ctypes
import functools
import sys
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
        library: The library's path.
    """
    # Nothing here has run on a big-endian machine, where the functions' records would
    # have other bytes.
    if sys.byteorder != "little" or _is_outdated(library):
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

    In a source tree, the functions' arguments may have changed since it was compiled. A
    wheel contains no source, and its library always has the right version.
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
