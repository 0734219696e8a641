"""The options of a link's socket, as the kernel has them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvwire.backend import Finding
from kvwire.types import Address
from kvwire_tcp import TcpBackend, options
from kvwire_tcp.options import address_from, findings, tune
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


def look(root: Path, **settings: str) -> dict[str, Finding]:
    folder = root / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    for name, text in settings.items():
        (folder / name).write_text(f"{text}\n")
    return {finding.name: finding for finding in findings(root)}


def test_an_address_of_one_link_says_of_which() -> None:
    """Without it nothing leads there: EINVAL, of each lane too."""
    address = address_from(("fe80::1", 7400, 0, 2))
    assert Address.parse(str(address)) == address == Address("tcp", "fe80::1%2", 7400)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    assert found[0][4] == ("fe80::1", 7400, 0, 2)
    assert address_from(("::1", 7400, 0, 0)) == Address("tcp", "::1", 7400)


def test_the_defaults_of_linux_are_in_order(tmp_path: Path) -> None:
    found = look(
        tmp_path,
        tcp_rmem="4096\t131072\t6291456",
        tcp_wmem="4096\t16384\t4194304",
        tcp_moderate_rcvbuf="1",
    )
    assert [finding.state for finding in found.values()] == ["ok", "ok"]
    assert "4 MiB, 33.6 Gbit/s" in found["send buffer"].text


def test_a_range_that_ends_early(tmp_path: Path) -> None:
    found = look(tmp_path, tcp_rmem="4096 87380 1048576", tcp_wmem="4096 16384 8388608")
    one = found["receive buffer"]
    assert (one.state, one.remedy) == (
        "warn",
        'sysctl net.ipv4.tcp_rmem="4096 87380 33554432"',
    )
    assert "at most 1 MiB, 8.39 Gbit/s" in one.text
    assert found["send buffer"].state == "ok"


def test_autotuning_that_is_off(tmp_path: Path) -> None:
    found = look(tmp_path, tcp_rmem="4096 131072 33554432", tcp_moderate_rcvbuf="0")
    one = found["receive buffer"]
    assert (one.state, one.remedy) == ("warn", "sysctl net.ipv4.tcp_moderate_rcvbuf=1")
    assert "stays at 0.125 MiB" in one.text


@pytest.mark.parametrize("text", ["", "4096 131072", "a b c"])
def test_what_is_not_linux_has_nothing_to_say(tmp_path: Path, text: str) -> None:
    assert look(tmp_path, tcp_rmem=text) == {}


def test_the_backend_tells_the_doctor() -> None:
    assert TcpBackend.diagnose() == findings()
