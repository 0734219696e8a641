"""The options of a link's socket, as the kernel has them."""

from __future__ import annotations

import socket

import pytest

from kvwire_tcp import options
from kvwire_tcp.options import reset_on_close, tune
from tests.backends.kvwire_tcp.recorder import linked

EXPECTED = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": options.KEEPALIVE_IDLE_S,
    "TCP_KEEPINTVL": options.KEEPALIVE_INTERVAL_S,
    "TCP_KEEPCNT": options.KEEPALIVE_COUNT,
    "TCP_USER_TIMEOUT": options.USER_TIMEOUT_MS,
    "TCP_NOTSENT_LOWAT": options.NOTSENT_LOWAT_BYTES,
}


async def test_both_ends_have_the_options() -> None:
    async with linked() as pair:
        for link in (pair.near, pair.far):
            sock = link._sock
            assert not sock.getblocking()
            assert not sock.get_inheritable()
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for name, value in EXPECTED.items():
                if hasattr(socket, name):
                    option = getattr(socket, name)
                    assert sock.getsockopt(socket.IPPROTO_TCP, option) == value, name


@pytest.mark.parametrize("name", [n for n in EXPECTED if hasattr(socket, n)])
def test_an_option_that_the_platform_lacks_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = getattr(socket, name)
    with socket.socket() as sock:
        before = sock.getsockopt(socket.IPPROTO_TCP, option)
        monkeypatch.delattr(socket, name)
        tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, option) == before
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_reset_on_close_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        reset_on_close(client)
        client.close()
        with accepted, pytest.raises(ConnectionResetError):
            accepted.recv(1)
