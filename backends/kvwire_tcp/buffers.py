"""How much the kernel keeps in flight for one connection, for ``kvwire doctor``.

kvwire leaves socket buffers to the kernel's autotuning, so the ends of its range count:
the third number of ``net.ipv4.tcp_rmem`` and ``tcp_wmem``. A sender that waits for
acknowledgements moves at most one such buffer per round trip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvwire.backend import Finding
from kvwire.limits import MIB

# Linux's own default for sending; 33 Gbit/s at a round trip of 1 ms. Below it somebody
# has turned it down.
_BYTES_MIN: Final = 4 * MIB
# Between hosts of one data centre it is at most this.
_ROUND_TRIP_S: Final = 1e-3


def findings(root: Path = Path("/")) -> tuple[Finding, ...]:
    """Return what the kernel allows to receive and to send."""
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
            text=f"stays at {_said(usual)}: autotuning is off",
            remedy="sysctl net.ipv4.tcp_moderate_rcvbuf=1",
        )
    if most < _BYTES_MIN:
        return Finding(
            name=name,
            state="warn",
            text=f"at most {_said(most)}",
            remedy=f'sysctl net.ipv4.{key}="{low} {usual} {8 * _BYTES_MIN}"',
        )
    return Finding(name=name, state="ok", text=f"up to {_said(most)}")


def _said(count: int) -> str:
    rate = count * 8 / _ROUND_TRIP_S / 1e9
    return f"{count / MIB:.3g} MiB, {rate:.3g} Gbit/s at a round trip of 1 ms"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
