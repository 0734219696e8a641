"""The sockets of a server: at an address, at a name, or at all interfaces."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any, Final

from kvwire.backend.sockets import EVERYWHERE, NOT_OF_THIS_HOST, listening_socket
from kvwire.errors import ListenError

_BACKLOG: Final = 1024


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen at all addresses of a host, at one port.

    Args:
        host: A numeric address, with or without brackets, or a name. Of the addresses
            behind a name, those that this host does not have are left out: in a
            container ``localhost`` may stand for ``::1`` too.
        port: The port; 0 for any free one.

    Raises:
        ListenError: It cannot listen there.
    """
    name = host.removeprefix("[").removesuffix("]")
    sockets: list[socket.socket] = []
    with ExitStack() as undo:
        try:
            missing: OSError | None = None
            everywhere = name == EVERYWHERE
            found = socket.getaddrinfo(
                None if everywhere else name,
                port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )
            if everywhere:
                found.sort(key=lambda one: one[0] != socket.AF_INET6)
            for family, *_, address in dict.fromkeys(found):
                where: Any = (address[0], port, *address[2:])
                try:
                    sockets.append(
                        undo.enter_context(listening_socket(family, where, _BACKLOG))
                    )
                except OSError as exc:
                    if exc.errno not in NOT_OF_THIS_HOST:
                        raise
                    missing = exc
                    continue
                if everywhere:
                    break  # IPv4 is included
                port = sockets[0].getsockname()[1]
            if missing is not None and not sockets:
                raise missing
        except OSError as exc:
            where = f"--host {host} --port {port}"
            raise ListenError(f"cannot listen at {where}: {exc.strerror}") from None
        undo.pop_all()
    return sockets
