"""Facts about UCX on this machine, for the transport report and ``kvwire doctor``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvwire.backend import Availability, Finding
from kvwire.errors import BackendUnavailable
from kvwire_ucx.context import Context, Resource
from kvwire_ucx.library import MACHINE, Machine, UcxLibrary, copies, load, remedy
from kvwire_ucx.locked import UNLIMITED, lock_limit

_BEFORE_TCP: Final = 20
_BEHIND_TCP: Final = 40
_PTRACE_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
# Registering memory with a network card locks it in physical memory.
_MEMLOCK_BYTES_MIN: Final = 1 << 30


@functools.cache
def probed() -> tuple[tuple[Resource, ...], bool]:
    """Return the resources of a default context, and whether UCX was built with RDMA.

    Cached for the process, because devices rarely change and the query takes 10 ms.
    """
    context = Context({})
    try:
        return context.resources, context.knows_rdma
    finally:
        context.close()


@functools.cache
def availability(machine: Machine = MACHINE) -> Availability:
    """Return whether UCX can run here.

    Cached for the process, because every handshake calls it; without the cache a
    handshake took a tenth longer.
    """
    try:
        library = load(machine)
    except BackendUnavailable as exc:
        return Availability(available=False, reason=str(exc), remedy=remedy())
    return Availability(
        available=True, reason=_summary(library, machine.rdma_devices())
    )


def rank(machine: Machine = MACHINE) -> int:
    """Return the backend's rank, for users without a preference."""
    devices = machine.rdma_devices()
    try:
        return rank_with(load(machine), devices) if devices else _BEHIND_TCP
    except BackendUnavailable:
        return _BEHIND_TCP


def rank_with(library: UcxLibrary, devices: Sequence[str]) -> int:
    """Return the rank of a UCX on a machine with these RDMA devices."""
    return _BEFORE_TCP if devices and library.has_rdma else _BEHIND_TCP


def _summary(library: UcxLibrary, devices: Sequence[str]) -> str:
    """Return one line about UCX, without querying its devices."""
    if not library.has_rdma:
        rdma = "built without RDMA"
    elif devices:
        rdma = f"with RDMA; the kernel knows {', '.join(devices)}"
    else:
        rdma = "with RDMA, but this machine has no RDMA device"
    return f"UCX {library.version}, {rdma} ({library.path})"


def findings(machine: Machine = MACHINE) -> tuple[Finding, ...]:
    """Return the findings about UCX for `kvwire doctor`."""
    devices = machine.rdma_devices()
    try:
        load(machine)
        return tuple(_findings(devices))
    except BackendUnavailable as exc:
        return (
            Finding(name="libucp", state="missing", text=str(exc), remedy=remedy()),
            *_rdma_without(devices),
        )


def _findings(devices: Sequence[str]) -> Iterator[Finding]:
    yield _copies(copies())
    resources, knows_rdma = probed()
    found = ", ".join(map(str, resources))
    yield Finding(name="UCX transports", state="ok", text=found)
    yield _rdma(resources, knows_rdma, devices)
    yield _windows(resources)
    if not any(r.transport == "cma" for r in resources):
        yield _no_cma()
    if any(r.is_rdma for r in resources):
        yield _memlock()


def _copies(loaded: Iterable[str]) -> Finding:
    library = load()
    here = f"UCX {library.version}, {library.path}"
    others = [path for path in loaded if not Path(path).samefile(library.path)]
    if not others:
        return Finding(name="libucp", state="ok", text=here)
    return Finding(
        name="libucp",
        state="warn",
        text=f"{here}; and another copy in this process: {', '.join(others)}",
        remedy="both patch malloc and mmap: use one, or set UCX_MEM_EVENTS=n",
    )


def _rdma(
    resources: tuple[Resource, ...], knows_rdma: bool, kernel_has: Sequence[str]
) -> Finding:
    devices = ", ".join(kernel_has)
    usable = ", ".join(str(r) for r in resources if r.is_rdma)
    if usable:
        return Finding(name="RDMA", state="ok", text=f"UCX uses {usable}")
    if not devices:
        text = "this machine has no RDMA device"
        return Finding(name="RDMA", state="ok", text=text)
    why = "cannot use it" if knows_rdma else "was built without RDMA"
    return Finding(
        name="RDMA",
        state="warn",
        text=f"this machine has {devices}, and this UCX {why}",
        remedy=remedy(),
    )


def _windows(resources: tuple[Resource, ...]) -> Finding:
    direct = ", ".join(str(r) for r in resources if r.is_rdma or r.transport == "cma")
    return Finding(
        name="UCX windows",
        state="ok",
        text=f'if one_sided_windows is "peers" on both sides, peers read windows with '
        f"{direct or 'messages'}",
    )


def _rdma_without(devices: Sequence[str]) -> tuple[Finding, ...]:
    if not devices:
        return ()
    text = f"this machine has {', '.join(devices)}, but no UCX to use it"
    return (Finding(name="RDMA", state="warn", text=text, remedy=remedy()),)


def _no_cma() -> Finding:
    try:
        scope = _PTRACE_SCOPE.read_text(encoding="utf-8").strip()
    except OSError:
        scope = "unknown"
    return Finding(
        name="UCX same host",
        state="warn",
        text=f"UCX has no cma here (ptrace scope {scope}), and copies twice instead",
        remedy="sysctl kernel.yama.ptrace_scope=0, or in a container CAP_SYS_PTRACE",
    )


def _memlock() -> Finding:
    limit = lock_limit()
    enough = limit == UNLIMITED or limit >= _MEMLOCK_BYTES_MIN
    shown = "unlimited" if limit == UNLIMITED else f"{limit >> 20} MiB"
    return Finding(
        name="memlock",
        state="ok" if enough else "warn",
        text=f"{shown} of memory may be locked, which RDMA does with registered memory",
        remedy="" if enough else "ulimit -l unlimited",
    )
