"""Which sockets behind an event descriptor lose their pacing."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator

import pytest

from kvwire.backend.pacing import SAME_HOST_CONGESTION, open_epolls, unpace

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="the kernel has no TCP_CONGESTION"
)
OTHER = b"cubic"


def congestion(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        near = stack.enter_context(socket.create_connection(listener.getsockname()))
        far = stack.enter_context(listener.accept()[0])
        try:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, OTHER)
        except (FileNotFoundError, PermissionError) as exc:
            pytest.skip(f"this kernel has no {OTHER.decode()} for us: {exc.strerror}")
        yield near, far


def test_one_in_an_epoll_of_an_epoll(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    near, far = connection
    theirs = congestion(far)
    with select.epoll() as outer, select.epoll() as inner:
        inner.register(near, select.EPOLLIN)
        outer.register(inner, select.EPOLLIN)
        assert unpace([outer.fileno()]) == 1
    assert congestion(near) == SAME_HOST_CONGESTION
    assert congestion(far) == theirs  # nobody watches it
    near.sendall(b"!")  # the socket is still there
    assert far.recv(1) == b"!"


def test_what_is_no_connection_within_this_host_is_left_alone() -> None:
    with contextlib.ExitStack() as stack:
        epoll = stack.enter_context(select.epoll())
        others = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))),
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
            *map(stack.enter_context, socket.socketpair()),
        ]
        before = congestion(others[0])
        readable, writable = os.pipe()
        stack.callback(os.close, readable)
        stack.callback(os.close, writable)
        for fd in (*(other.fileno() for other in others), readable):
            epoll.register(fd, select.EPOLLIN)
        assert unpace([epoll.fileno()]) == 0
        assert congestion(others[0]) == before


def test_what_is_no_epoll_has_none() -> None:
    with socket.socket() as sock:
        assert unpace([sock.fileno(), 2**30]) == 0


def test_which_epolls_are_open() -> None:
    before = open_epolls()
    with select.epoll() as epoll, socket.socket():
        assert open_epolls() - before == {epoll.fileno()}
