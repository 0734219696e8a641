"""Permits a peer to read this process, if the Yama security module restricts that.

With ``kernel.yama.ptrace_scope = 1``, the default on Debian and Ubuntu, a process can
read another process of the same user only if that process has named it with
``prctl(PR_SET_PTRACER, pid)``. This permits more than reading: a process that may trace
another one controls it. Also, only one process can be named. Therefore:

* By default one peer process at a time is named: the first one, for as long as it has a
  lane. Lanes of further peers use arenas, which need no permission; the transport
  report mentions it.
* With the setting ``tracer=none``, no process is ever named.

With scope 0 no permission is needed; with scopes 2 and 3 naming has no effect.

https://docs.kernel.org/admin-guide/LSM/Yama.html
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

SCOPE_FILE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER: Final = 0x59616D61
_SCOPE_NAMED: Final = 1

CHOICES: Final = ("one", "none")


class TracerSlot:
    """The single tracer that the kernel lets this process name."""

    def __init__(
        self, name: Callable[[int], bool], scope_file: Path = SCOPE_FILE
    ) -> None:
        self._name = name
        self._scope_file = scope_file
        # The number of lanes of each named peer process; at most one process is named.
        self._named: Counter[int] = Counter()

    @property
    def scope(self) -> int | None:
        """Return ``kernel.yama.ptrace_scope``; None if Yama is not active."""
        try:
            return int(self._scope_file.read_text())
        except (OSError, ValueError):
            return None

    def permit(self, pid: int) -> bool:
        """Let a peer process read this one; return whether it is named now.

        Each success has to be undone by one call of :meth:`withdraw`.
        """
        if self.scope != _SCOPE_NAMED or pid < 1:
            return False
        if self._named and pid not in self._named:
            return False
        if not self._named and not self._name(pid):
            return False
        self._named[pid] += 1  # bounded: LANES_MAX for each connection
        return True

    def withdraw(self, pid: int) -> None:
        """End one lane's permission; the last lane's end clears the tracer."""
        self._named[pid] -= 1
        if self._named[pid] < 1:
            del self._named[pid]
            self._name(0)


@functools.cache
def tracers() -> TracerSlot:
    """Return the tracer slot of this process."""
    return TracerSlot(_prctl)


def _prctl(pid: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    return int(libc.prctl(_PR_SET_PTRACER, pid, 0, 0, 0)) == 0
