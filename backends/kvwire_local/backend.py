"""The backend ``local``: lanes between processes of one host, and no links."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import ClassVar

from kvwire.backend import (
    Availability,
    Backend,
    Capabilities,
    Finding,
)
from kvwire.backend.lane import Lane, LaneContext
from kvwire.memory import cma
from kvwire.memory.arena import Arena
from kvwire.memory.copy import address_of
from kvwire_local.lane import READ_METHODS, LocalLane
from kvwire_local.tracer_slot import CHOICES, TracerSlot, tracers


class LocalBackend(Backend):
    """Moves payload within a host: the receiver reads the sender's memory."""

    scheme: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(
        links=False, lanes=True, same_host=True
    )
    settings: ClassVar = {"way": tuple(READ_METHODS), "tracer": CHOICES}

    @classmethod
    def rank(cls) -> int:
        """Return a rank before networks and after transports within one process."""
        return 10

    @classmethod
    def availability(cls) -> Availability:
        """Return whether this system has the needed calls, allowed or not."""
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            return Availability(
                available=False,
                reason=f"needs Linux (this is {sys.platform}): no other system lets "
                "processes read lists of each other's memory in one call",
                remedy="use tcp",
            )
        return Availability(available=True, reason="process_vm_readv and memfd_create")

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        """Return the kernel's permissions for reading other processes."""
        return findings() if cls.availability().available else ()

    def open_lane(self, context: LaneContext) -> Lane:
        """Prepare a lane to a process that may or may not be on this host."""
        return LocalLane(context)


# --- for `kvwire doctor` --------------------------------------------------------------

_ok = partial(Finding, state="ok")
_slower = partial(Finding, state="warn", remedy="use arenas: docs/howto/same-host.md")
# By `kernel.yama.ptrace_scope`: the permissions of a peer process of the same user.
_OPEN = {
    0: "peers of this user may read this process",
    1: "one peer process at a time may read this one; others use arenas",
}
_CLOSED = {
    2: "only a process with CAP_SYS_PTRACE may read another; arenas are used",
    3: "no process may read another; arenas are used",
}


def findings(slot: TracerSlot | None = None) -> tuple[Finding, ...]:
    """Return the kernel's permissions, and a check of both reading methods."""
    return (_scope((slot or tracers()).scope), _reads(), _arenas())


def _scope(scope: int | None) -> Finding:
    if scope is None:
        return _ok(name="ptrace scope", text="not restricted: Yama is not active")
    if scope in _OPEN:
        return _ok(name="ptrace scope", text=f"{scope}: {_OPEN[scope]}")
    text = _CLOSED.get(scope, "a value that this version does not know")
    return _slower(name="ptrace scope", text=f"{scope}: {text}")


def _reads() -> Finding:
    found = bytes(range(16))
    try:
        same = cma.read_bytes(os.getpid(), address_of(found), len(found)) == found
    except (OSError, AttributeError) as exc:
        reason = cma.reason(exc) if isinstance(exc, OSError) else str(exc)
        return _slower(name="process_vm_readv", text=reason)
    assert same, "the kernel has read bytes that differ from those in memory"
    return _ok(name="process_vm_readv", text="permitted within this process")


def _arenas() -> Finding:
    try:
        Arena(1).close()
    except OSError as exc:
        text = f"no sealed shared memory: {exc}; Linux 5.1 or newer is needed"
        return Finding(name="arenas", state="missing", text=text)
    return _ok(name="arenas", text="memory can be shared by descriptor")
