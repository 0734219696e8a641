"""Plain TCP connections within this host."""

from __future__ import annotations

import socket


def tcp_sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of one connection: who connected, and who accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return near, far
