"""Which file system a directory lies on: a disk tier is as fast as that is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mountinfo")
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


def filesystem(directory: Path, mounts: Path = _MOUNTS) -> str:
    """Its kind and device, such as ``ext4 on /dev/vda``.

    Args:
        directory: One that exists.
        mounts: What the kernel says is mounted; see proc_pid_mountinfo(5).
    """
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "a file system that this platform does not name"
    real = directory.resolve()
    entries = filter(None, map(_entry, lines))
    around = [entry for entry in entries if real.is_relative_to(entry[0])]
    if not around:
        return "an unknown file system"
    # Backwards: of two at one place the later hides the other.
    return max(reversed(around), key=lambda entry: len(entry[0].parts))[1]


def _entry(line: str) -> tuple[Path, str] | None:
    """Where something is mounted, and what."""
    head, found, tail = line.partition(" - ")
    fields, what = head.split(), tail.split()
    if not found or len(fields) < 5 or len(what) < 2:
        return None
    return Path(_plain(fields[4])), f"{what[0]} on {_plain(what[1])}"


def _plain(text: str) -> str:
    """With blanks for their escapes."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
