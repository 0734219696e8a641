"""The TCP sockets of a worker, for what UCX has no setting for: congestion control.

Within one host nothing is congested, and pacing is only timers and small bursts. Where
BBR is the default of the host it costs bulk half of its rate. UCX makes the sockets
itself and gives them to nobody; but its event descriptor is an epoll, and the kernel
says what that watches (proc_pid_fdinfo(5)).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Every Linux has this one, and lets everybody choose it (tcp(7)).
SAME_HOST_CONGESTION: Final = b"reno"
_DESCRIPTORS: Final = Path("/proc/self/fd")
_DETAILS: Final = Path("/proc/self/fdinfo")
_WATCHED: Final = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
_EPOLL: Final = "anon_inode:[eventpoll]"
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


def unpace(event_fd: int) -> int:
    """Take pacing from a worker's connections within this host; return how many."""
    return sum(map(_unpaced, _watched(event_fd)))


def _watched(event_fd: int) -> Iterator[int]:
    """Return what an epoll watches, through the epolls that it watches."""
    left, seen = [event_fd], {event_fd}
    while left:
        try:
            text = (_DETAILS / str(left.pop())).read_text(encoding="ascii")
        except OSError:  # no Linux, or closed meanwhile
            continue
        for fd in set(map(int, _WATCHED.findall(text))) - seen:
            seen.add(fd)
            with contextlib.suppress(OSError):
                kind = str((_DESCRIPTORS / str(fd)).readlink())
                if kind == _EPOLL:
                    left.append(fd)
                elif kind.startswith("socket:"):
                    yield fd


def _unpaced(fd: int) -> bool:
    """Send without pacing on a connection within this host; tell whether it is one."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in _FAMILIES or sock.type != socket.SOCK_STREAM:
            return False
        if sock.getpeername()[0] != sock.getsockname()[0]:
            return False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, SAME_HOST_CONGESTION)
        return True
    return False
