"""Listening: on one address and no other, through floods, shortages and bad callers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvwire.backend import Link
from kvwire.errors import ConnectionLost
from kvwire.types import Address
from kvwire_tcp import TcpBackend
from kvwire_tcp import backend as backend_module
from kvwire_tcp import listener as listener_module
from kvwire_tcp.listener import ACCEPTS_PER_WAKEUP, TcpListener
from kvwire_tcp.options import tune
from kvwire_tcp.waiting import hands_shaken, sent
from kvwire_tcp.wire import PlainWire, Wire
from tests.backends.kvwire_tcp.recorder import ANYWHERE, Recorder
from tests.support.pairs import until


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no ::1 on this machine")


@needs_ipv6
async def test_an_ipv6_address_is_not_bound_for_ipv4_as_well() -> None:
    listener = await TcpBackend().listen(Address("tcp", "::1", 0), Link.abort)
    assert isinstance(listener, TcpListener)
    only = listener._sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    await listener.close()
    assert only


async def test_all_interfaces_are_those_of_both_families() -> None:
    """And a peer of IPv4 is seen at its own address."""
    accepted: list[Link] = []
    listener = await TcpBackend().listen(Address("tcp", "::", 0), accepted.append)
    hosts = ["127.0.0.1", *(["::1"] if has_ipv6() else [])]
    links = [
        await TcpBackend().connect(Address("tcp", host, listener.address.port))
        for host in hosts
    ]
    await until(lambda: len(accepted) == len(hosts))
    assert [one.host for link in accepted if (one := link.remote_address)] == hosts
    for link in links + accepted:
        link.abort()
    await listener.close()


@pytest.mark.parametrize("host", ["", "no such host", "203.0.113.1"])
async def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - each has its own number and text
        await TcpBackend().listen(Address("tcp", host, 0), Link.abort)


async def test_a_wakeup_accepts_a_share_of_a_flood() -> None:
    accepted: list[Link] = []
    listener = await TcpBackend().listen(ANYWHERE, accepted.append)
    assert isinstance(listener, TcpListener)
    where = (listener.address.host, listener.address.port)
    count = 2 * ACCEPTS_PER_WAKEUP + 1
    clients = [socket.create_connection(where) for _ in range(count)]
    shares = []
    while len(accepted) < count:
        before = len(accepted)
        listener._on_acceptable()
        shares.append(len(accepted) - before)
    assert shares == [ACCEPTS_PER_WAKEUP, ACCEPTS_PER_WAKEUP, 1]
    await listener.close()
    for link in accepted:
        link.abort()
    for client in clients:
        client.close()


async def test_an_accept_callback_may_close_the_listener() -> None:
    accepted: list[Link] = []
    listener = await TcpBackend().listen(ANYWHERE, accepted.append)
    assert isinstance(listener, TcpListener)

    def accept_one(link: Link) -> None:
        accepted.append(link)
        with contextlib.suppress(StopIteration):
            listener.close().send(None)  # never waits

    listener._accept = accept_one
    where = (listener.address.host, listener.address.port)
    with socket.create_connection(where), socket.create_connection(where):
        listener._on_acceptable()
    assert len(accepted) == 1
    accepted[0].abort()


async def test_a_connection_that_broke_in_the_backlog_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux hands such an error to accept(2); macOS refuses the options."""
    accepted: list[Link] = []
    listener = await TcpBackend().listen(ANYWHERE, accepted.append)
    assert isinstance(listener, TcpListener)
    broken = [OSError(errno.ECONNABORTED, "gone"), OSError(errno.EPROTO, "gone")]
    take, listener._sock = listener._sock, Broken(listener._sock, broken)
    where = (listener.address.host, listener.address.port)
    with socket.create_connection(where) as first, socket.create_connection(where):
        monkeypatch.setattr(
            listener_module, "tune", Once(OSError(errno.EINVAL, "gone"))
        )
        listener._on_acceptable()
        assert first.recv(1) == b""
    assert broken == []
    assert len(accepted) == 1
    accepted[0].abort()
    listener._sock = take
    await listener.close()


