"""How much memory this process's container may use: the limit of its control group.

A control group that uses more than its limit is killed, without an error that a program
could show. So a size above the limit is compared with it before it is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kvwire.types import in_bytes

# Version 1 has no word for "unlimited", but a number just below 2**63.
_UNLIMITED_BYTES = 1 << 62
_FILES = ("memory.max", "memory.limit_in_bytes")


class MemoryLimit(NamedTuple):
    """The lowest limit among a process's control group and those above it.

    Attributes:
        nbytes: The limit in bytes.
        path: The file that has it.
    """

    nbytes: int
    path: Path

    def __str__(self) -> str:
        return f"{in_bytes(self.nbytes)} ({self.path})"


def memory_limit(
    root: Path = Path("/"), process: Path = Path("/proc/self")
) -> MemoryLimit | None:
    """Return the limit of a process's memory, or None if there is none.

    Args:
        root: The folder with ``sys/fs/cgroup``.
        process: The process's folder in ``/proc``.
    """
    found: MemoryLimit | None = None
    for folder in _folders(root / "sys/fs/cgroup", process):
        for name in _FILES:
            try:
                text = (folder / name).read_text().strip()
            except OSError:  # another version, or no right to read it
                continue
            nbytes = int(text) if text.isdecimal() else _UNLIMITED_BYTES
            if nbytes < _UNLIMITED_BYTES and (found is None or nbytes < found.nbytes):
                found = MemoryLimit(nbytes, folder / name)
    return found


def resident_bytes() -> int:
    """Return the memory that this process uses now; 0 if that is not reported."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _folders(mounted: Path, process: Path) -> list[Path]:
    """Return the folder of each control group of a process, parents included."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return []
    folders: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 2 is mounted at the top, or beside the controllers of version 1.
        tops = [mounted / "memory"] if controllers else [mounted, mounted / "unified"]
        for top in tops:
            folder = top / path.strip("/")
            # Where only a part of the tree is mounted, as in a container, the top is
            # the process's own group, whatever its path is.
            folders += [one for one in (folder, *folder.parents) if _is_in(one, top)]
    return folders


def _is_in(folder: Path, top: Path) -> bool:
    return folder == top or top in folder.parents
