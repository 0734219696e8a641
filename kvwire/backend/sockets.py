"""Listening sockets: an address means the same to every listener of kvwire."""

from __future__ import annotations

import errno
import socket
from typing import Any, Final

EVERYWHERE: Final = "::"
"""The host that stands for all interfaces of both families, as far as there are any."""

# A host without IPv6, or without this address.
NOT_OF_THIS_HOST: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listening_socket(
    family: int, sockaddr: tuple[Any, ...], backlog: int
) -> socket.socket:
    """Listen on an address; ``::`` stands for all interfaces of IPv6 and IPv4.

    Every listener of kvwire is made here, so that an address means the same for all. On
    a host without IPv6 ``::`` means all interfaces of IPv4.

    Raises:
        OSError: It cannot listen there.
    """
    everywhere = sockaddr[0] == EVERYWHERE
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A restart must not wait for its predecessor's connections to expire.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not everywhere)
            sock.bind(sockaddr)
            sock.listen(backlog)
        except BaseException:
            sock.close()
            raise
    except OSError as exc:
        if not everywhere or exc.errno not in NOT_OF_THIS_HOST:
            raise
        return listening_socket(socket.AF_INET, ("0.0.0.0", sockaddr[1]), backlog)  # noqa: S104
    return sock
