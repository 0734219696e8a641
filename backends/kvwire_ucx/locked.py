"""How much memory this process may lock, as RDMA does with all that a card reaches."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path
from typing import Final

from kvwire.limits import KIB, MIB

# What one worker's buffers take: 20 MiB of UD's with 1.13, and RC's.
LOCKED_BYTES_MIN: Final = 64 * MIB
UNLIMITED: Final = resource.RLIM_INFINITY
_STATUS: Final = Path("/proc/self/status")
_MAP_LOCKED: Final = 0x2000  # of Linux; Python has no name for it


def lock_limit() -> int:
    """Return how many bytes this process may lock, or UNLIMITED.

    CAP_IPC_LOCK lifts the limit in the first user namespace only, and root of a
    rootless container has it in another one. A security module may deny it as well. So
    the kernel is asked: one page more than the limit is locked, without access to it,
    which takes no memory.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == UNLIMITED:
        return UNLIMITED
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_LOCKED
    try:
        mmap.mmap(-1, limit + mmap.PAGESIZE, flags=flags, prot=0).close()
    except (OSError, OverflowError):
        return limit
    return UNLIMITED


def pinned_bytes() -> int:
    """Return how many bytes of this process RDMA has locked."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1]) * KIB
    return 0


def too_little_to_lock(limit: int, pinned: int) -> str:
    """Return what is wrong if RDMA may not lock the buffers of one more worker.

    Args:
        limit: How many bytes this process may lock, or UNLIMITED.
        pinned: How many of them it has locked already.
    """
    if limit == UNLIMITED or limit - pinned >= LOCKED_BYTES_MIN:
        return ""
    return (
        f"RDMA locks memory, and this process may lock {limit // KIB} KiB, of which "
        f"{pinned // KIB} KiB are in use; UCX needs {LOCKED_BYTES_MIN // MIB} MiB for "
        "each lane: raise `ulimit -l`, best to unlimited"
    )
