"""A fault at the n-th system call of each name, for every n and every kind of fault.

Whatever happens, both links are closed exactly once (``linked`` and the recorders check
it), the frames that were delivered are a beginning of those sent, byte for byte, and
nothing is left open. Faults that are none (a signal, a short read) change nothing.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from kvwire.backend import Link, Listener
from kvwire.errors import ConnectionLost
from kvwire.limits import KIB
from kvwire.memory.iovec import readv, writev
from kvwire.types import Address
from kvwire_tcp import TcpBackend, duplex, wire
from kvwire_tcp.link import TcpLink
from kvwire_tcp.wire import PlainWire
from tests.backends.kvwire_tcp.recorder import (
    ANYWHERE,
    PIECES,
    VIEW,
    Recorder,
    gathered,
    header,
    pieces_of,
)
from tests.support.sockets import tcp_sockets

SHORT: Final = 0
HARMLESS: Final = (errno.EINTR, errno.EAGAIN, SHORT)
FATAL: Final = (
    errno.ECONNRESET,
    errno.EPIPE,
    errno.ETIMEDOUT,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EHOSTUNREACH,
)
NAMES = {SHORT: "short", **errno.errorcode}


class Plan:
    """Which call fails, and how; counts the calls of that name."""

    def __init__(self, call: str, at: int, fault: int) -> None:
        self.call, self.at, self.fault = call, at, fault
        self.calls = 0

    @property
    def hit(self) -> bool:
        """Whether the call was reached."""
        return self.calls >= self.at

    def next(self, call: str) -> bool:
        """Count a call and fail it if it is the one; True if it is to be short."""
        self.calls += call == self.call
        if call != self.call or self.calls != self.at:
            return False
        if self.fault == SHORT:
            return True
        raise OSError(self.fault, os.strerror(self.fault))


def faulty_sockets(*calls: str, plan: Plan) -> type[socket.socket]:
    """A class of sockets whose calls of these names follow a plan."""

    def planned(name: str) -> Callable[..., Any]:
        right = getattr(socket.socket, name)

        def call(self: socket.socket, *args: Any) -> Any:
            short = plan.next(name)
            if short and args:
                first, *rest = args
                listed = isinstance(first, list)
                args = ([first[0][:1]] if listed else first[:1], *rest)
            return right(self, *args)

        return call

    return type("Faulty", (socket.socket,), {name: planned(name) for name in calls})


def vectored(
    call: Callable[[int, tuple[int, int]], int], plan: Plan, fd: int
) -> Callable[[int, tuple[int, int]], int]:
    """``readv`` or ``writev`` under the same plan, for one descriptor."""

    def faulty(where: int, window: tuple[int, int]) -> int:
        if where == fd and plan.next(call.__name__):
            return call(where, (window[0], 1))
        return call(where, window)

    return faulty


BODIES: Final = [
    (VIEW, 0),
    (VIEW, 50),
    (VIEW, 20 * KIB),
    (PIECES, 300),
    (PIECES, 20 * KIB),
    (VIEW, 0),
    (VIEW, 100 * KIB),
]
TOKENS: Final = [1, 3, 5]
_NOISE: Final = os.urandom(300 * KIB)


def send_all(link: Link, seed: int) -> list[tuple[int, bytes]]:
    """Send a frame of each kind, every other one with a token."""
    sent = []
    for number, (kind, length) in enumerate(BODIES):
        arena = bytearray(_NOISE[seed + number :][: 2 * length + 1])
        token = number if number % 2 else None
        if kind == PIECES:
            body = gathered(arena, length)
            link.send(header(length, number, kind), pieces_of(arena, length), token)
        else:
            body = bytes(arena[:length])
            link.send(header(length, number), memoryview(arena)[:length], token)
        sent.append((number, body))
        link.flush()
    return sent


async def exchange(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Send both ways and close, with the plan on one side; how each side ended."""
    loop = asyncio.get_running_loop()
    client, accepted = tcp_sockets()
    faulty = faulty_sockets(*ON_SOCKETS, plan=plan)(fileno=client.detach())
    for sock in (faulty, accepted):
        sock.setblocking(False)
    with monkeypatch.context() as patch:
        patch.setattr(wire, "readv", vectored(readv, plan, faulty.fileno()))
        patch.setattr(wire, "writev", vectored(writev, plan, faulty.fileno()))
        where = Address("tcp", "127.0.0.1", 1)
        near, far = (
            TcpLink(PlainWire(faulty), where, loop),
            TcpLink(PlainWire(accepted), where, loop),
        )
        at_near, at_far = Recorder(), Recorder()
        near.start(at_near)
        far.start(at_far)
        to_near, to_far = send_all(far, 1), send_all(near, 2)
        await at_near.until(
            lambda: at_near.closed or len(at_near.frames) == len(BODIES)
        )
        near.close()
        ends = await at_near.end(), await at_far.end()
        near.abort()
        far.abort()
        await asyncio.sleep(0)
    check(at_near, to_near)
    check(at_far, to_far)
    assert faulty.fileno() == accepted.fileno() == -1
    if ends == (None, None):
        assert at_near.frames == to_near
        assert at_far.frames == to_far
        assert at_near.sent == at_far.sent == TOKENS
    return ends


