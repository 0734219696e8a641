"""Listening: on one address and no other, through floods, shortages and bad callers."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from kvwire.backend import Link
from kvwire.backend.sockets import listening_socket
from kvwire.errors import ConnectionLost
from kvwire.types import Address
from kvwire_tcp import TcpBackend
from kvwire_tcp import backend as backend_module
from kvwire_tcp.lane import PendingLanes
from kvwire_tcp.listener import ACCEPTS_PER_WAKEUP, TcpListener
from kvwire_tcp.waiting import hands_shaken, sent
from kvwire_tcp.wire import PlainWire, Wire
from tests.backends.kvwire_tcp.by_hand import Turns
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
def test_an_ipv6_address_is_not_bound_for_ipv4_as_well() -> None:
    with listening_socket(socket.AF_INET6, ("::1", 0), 1) as sock:
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


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


class Broken(socket.socket):
    """Accepts after errors; the first that it then accepts is gone as well."""

    def __init__(self, sock: socket.socket, errors: Sequence[OSError] = ()) -> None:
        super().__init__(fileno=sock.detach())
        self._errors = [*errors]
        self._first = bool(errors)

    def accept(self) -> tuple[socket.socket, Any]:
        if self._errors:
            raise self._errors.pop()
        sock, address = super().accept()
        first, self._first = self._first, False
        return (Broken(sock) if first else sock), address

    def setsockopt(self, *_: object) -> None:
        raise OSError(errno.EINVAL, "gone")


@asynccontextmanager
async def listening(
    accept: Callable[[Link], None], *errors: OSError
) -> AsyncIterator[tuple[TcpListener, Turns]]:
    """A listener that is woken by hand."""
    sock = listening_socket(socket.AF_INET, ("127.0.0.1", 0), 99)
    sock.setblocking(False)
    if errors:
        sock = Broken(sock, errors)
    turns = Turns(sock)
    listener = TcpListener(sock, accept, PlainWire, PendingLanes(), turns.loop)
    yield listener, turns
    await listener.close()


def call(listener: TcpListener) -> socket.socket:
    return socket.create_connection((listener.address.host, listener.address.port))


async def test_a_wakeup_accepts_a_share_of_a_flood() -> None:
    accepted: list[Link] = []
    count = 2 * ACCEPTS_PER_WAKEUP + 1
    async with listening(accepted.append) as (listener, turns):
        clients = [call(listener) for _ in range(count)]
        shares = []
        while len(accepted) < count:
            before = len(accepted)
            turns.readable()
            shares.append(len(accepted) - before)
    assert shares == [ACCEPTS_PER_WAKEUP, ACCEPTS_PER_WAKEUP, 1]
    for link in accepted:
        link.abort()
    for client in clients:
        client.close()


async def test_an_accept_callback_may_close_the_listener() -> None:
    accepted: list[Link] = []

    def accept_one(link: Link) -> None:
        accepted.append(link)
        with suppress(StopIteration):
            listener.close().send(None)  # never waits

    async with listening(accept_one) as (listener, turns):
        with call(listener), call(listener):
            turns.readable()
    assert len(accepted) == 1
    accepted[0].abort()


async def test_a_connection_that_broke_in_the_backlog_does_not_stop_the_next() -> None:
    """Linux hands such an error to accept(2); macOS refuses the options."""
    accepted: list[Link] = []
    errors = OSError(errno.ECONNABORTED, "gone"), OSError(errno.EPROTO, "gone")
    async with listening(accepted.append, *errors) as (listener, turns):
        with call(listener) as first, call(listener):
            first.settimeout(60)
            turns.readable()
            assert first.recv(1) == b""
    assert len(accepted) == 1
    accepted[0].abort()


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
    short = OSError(errno.EMFILE, "out of them")
    async with listening(Link.abort, short) as (_, turns):
        turns.readable()
        (retry,) = turns.timers
        assert "out of them" in caplog.text
        assert not turns.watches
    assert retry.cancelled()
    assert turns.sock.fileno() == -1


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
