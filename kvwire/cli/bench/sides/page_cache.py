"""Files without their pages in memory, so that reading them reads the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from kvwire.limits import MIB

_PAGE_BYTES: Final = 4096
# Looked at all over the file; a page or two that somebody has read again say nothing.
_SAMPLES: Final = 64
_KEPT_MAX: Final = 4
_TRIAL_BYTES: Final = 1 * MIB


def drop(path: Path) -> None:
    """Write a file to the disk, and forget its pages.

    Raises:
        RuntimeError: They stay, or nobody says whether they do.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        kept = _kept(descriptor)
    finally:
        os.close(descriptor)
    if kept > _KEPT_MAX:
        raise RuntimeError(f"{path}: {kept} of {_SAMPLES} pages stay in memory")


def can_drop(directory: Path) -> bool:
    """Whether files of a directory can be read without their pages in memory.

    A tmpfs has no other place for them, and only Linux says whether a page is there.
    """
    if not (hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")):
        return False
    with NamedTemporaryFile(dir=directory) as trial:
        trial.write(bytes(_TRIAL_BYTES))
        trial.flush()
        with contextlib.suppress(OSError, RuntimeError):
            drop(Path(trial.name))
            return True
    return False


def _kept(descriptor: int) -> int:
    """How many of some pages are in memory: those that can be read without waiting."""
    step = max(_PAGE_BYTES, os.fstat(descriptor).st_size // _SAMPLES)
    page, kept = bytearray(_PAGE_BYTES), 0
    for offset in range(0, os.fstat(descriptor).st_size, step):
        with contextlib.suppress(BlockingIOError):
            kept += bool(os.preadv(descriptor, [page], offset, os.RWF_NOWAIT))
    return kept
