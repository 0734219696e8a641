"""The proxy's HTTP/1.1 server, on aiohttp, which also serves as client to engines.

::

    SIGTERM           no new connection is accepted; running requests continue
    stop_s later      waiting requests get 503, and streams an error, as if their engine
                      had died
    2 s after that    connections whose client does not read or write are closed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import aiohttp
from aiohttp import web

from kvwire.errors import ListenError
from kvwire_vllm.proxy.app import ProxyApp, error_answer
from kvwire_vllm.proxy.client import parser_text
from kvwire_vllm.proxy.limits import (
    PROXY_HEADER_BYTES_MAX,
    PROXY_HEADERS_MAX,
    PROXY_IDLE_MAX,
    PROXY_IDLE_S,
    PROXY_RUNNING_MAX,
)
from kvwire_vllm.proxy.listening import listen

logger: logging.Logger = logging.getLogger("kvwire.vllm")
# Malformed requests get an answer, but are not worth a log line.
_quiet: logging.Logger = logging.getLogger("kvwire.vllm.http")
_quiet.setLevel(logging.CRITICAL)

_UNREAD_S: Final = 2.0
# aiohttp's method for a request that it could not parse.
_NO_REQUEST: Final = "UNKNOWN"
# The same status as uvicorn's, so that scripts recognise it.
_NO_PORT: Final = 3


class ProxyServer:
    """Serves the proxy until a signal, then lets requests end, up to a limit."""

    def __init__(
        self,
        app: ProxyApp,
        host: str,
        port: int,
        stop_s: float,
        connections_max: int = PROXY_RUNNING_MAX + PROXY_IDLE_MAX,
        idle_s: float = PROXY_IDLE_S,
    ) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._stop_s = stop_s
        self._connections_max = connections_max
        self._idle_s = idle_s
        self._server: web.Server | None = None
        # Connections with a request. bounded: connections_max
        self._busy: set[web.RequestHandler] = set()

    def run(self) -> int:
        """Serve until a signal ends the process; return the status if none does."""
        signals = [
            number
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        before = {number: signal.getsignal(number) for number in signals}
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            came = runner.run(self._until_a_signal(signals))
        for number, handler in before.items():
            signal.signal(number, handler)
        if came is None:
            return _NO_PORT
        signal.raise_signal(came)
        return 0

    async def _until_a_signal(self, signals: Sequence[int]) -> int | None:
        """Serve until a signal comes; return it, or None if the port is taken."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[int] = loop.create_future()

        def note(number: int) -> None:
            if came.done():
                self._end()  # a second signal: somebody is in a hurry
            else:
                came.set_result(number)

        for number in signals:
            with contextlib.suppress(NotImplementedError):  # Windows
                loop.add_signal_handler(number, note, number)
        try:
            async with self._app.running(), self.serving():
                return await came
        except ListenError as exc:
            print(exc, file=sys.stderr)
            return None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Serve while the block is open; yield the port.

        Raises:
            ListenError: It cannot listen there.

        Cancel safety: running requests are cut.
        """
        self._server = web.Server(
            self._handle, request_factory=_request, handler_cancellation=True
        )
        runner = web.ServerRunner(
            self._server, shutdown_timeout=self._stop_s + 2 * _UNREAD_S
        )
        await runner.setup()
        loop = asyncio.get_running_loop()
        sockets = listen(self._host, self._port)
        listening = [
            await loop.create_server(self._connected, sock=sock) for sock in sockets
        ]
        try:
            yield sockets[0].getsockname()[1]
        finally:
            for one in listening:
                one.close()
            await self._stop(runner)

    def _connected(self) -> asyncio.Protocol:
        """Accept a connection; if there are too many, drop the oldest idle one."""
        assert self._server is not None
        there = self._server.connections
        if len(there) >= self._connections_max:
            # Connections that ended in this turn of the loop are still among them.
            open_ones = [one for one in there if _is_open(one.transport)]
            if len(open_ones) >= self._connections_max:
                idle = [one for one in open_ones if one not in self._busy]
                if not idle:
                    return _Refusing()
                _abort(idle[0])
        options: dict[str, Any] = {
            "max_line_size": PROXY_HEADER_BYTES_MAX,
            "max_field_size": PROXY_HEADER_BYTES_MAX,
            "max_headers": PROXY_HEADERS_MAX,
            "keepalive_timeout": self._idle_s,
            "lingering_time": _UNREAD_S,
            "auto_decompress": False,  # a small body could become a large one
            "access_log": None,
            "logger": _quiet,
        }
        loop = asyncio.get_running_loop()
        return _Connection(self._server, loop=loop, **options)

    async def _stop(self, runner: web.ServerRunner) -> None:
        loop = asyncio.get_running_loop()
        timers = (
            loop.call_later(self._stop_s, self._app.ending.end),
            loop.call_later(self._stop_s + _UNREAD_S, self._end),
        )
        try:
            await runner.cleanup()
        finally:
            for timer in timers:
                timer.cancel()

    def _end(self) -> None:
        """Cut all open connections at once."""
        self._app.ending.end()
        for connection in self._server.connections if self._server else ():
            _abort(connection)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; the task is cancelled when the client disconnects."""
        self._busy.add(request.protocol)
        try:
            return await self._app.handle(request)
        except ConnectionError:
            raise  # the client has gone
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            raise
        finally:
            self._busy.discard(request.protocol)


def _request(
    message: Any,
    payload: aiohttp.StreamReader,
    protocol: web.RequestHandler,
    writer: Any,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    """Return a request; a malformed one is answered as HTTP/1.1 too."""
    if message.method == _NO_REQUEST:
        message = message._replace(version=aiohttp.HttpVersion11)
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop)


def _is_open(transport: asyncio.Transport | None) -> bool:
    return transport is not None and not transport.is_closing()


def _abort(connection: web.RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()


class _Connection(web.RequestHandler):
    """Answer a client whose request cannot be read, in the form of all other errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer, after which the connection is closed."""
        why = parser_text(message or "") or HTTPStatus(status).description
        # It raises if an answer has begun; otherwise it logs the error.
        super().handle_error(request, status, exc, message)
        response = error_answer(status, why)
        response.force_close()
        return response


class _Refusing(asyncio.Protocol):
    """Closes a connection for which there is no room."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        transport.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop  # noqa: PLC0415 - not there on Windows

    return uvloop.new_event_loop
