"""Turns off TCP pacing for a library's own connections within this host.

Within one host nothing is congested, so pacing only adds timers and bursts. If BBR is
the host's default, pacing halves the rate of bulk data. UCX has no setting for that.
But it waits with epolls, and the kernel lists the sockets that an epoll watches
(proc_pid_fdinfo(5)).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

# Every Linux has this algorithm, and allows every user to choose it (tcp(7)).
SAME_HOST_CONGESTION: Final = b"reno"
_DESCRIPTORS: Final = Path("/proc/self/fd")
_DETAILS: Final = Path("/proc/self/fdinfo")
_WATCHED: Final = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
_EPOLL: Final = "anon_inode:[eventpoll]"
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


def unpace(epolls: Iterable[int]) -> int:
    """Turn off pacing for connections within this host; return their number.

    Args:
        epolls: Descriptors of epolls that watch the connections, directly or through
            further epolls.
    """
    return sum(map(_unpaced, _watched(epolls)))


def open_epolls() -> frozenset[int]:
    """Return this process's descriptors that are epolls."""
    try:
        found = [int(path.name) for path in _DESCRIPTORS.iterdir()]
    except OSError:  # not Linux
        return frozenset()
    return frozenset(fd for fd in found if _kind(fd) == _EPOLL)


def _watched(epolls: Iterable[int]) -> Iterator[int]:
    """Yield the sockets that epolls watch, directly or through further epolls."""
    left = list(epolls)
    seen = set(left)
    while left:
        try:
            text = (_DETAILS / str(left.pop())).read_text(encoding="ascii")
        except OSError:  # not Linux, or closed meanwhile
            continue
        for fd in set(map(int, _WATCHED.findall(text))) - seen:
            seen.add(fd)
            kind = _kind(fd)
            if kind == _EPOLL:
                left.append(fd)
            elif kind.startswith("socket:"):
                yield fd


def _kind(fd: int) -> str:
    with contextlib.suppress(OSError):
        return str((_DESCRIPTORS / str(fd)).readlink())
    return ""  # closed meanwhile


def _unpaced(fd: int) -> bool:
    """Turn off pacing on a connection within this host; return whether it is one."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in _FAMILIES or sock.type != socket.SOCK_STREAM:
            return False
        if sock.getpeername()[0] != sock.getsockname()[0]:
            return False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, SAME_HOST_CONGESTION)
        return True
    return False
