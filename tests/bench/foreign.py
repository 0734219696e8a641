"""Calls of C functions through ctypes, made visible to ``cProfile``.

A profiler of Python sees the functions of extension modules, but not those that ctypes
calls: their time would be that of whoever calls them. So each gets a Python function
around it that has its name.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

# The file that these functions say they are from.
WHERE: Final = "<ctypes>"


class _Library(Protocol):
    _FuncPtr: type[Any]


def name_calls() -> None:
    """From now on, whatever is looked up in a library has a name in a profile.

    For a process that is there to be profiled: it is not undone.
    """
    ctypes.CDLL.__getitem__ = _look_up  # type: ignore[method-assign]


def _look_up(self: _Library, name_or_ordinal: Any) -> Any:
    """In place of ``CDLL.__getitem__``."""
    base = self._FuncPtr

    def call(self: Any, *arguments: Any) -> Any:
        return base.__call__(self, *arguments)

    name = str(name_or_ordinal)
    call.__code__ = call.__code__.replace(co_name=name, co_filename=WHERE)
    members = {
        "__call__": call,
        "_flags_": base._flags_,
        "_restype_": base._restype_,
    }
    function = type(name, (base,), members)((name_or_ordinal, self))
    if not isinstance(name_or_ordinal, int):
        function.__name__ = name_or_ordinal
    return function
