"""The sockets of a server: an address, a name, or all interfaces."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any, Final

from kvwire.errors import ListenError

EVERYWHERE: Final = "*"
"""The spelling of all interfaces: of IPv4 and of IPv6, whichever this host has."""

_BACKLOG: Final = 1024
_NOT_OF_THIS_HOST: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# A free port of one address may be taken at another one.
_PORTS_TRIED: Final = 8


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen at all addresses of a host, at one port.

    Args:
        host: A numeric address, with or without brackets; a name; or ``*``. Of the
            addresses behind a name, those that this host does not have are left out: in
            a container ``localhost`` may stand for ``::1`` too.
        port: The port; 0 for any free one.

    Raises:
        ListenError: It cannot listen there.
    """
    name = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(
            None if name == EVERYWHERE else name,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        addresses = [(family, address) for family, *_, address in dict.fromkeys(found)]
        for _ in range(_PORTS_TRIED - 1):
            try:
                return _listen_once(addresses, port)
            except OSError as exc:
                if port or exc.errno != errno.EADDRINUSE:
                    raise
        return _listen_once(addresses, port)
    except OSError as exc:
        where = f"--host {host} --port {port}"
        raise ListenError(f"cannot listen at {where}: {exc.strerror}") from None


def _listen_once(
    addresses: Sequence[tuple[socket.AddressFamily, Any]], port: int
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing = OSError(errno.EADDRNOTAVAIL, "it has no address")
    try:
        for family, address in addresses:
            try:
                sockets.append(_bound(family, (address[0], port, *address[2:])))
            except OSError as exc:
                if exc.errno not in _NOT_OF_THIS_HOST:
                    raise
                missing = exc
            else:
                port = sockets[0].getsockname()[1]
        if not sockets:
            raise missing
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bound(family: socket.AddressFamily, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has a socket of its own.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