async def test_a_connection_reset_before_it_is_accepted_is_known_when_started() -> None:
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    listener = await TcpBackend().listen(ANYWHERE, accepted.set_result)
    with socket.create_connection(
        (listener.address.host, listener.address.port)
    ) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link, recorder = await accepted, Recorder()
    link.start(recorder)
    assert isinstance(await recorder.end(), ConnectionLost)
    await listener.close()


async def test_close_while_out_of_descriptors_tries_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = await TcpBackend().listen(ANYWHERE, Link.abort)
    assert isinstance(listener, TcpListener)
    listener._back_off(OSError(errno.EMFILE, "out of them"))
    retry = listener._retry
    assert retry is not None
    assert "out of them" in caplog.text
    await listener.close()
    assert retry.cancelled()
    assert listener._sock.fileno() == -1


class Broken(socket.socket):
    """Accepts like the socket it is made of, after some errors."""

    def __init__(self, sock: socket.socket, errors: list[OSError]) -> None:
        self._of, self._errors = sock, errors

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self._errors:
            raise self._errors.pop()
        return self._of.accept()


class Once:
    """Raises at the first call, and tunes at the others."""

    def __init__(self, error: OSError) -> None:
        self._errors = [error]

    def __call__(self, sock: socket.socket, host: str) -> None:
        if self._errors:
            raise self._errors.pop()
        tune(sock, host)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets that block nobody."""
    left, right = socket.socketpair()
    with left, right:
        for sock in (left, right):
            sock.setblocking(False)
        yield left, right


Ends = tuple[socket.socket, socket.socket]


class Narrow:
    """A wire that takes three bytes, then keeps one until the socket has room."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent = 0
        self.opened = False
        self.flushes = 0

    def send(self, data: memoryview) -> int:
        return self.sock.send(data[:3])

    def flush(self) -> None:
        self.flushes += 1
        self.unsent = 1 if self.flushes == 1 else 0
        if self.unsent:
            raise BlockingIOError

    def shake_hands(self) -> None:
        """The peer ends it before any data."""


def as_wire(wire: Any) -> Wire:
    return cast(Wire, wire)


async def test_all_is_said_and_flushed(ends: Ends) -> None:
    """What a wire has taken and the kernel has not is waited for as well."""
    wire = Narrow(ends[0])
    await sent(as_wire(wire), b"abcdefgh", asyncio.get_running_loop())
    assert ends[1].recv(99) == b"abcdefgh"
    assert (wire.flushes, wire.unsent) == (2, 0)


async def test_a_wire_that_never_opens(ends: Ends) -> None:
    with pytest.raises(ConnectionResetError, match="before any data"):
        await hands_shaken(as_wire(Narrow(ends[0])), asyncio.get_running_loop())
    await hands_shaken(PlainWire(ends[0]), asyncio.get_running_loop())


# --- connecting: what fails, what is cancelled, what the backend says of itself -------


def test_a_platform_without_scatter_and_gather_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend_module, "_REQUIRED", ("sendmsg", "no_such_call"))
    availability = TcpBackend.availability()
    assert not availability.available
    assert "no_such_call" in availability.reason
    assert "sendmsg" not in availability.reason
    assert "WSL" in availability.remedy


@pytest.mark.parametrize("host", ["", "no such host", "localhost"])
async def test_a_host_that_is_no_numeric_address(host: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - each has its own number and text
        await TcpBackend().connect(Address("tcp", host, 1))


async def test_a_link_is_never_connected_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = unused.getsockname()

    class Bound(socket.socket):
        """As if the kernel had chosen the very port that is asked for."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.bind(address)

    monkeypatch.setattr(socket, "socket", Bound)
    with pytest.raises(ConnectionRefusedError):
        await TcpBackend().connect(Address("tcp", *address))
