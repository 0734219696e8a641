"""Addresses that are sent to peers for dialling, checked on both sides.

A process that listens on all interfaces, or behind an address translation, has to
advertise a different address. A wrong address fails late and in another process: a peer
that dials ``0.0.0.0`` reaches itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re

from kvwire.aio import look_up
from kvwire.errors import UsageError, not_looked_up
from kvwire.types import Address

logger: logging.Logger = logging.getLogger("kvwire.connections")

# Letters of any language, and underscores, as in Docker's names.
_NAME = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")
# Texts that resolvers accept as IPv4 addresses, such as 0x0 for 0.0.0.0.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)
_PORT_MAX = 65_535
# A healthy resolver answers within this time, and a start must not wait longer.
_LOOK_UP_S = 2.0


def check_dialable(address: Address) -> None:
    """Refuse an address that other processes cannot dial.

    Raises:
        UsageError: It means every interface, several hosts or no host, or has no port.
    """
    if address.scheme == "inproc" or address.host.startswith("/"):
        return
    why = _why_not(address.host)
    if not why and not 1 <= address.port <= _PORT_MAX:
        why = f"its port is {address.port}; use 1 to {_PORT_MAX}"
    if why:
        raise UsageError(f"nobody can dial {address}: {why}")


def read_advertised(text: str) -> Address:
    """Parse ``host``, ``host:port`` or an IPv6 address, each also after ``tcp://``.

    Returns:
        The address; the port is 0 if the text has no port.

    Raises:
        UsageError: The text is not an address.
    """
    rest = text.removeprefix("tcp://")
    if "://" in rest:
        return Address.parse(text)
    bare = rest[1:-1] if rest.startswith("[") and rest.endswith("]") else rest
    if _ip(bare) is not None or ":" not in rest:
        return Address("tcp", bare)
    return Address.parse(f"tcp://{rest}")


async def warn_of_unknown_name(address: Address) -> None:
    """Log a warning if this host cannot resolve an advertised name.

    This is not an error: perhaps only other hosts can resolve the name, or this host
    can do so a little later.

    Cancel safety: safe.
    """
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            await look_up(address.host, address.port)
    except OSError as exc:
        logger.warning(
            "the announced address is %s, but this host cannot resolve that name: %s",
            address,
            exc.strerror or not_looked_up(address.host, _LOOK_UP_S),
        )


def _why_not(host: str) -> str:
    """Return why a host cannot be dialled, or ""."""
    ip = _ip(host)
    if ip is None:
        last = host.rstrip(".").rpartition(".")[2]
        if not _NAME.fullmatch(host) or _NUMBER.fullmatch(last):
            return f"{host!r} is neither an address nor a host name"
        return ""
    plain = getattr(ip, "ipv4_mapped", None) or ip
    if plain.is_unspecified:
        return "it means every interface of the host that dials it"
    if plain.is_multicast or str(plain) == "255.255.255.255":
        return "it is a multicast or broadcast address"
    if ip.version == 6 and ip.is_link_local and not ip.scope_id:
        return f"it is valid on one link only; add the link, such as {host}%eth0"
    return ""


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
