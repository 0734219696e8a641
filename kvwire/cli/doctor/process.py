"""Facts of one process, read from ``/proc``: its limits, rights, libraries, settings.

Of another process as well, such as a running engine: that one has the limits and the
libraries that count. What cannot be read, on macOS or of somebody else's process, is
None or empty, and nothing here raises for it; only a process that is not there is
refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvwire import UsageError

UNLIMITED: Final = -1
# Numbers of capabilities(7): pin more memory than the limit; trace any process.
CAP_IPC_LOCK: Final = 14
CAP_SYS_PTRACE: Final = 19
# Namespaces of the host itself have fixed numbers: PROC_PID_INIT_INO of the kernel's
# include/linux/proc_ns.h.
_PID_NAMESPACE_OF_HOST: Final = "pid:[4026531836]"
# Settings that change what a transport does. Others are none of our business, and
# what a report does not hold cannot leak from it.
_SETTINGS: Final = re.compile(
    r"UCX_\w+|NCCL_\w+|CUDA_VISIBLE_DEVICES|PYTORCH_(?:CUDA_)?ALLOC_CONF"
)
# auditwheel puts a hash between the name and the suffix: libucp-3a3c2ef6.so.0.0.0.
_LIBRARIES: Final = re.compile(r"lib(ucp|nccl)(?:-[0-9a-f]+)?\.so[\d.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What was found of a process.

    Attributes:
        pid: Its number; 0 is the doctor itself.
        locked_bytes: How much memory it may pin; UNLIMITED, or None if not known.
        files: How many descriptors it may have; likewise.
        capabilities: Its effective ones, a bit for each.
        own_pid_namespace: It is in another PID namespace than the host; None if not
            known.
        settings: Environment variables that transports and allocators read.
        libraries: Paths of the copies of libucp and libnccl that it has loaded.
    """

    pid: int = 0
    locked_bytes: int | None = None
    files: int | None = None
    capabilities: int = 0
    own_pid_namespace: bool | None = None
    settings: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def may(self, capability: int) -> bool:
        """Whether it has a capability."""
        return bool(self.capabilities >> capability & 1)


def look_at(
    pid: int = 0,
    *,
    root: Path = Path("/"),
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Read the facts of a process.

    Args:
        pid: Its number; 0 for this one.
        root: Where ``proc`` lies.
        environment: Of this process, instead of ``os.environ``. That of another one is
            read from ``proc``.

    Raises:
        UsageError: There is no such process.
    """
    folder = root / "proc" / (str(pid) if pid else "self")
    if pid and not folder.is_dir():
        has_proc = (root / "proc" / "self").is_dir()
        why = "there is no such process" if has_proc else "this system has no /proc"
        raise UsageError(f"--pid {pid}: {why}")
    limits = _text(folder / "limits")
    if pid:
        variables: Mapping[str, str] = dict(_variables(_text(folder / "environ")))
    else:
        variables = os.environ if environment is None else environment
    return Process(
        pid=pid,
        locked_bytes=_limit(limits, "Max locked memory"),
        files=_limit(limits, "Max open files"),
        capabilities=_capabilities(_text(folder / "status")),
        own_pid_namespace=_own_pid_namespace(folder / "ns" / "pid"),
        settings={k: v for k, v in variables.items() if _SETTINGS.fullmatch(k)},
        libraries=_libraries(_text(folder / "maps")),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _limit(text: str, name: str) -> int | None:
    """Read the soft limit of a row of ``/proc/PID/limits``."""
    found = re.search(rf"^{name} +(\d+|unlimited) ", text, re.MULTILINE)
    if found is None:
        return None
    return UNLIMITED if found[1] == "unlimited" else int(found[1])


def _capabilities(text: str) -> int:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return int(found[1], 16) if found else 0


def _own_pid_namespace(path: Path) -> bool | None:
    try:
        return os.readlink(path) != _PID_NAMESPACE_OF_HOST  # noqa: PTH115 - no path
    except OSError:
        return None


def _variables(text: str) -> Iterator[tuple[str, str]]:
    for entry in text.split("\0"):
        name, _, value = entry.partition("=")
        yield name, value


def _libraries(maps: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for line in maps.splitlines():
        path = line.partition("/")
        name = _LIBRARIES.fullmatch(path[2].rpartition("/")[2])
        if name:
            found.setdefault(f"lib{name[1]}", set()).add(f"/{path[2]}")
    return {name: tuple(sorted(paths)) for name, paths in sorted(found.items())}
