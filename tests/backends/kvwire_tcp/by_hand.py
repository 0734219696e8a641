"""Wake-ups that a test gives: of a socket that is ready, and of time that is up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from kvwire_tcp.link import TcpLink
from kvwire_tcp.options import tune
from kvwire_tcp.wire import PlainWire
from tests.backends.kvwire_tcp.recorder import ANYWHERE, Recorder


class Turns:
    """The running loop, but for one socket and all timers: those wait for the test."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.timers: list[asyncio.TimerHandle] = []
        self._running = asyncio.get_running_loop()
        self._due: Callable[[], object] | None = None
        self._calls: dict[str, Callable[[], object]] = {}

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """This, for what takes a loop."""
        return cast(asyncio.AbstractEventLoop, self)

    @property
    def watches(self) -> bool:
        """Whether what arrives is waited for."""
        return "read" in self._calls

    def readable(self) -> None:
        """Something has arrived."""
        self._calls["read"]()

    def writable(self) -> None:
        """There is room, if somebody waits for it."""
        self._calls.get("write", bool)()

    def time_is_up(self) -> None:
        """Of the timer that was set last."""
        assert self._due is not None
        self._due()

    def add_reader(
        self, _: object, call: Callable[..., object], *given: object
    ) -> None:
        self._calls["read"] = partial(call, *given)

    def remove_reader(self, _: object) -> None:
        self._calls.pop("read", None)

    def add_writer(
        self, _: object, call: Callable[..., object], *given: object
    ) -> None:
        self._calls["write"] = partial(call, *given)

    def remove_writer(self, _: object) -> None:
        self._calls.pop("write", None)

    def call_later(
        self, delay_s: float, call: Callable[..., object], *given: object
    ) -> asyncio.TimerHandle:
        self._due = partial(call, *given)
        self.timers.append(self._running.call_later(1000 + delay_s, self._due))
        return self.timers[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running, name)


@asynccontextmanager
async def alone(
    wire: Callable[[socket.socket], PlainWire] = PlainWire,
) -> AsyncIterator[tuple[TcpLink, Recorder, Turns, socket.socket]]:
    """A started link over such a wire, and the plain socket that is its peer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
    ):
        sock, _ = server.accept()
        sock.setblocking(False)
        tune(sock, ANYWHERE.host)
        turns, told = Turns(sock), Recorder()
        link = TcpLink(wire(sock), ANYWHERE, turns.loop)
        link.start(told)
        yield link, told, turns, peer
        link.abort()
        await told.end()
