"""A small HTTP server on a thread, for scrapers, probes and people.

The thread has an event loop of its own, so that a blocked loop of the program cannot
delay it. A client that is waited for, to send its request or to take the answer, costs
a descriptor and no thread, and is the first to go when there are too many: the longest
waiting one of the address that has the most. So nobody keeps a probe from its answer by
connecting and saying nothing. Answers are made on threads; ``/health`` has its own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol, Self

from kvwire import ListenError
from kvwire.backend import keep_from_children
from kvwire.backend.sockets import listening_socket
from kvwire.errors import begin_thread, shown
from kvwire.types import Address

# Connections at once: many scrapers, probes and people. Half of them may have an answer
# in the making, so there are always some that wait, and can be closed for a new one.
HTTP_CONNECTIONS_MAX: Final = 64
# Answers in the making at once, on each of the two groups of threads; further requests
# get 503.
_ANSWERS_MAX: Final = HTTP_CONNECTIONS_MAX // 4
_THREADS: Final = 4
# A head has a few hundred bytes.
_HEAD_BYTES_MAX: Final = 16 * 1024
# The longest time that a client is waited for.
_SILENT_S: Final = 5.0
_BACKLOG: Final = 128
_HEALTH: Final = "/health"

logger: logging.Logger = logging.getLogger("kvwire.store")


class ClientMistakes(logging.Filter):
    """Drops records about requests that are no valid HTTP.

    aiohttp logs each of them with a traceback, although its client has the answer. So
    any client could fill the log with bytes of its choice.

    Args:
        mistakes: aiohttp's errors about such requests.
    """

    def __init__(self, *mistakes: type[Exception]) -> None:
        super().__init__()
        self._mistakes = mistakes

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is about anything else."""
        return not (record.exc_info and isinstance(record.exc_info[1], self._mistakes))


class HttpReply(NamedTuple):
    """The answer to one request."""

    status: HTTPStatus
    headers: Mapping[str, str]
    body: bytes

    @classmethod
    def of(cls, status: HTTPStatus, kind: str, body: bytes) -> Self:
        """Return an answer of a content type."""
        return cls(status, {"content-type": kind}, body)


class HttpGet(Protocol):
    """Answers GET and HEAD, on threads."""

    def __call__(self, path: str, headers: Mapping[str, str], /) -> HttpReply:
        """Return the answer; the names of headers have small letters."""


class HttpThread:
    """Answers HTTP requests within ``with``.

    Args:
        address: The address to listen on; ``"host:0"`` takes any free port.
        get: Answers GET and HEAD.
        silent_s: How long a client may take to ask, and to read its answer.

    Attributes:
        url: Its URL, with the real port.

    Raises:
        ListenError: It cannot listen there.
        UsageError: The address cannot be parsed.
    """

    def __init__(
        self, address: str | Address, get: HttpGet, *, silent_s: float = _SILENT_S
    ) -> None:
        where = Address.parse(address)
        self._get = get
        self._silent_s = silent_s
        try:
            self._socket = keep_from_children(_listening(where.host, where.port))
        except OSError as exc:
            raise ListenError(f"cannot listen at {where}: {exc}") from exc
        host = f"[{where.host}]" if ":" in where.host else where.host
        self.url: str = f"http://{host}:{self._socket.getsockname()[1]}"
        self._open: set[asyncio.StreamWriter] = set()  # bounded: HTTP_CONNECTIONS_MAX
        # The address of each client that is waited for, the longest waiting one first.
        self._waiting: dict[asyncio.StreamWriter, str] = {}
        self._answering = {True: 0, False: 0}
        self._pools = {
            is_health: ThreadPoolExecutor(_THREADS, "kvwire http answer")
            for is_health in (True, False)
        }
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, name="kvwire http", daemon=True
        )

    def __enter__(self) -> Self:
        """Begin to answer."""
        begin_thread(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop answering."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())
        for pool in self._pools.values():
            pool.shutdown()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._client, sock=self._socket, limit=_HEAD_BYTES_MAX
        )
        await self._over.wait()
        server.close()
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one request."""
        if not self._has_room():
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            self._wait_for(writer)
            async with asyncio.timeout(self._silent_s):
                head = await reader.readuntil(b"\r\n\r\n")
            del self._waiting[writer]
            reply = await self._answer(head)
            self._wait_for(writer)
            async with asyncio.timeout(self._silent_s):
                writer.write(reply)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        # It has gone, or sent nothing, or too much. A timeout is an OSError as well.
        except (OSError, EOFError, asyncio.LimitOverrunError, KeyError):
            pass
        finally:
            self._forget(writer)

    def _wait_for(self, writer: asyncio.StreamWriter) -> None:
        self._waiting[writer] = str(writer.get_extra_info("peername", ("",))[0])

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)
        self._waiting.pop(writer, None)
        writer.transport.abort()

    def _has_room(self) -> bool:
        """Return whether one more connection may stay; another one may go for it."""
        if len(self._open) < HTTP_CONNECTIONS_MAX:
            return True
        if not self._waiting:
            return False
        ((most, _),) = Counter(self._waiting.values()).most_common(1)
        self._forget(next(w for w, host in self._waiting.items() if host == most))
        return True

    async def _answer(self, head: bytes) -> bytes:
        line, *rows = head.decode("latin-1").split("\r\n")
        method, _, rest = line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        pairs = (row.partition(":") for row in rows)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if method not in ("GET", "HEAD"):
            return _text(HTTPStatus.NOT_IMPLEMENTED, "only GET and HEAD are answered")
        is_health = path == _HEALTH
        if self._answering[is_health] >= _ANSWERS_MAX:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once")
        self._answering[is_health] += 1
        try:
            reply = await self._loop.run_in_executor(
                self._pools[is_health], self._get, path, headers
            )
        except Exception:
            logger.exception("%s was not answered", shown(path))
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "see the server's log")
        finally:
            self._answering[is_health] -= 1
        return _encoded(reply, with_body=method == "GET")


def _listening(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, sockaddr = found[0]
    return listening_socket(family, sockaddr, _BACKLOG)


def _text(status: HTTPStatus, text: str) -> bytes:
    reply = HttpReply.of(status, "text/plain", f"{text}\n".encode())
    return _encoded(reply, with_body=True)


def _encoded(reply: HttpReply, *, with_body: bool) -> bytes:
    rows = {
        "server": "kvwire",
        **reply.headers,
        "content-length": str(len(reply.body)),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {reply.status.value} {reply.status.phrase}"]
    lines += [f"{name.title()}: {value}" for name, value in rows.items()]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + reply.body if with_body else head
