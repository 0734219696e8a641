"""What of this machine decides how `local` reads: for ``kvwire doctor``."""

from __future__ import annotations

import os

from kvwire.backend import Finding
from kvwire.memory import cma
from kvwire.memory.arena import Arena
from kvwire.memory.iovec import address_of
from kvwire_local.tracer_slot import tracers

_REMEDY = "use arenas: docs/howto/same-host.md"
# What `kernel.yama.ptrace_scope` means for a peer of the same user.
_OPEN = {
    0: "peers of this user may read this process",
    1: "one peer process at a time may read this one; others use arenas",
}
_CLOSED = {
    2: "only a process with CAP_SYS_PTRACE may read another; arenas are used",
    3: "no process may read another; arenas are used",
}


def findings() -> tuple[Finding, ...]:
    """Return the kernel's permissions, and whether both methods work here."""
    return (_scope(), _reads(), _arenas())


def _scope() -> Finding:
    scope = tracers().scope
    if scope is None:
        return _ok("ptrace scope", "not restricted: Yama is not at work")
    if scope in _OPEN:
        return _ok("ptrace scope", f"{scope}: {_OPEN[scope]}")
    text = _CLOSED.get(scope, "not known to this version")
    return _slower("ptrace scope", f"{scope}: {text}")


def _reads() -> Finding:
    found = bytes(range(16))
    try:
        same = cma.read_bytes(os.getpid(), address_of(found), len(found)) == found
    except (OSError, AttributeError) as exc:
        reason = cma.reason(exc) if isinstance(exc, OSError) else str(exc)
        return _slower("process_vm_readv", reason)
    assert same, "the kernel has read other bytes than those that are there"
    return _ok("process_vm_readv", "permitted within this process")


def _arenas() -> Finding:
    try:
        Arena(1).close()
    except OSError as exc:
        text = f"no sealed shared memory: {exc}; Linux 5.1 or newer is needed"
        return Finding(name="arenas", state="missing", text=text)
    return _ok("arenas", "memory can be shared by descriptor")


def _ok(name: str, text: str) -> Finding:
    return Finding(name=name, state="ok", text=text)


def _slower(name: str, text: str) -> Finding:
    return Finding(name=name, state="warn", text=text, remedy=_REMEDY)
