"""Where the proxy listens: names, addresses of both families, all interfaces."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvwire.errors import ListenError
from kvwire_vllm.proxy.listening import listen


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV6 = has_ipv6()
NEEDS_IPV6 = pytest.mark.skipif(not IPV6, reason="this host has no ::1")
BOTH = ["127.0.0.1", "::1"]


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    sockets: list[socket.socket] = []
    yield sockets
    for sock in sockets:
        sock.close()


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        pytest.param("::1", ["::1"], marks=NEEDS_IPV6),
        pytest.param("[::1]", ["::1"], marks=NEEDS_IPV6),
        ("::", BOTH if IPV6 else BOTH[:1]),
        ("[::]", BOTH if IPV6 else BOTH[:1]),
    ],
)
def test_where_it_is_reached(
    host: str, reached: list[str], opened: list[socket.socket]
) -> None:
    opened += listen(host, 0)
    (port,) = {sock.getsockname()[1] for sock in opened}
    assert [one for one in BOTH if answers(one, port)] == reached


def test_an_address_that_this_host_does_not_have_is_left_out(
    monkeypatch: pytest.MonkeyPatch, opened: list[socket.socket]
) -> None:
    """As in containers: ::1 is in /etc/hosts, and IPv6 is off."""

    class WithoutIPv6(socket.socket):
        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    found = [
        (family, socket.SOCK_STREAM, 6, "", address)
        for family, address in (
            (socket.AF_INET6, ("::1", 0, 0, 0)),
            (socket.AF_INET, ("127.0.0.1", 0)),
        )
    ]
    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    opened += listen("::", 0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    opened += listen("localhost", 0)
    hosts = [sock.getsockname()[0] for sock in opened]
    assert hosts == ["0.0.0.0", "127.0.0.1"]
    found.pop()
    with pytest.raises(ListenError, match="Cannot assign requested address"):
        listen("localhost", 0)


def test_a_port_that_is_taken(opened: list[socket.socket]) -> None:
    opened += listen("127.0.0.1", 0)
    port = opened[0].getsockname()[1]
    with pytest.raises(
        ListenError, match=rf"--host 0.0.0.0 --port {port}: Address already"
    ):
        listen("0.0.0.0", port)


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(ListenError, match=r"--host nobody\.invalid --port 0"):
        listen("nobody.invalid", 0)