def check(recorder: Recorder, sent: Sequence[tuple[int, bytes]]) -> None:
    assert len(recorder.closed) == 1
    assert recorder.frames == sent[: len(recorder.frames)]
    assert recorder.sent == TOKENS[: len(recorder.sent)]


ON_SOCKETS: Final = (
    "recv_into",
    "recvmsg_into",
    "send",
    "sendmsg",
    "shutdown",
    "getsockopt",
)
MOVING: Final = (*ON_SOCKETS[:4], "readv", "writev")


@pytest.mark.parametrize("call", MOVING)
async def test_what_is_no_fault_changes_nothing(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault in HARMLESS:
        for at in itertools.count(1):
            plan = Plan(call, at, fault)
            assert await exchange(plan, monkeypatch) == (None, None)
            if not plan.hit:
                break
        assert at > 1, f"{call} is never made"


@pytest.mark.parametrize("call", [*MOVING, "shutdown", "getsockopt"])
async def test_a_fault_ends_both_links_once_and_corrupts_nothing(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplex, "REPORTING_LOOPS", ())
    faults = itertools.cycle(FATAL)
    for at in itertools.count(1):
        fault = next(faults)
        plan = Plan(call, at, fault)
        near_end, far_end = await exchange(plan, monkeypatch)
        if not plan.hit:
            assert near_end is far_end is None
            break
        assert isinstance(near_end, ConnectionLost), NAMES[fault]
        assert isinstance(near_end.__cause__, OSError)
        assert near_end.__cause__.errno == fault
        assert isinstance(far_end, ConnectionLost | None)
    assert at > 1, f"{call} is never made"


async def test_abort_does_not_raise_if_the_reset_cannot_be_asked_for() -> None:
    for fault in FATAL:
        near, far = socket.socketpair()
        make = faulty_sockets("setsockopt", plan=Plan("setsockopt", 1, fault))
        faulty = make(fileno=near.detach())
        faulty.setblocking(False)
        with far:
            link = TcpLink(PlainWire(faulty), ANYWHERE, asyncio.get_running_loop())
            recorder = Recorder()
            link.start(recorder)
            link.abort()
            assert isinstance(await recorder.end(), ConnectionLost)
            assert faulty.fileno() == -1


SETTING_UP: Final = {
    "connect": ("socket", "setsockopt", "getpeername", "getsockname"),
    "listen": ("socket", "setsockopt", "bind", "listen", "getsockname"),
}


@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name in SETTING_UP for call in SETTING_UP[name]]
)
async def test_connect_and_listen_close_what_they_opened(
    name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault in (*FATAL, errno.EMFILE, errno.EINTR):
        await check_set_up_under(name, call, fault, monkeypatch)


async def check_set_up_under(
    name: str, call: str, fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, accepted, failed = TcpBackend(), list[Link](), list[int | None]()
    listener = await backend.listen(ANYWHERE, accepted.append)

    async def set_up() -> Link | Listener:
        if name == "connect":
            return await backend.connect(listener.address)
        return await backend.listen(ANYWHERE, accepted.append)

    for at in itertools.count(1):
        plan = Plan(call, at, fault)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", planned(plan))
            try:
                made: Link | Listener | OSError = await set_up()
            except OSError as exc:
                made = exc
        if isinstance(made, Link):
            made.abort()
        elif isinstance(made, Listener):
            await made.close()
        else:
            failed.append(made.errno)
        # asyncio asks for names as well, to log them, and ignores what that raises.
        if not plan.hit:
            break
    await listener.close()
    for link in accepted:
        link.abort()
    assert set(failed) == {fault}, f"{call} is never made"


def planned(plan: Plan) -> Callable[..., socket.socket]:
    """A class of sockets whose making and setting up follows the plan."""
    calls = sorted({*SETTING_UP["connect"], *SETTING_UP["listen"]} - {"socket"})
    accepted = faulty_sockets(plan=plan)
    faulty = faulty_sockets(*calls, plan=plan)

    def make(*args: Any, **kwargs: Any) -> socket.socket:
        # Those that the listener accepts are not meant.
        if "fileno" in kwargs:
            return accepted(*args, **kwargs)
        plan.next("socket")
        return faulty(*args, **kwargs)

    return make
