"""The options of a link's socket, as the kernel has them."""

from __future__ import annotations

import socket

import pytest

from kvwire_tcp import options
from kvwire_tcp.options import tune
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
        tune(sock, "192.0.2.1")
        assert sock.getsockopt(socket.IPPROTO_TCP, option) == before
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


needs_congestion = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="this platform cannot choose"
)


def congestion(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@needs_congestion
@pytest.mark.parametrize(
    ("family", "host", "chosen"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "127.9.9.9", True),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::ffff:127.0.0.1", True),
        (socket.AF_INET, "192.0.2.1", False),
        (socket.AF_INET6, "fe80::1%eth0", False),
    ],
)
def test_congestion_control_is_chosen_on_loopback_only(
    family: socket.AddressFamily, host: str, chosen: bool
) -> None:
    with socket.socket(family) as sock:
        default = congestion(sock)
        tune(sock, host)
        expected = options.LOOPBACK_CONGESTION if chosen else default
        assert congestion(sock) == expected
