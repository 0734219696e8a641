"""Socket options of every link and lane, each with its reason.

SO_SNDBUF and SO_RCVBUF are left alone on purpose: setting either disables the kernel's
autotuning, which reaches larger sizes than can be set (on Linux ``rmem_max`` is
commonly 4 MiB, while ``tcp_rmem`` goes up to 32).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Final

from kvwire.backend import Finding
from kvwire.limits import MIB
from kvwire.types import Address, is_loopback, numeric_host

# The core checks liveness: it pings, and makes allowance for its own stalls. The
# kernel's probes are for links whose core is gone or stuck, and must never give up
# first. So a dead host is probed every second, and given up after the time below.
KEEPALIVE_IDLE_S: Final = 1
KEEPALIVE_INTERVAL_S: Final = 1
# Used on macOS only; on Linux TCP_USER_TIMEOUT replaces it (tcp(7)).
KEEPALIVE_COUNT: Final = 3
# Five times the liveness period of 6 s. It also ends a link whose peer is alive but has
# read nothing for this long. The common value of 3 s would kill healthy peers that wait
# for a GPU.
USER_TIMEOUT_MS: Final = 30_000
# A control frame overtakes bulk data that waits in this process, but not unsent data in
# the kernel. Measured on loopback with 1 MiB frames: 512 KiB costs 15 % of the rate and
# a third more CPU time at the sender; 1 MiB costs nothing.
NOTSENT_LOWAT_BYTES: Final = 1 * MIB

# On loopback nothing is congested, and pacing only adds timers and small bursts: if BBR
# is the host's default, one stream runs at 0.55 of its rate without pacing. Every Linux
# has this algorithm, and allows every user to choose it (tcp(7)).
LOOPBACK_CONGESTION: Final = b"reno"

_TCP = socket.IPPROTO_TCP
# macOS has another name for the idle time; options that a platform lacks are skipped.
_IDLE_OPTION = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
_OPTIONS: Final = (
    # A small frame must not wait for the acknowledgement of the previous one.
    (_TCP, "TCP_NODELAY", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (_TCP, _IDLE_OPTION, KEEPALIVE_IDLE_S),
    (_TCP, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
    (_TCP, "TCP_KEEPCNT", KEEPALIVE_COUNT),
    (_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    (_TCP, "TCP_NOTSENT_LOWAT", NOTSENT_LOWAT_BYTES),
)
# The struct `linger`: on, 0 seconds.
_LINGER_NONE: Final = struct.pack("ii", 1, 0)


def tune(sock: socket.socket, host: str) -> None:
    """Set the options of a link on a connected, or connecting, socket."""
    sock.setblocking(False)
    for level, name, value in _OPTIONS:
        if hasattr(socket, name):
            sock.setsockopt(level, getattr(socket, name), value)
    if hasattr(socket, "TCP_CONGESTION") and is_loopback(host):
        # An administrator may forbid it (tcp_allowed_congestion_control).
        with contextlib.suppress(PermissionError, FileNotFoundError):
            sock.setsockopt(_TCP, socket.TCP_CONGESTION, LOOPBACK_CONGESTION)


def reset_on_close(sock: socket.socket) -> None:
    """Make ``close`` send RST and drop unsent data, so the peer notices at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)


def address_from(sockaddr: tuple[Any, ...]) -> Address:
    """Return the address in a socket address of IPv4 or IPv6."""
    return Address("tcp", numeric_host(sockaddr), sockaddr[1])


# --- data that the kernel keeps in flight per connection, for `kvwire doctor` ---------

# The upper limits of autotuning matter: the third numbers of `net.ipv4.tcp_rmem` and
# `tcp_wmem`. A sender that waits for acknowledgements moves at most one such buffer per
# round trip.

# Linux's own default for sending; 33 Gbit/s at a round trip of 1 ms. If the limit is
# lower, it was lowered on purpose.
_BYTES_MIN: Final = 4 * MIB
# An upper bound between hosts of one data centre.
_ROUND_TRIP_S: Final = 1e-3


def findings(root: Path = Path("/")) -> tuple[Finding, ...]:
    """Return the kernel's limits for receiving and sending."""
    settings = root / "proc/sys/net/ipv4"
    tuned = _text(settings / "tcp_moderate_rcvbuf") != "0"
    return tuple(
        found
        for found in (
            _finding("receive buffer", "tcp_rmem", settings, tuned),
            _finding("send buffer", "tcp_wmem", settings, True),
        )
        if found is not None
    )


def _finding(name: str, key: str, settings: Path, tuned: bool) -> Finding | None:
    numbers = _text(settings / key).split()
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return None  # not Linux
    low, usual, most = map(int, numbers)
    if not tuned:
        return Finding(
            name=name,
            state="warn",
            text=f"stays at {_size_and_rate(usual)}: autotuning is off",
            remedy="sysctl net.ipv4.tcp_moderate_rcvbuf=1",
        )
    if most < _BYTES_MIN:
        return Finding(
            name=name,
            state="warn",
            text=f"at most {_size_and_rate(most)}",
            remedy=f'sysctl net.ipv4.{key}="{low} {usual} {8 * _BYTES_MIN}"',
        )
    return Finding(name=name, state="ok", text=f"up to {_size_and_rate(most)}")


def _size_and_rate(count: int) -> str:
    rate = count * 8 / _ROUND_TRIP_S / 1e9
    return f"{count / MIB:.3g} MiB, {rate:.3g} Gbit/s at a round trip of 1 ms"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
