"""A small HTTP server on threads, for scrapers, probes and people.

Each request has a thread, so that a blocked event loop cannot delay it. The number of
connections and their time are bounded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple, Protocol, Self

from kvwire import ListenError
from kvwire.backend import keep_from_children
from kvwire.observe.limits import HTTP_CONNECTIONS_MAX
from kvwire.types import Address, HttpClient

logger: logging.Logger = logging.getLogger("kvwire.store")

# The longest time that a silent client holds a thread.
_SILENT_S: Final = 5.0
# The first byte of a client that begins with TLS; HTTP begins with a letter.
_TLS_HANDSHAKE: Final = b"\x16"


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

    def __call__(
        self, path: str, headers: Mapping[str, str], client: HttpClient
    ) -> HttpReply:
        """Return the answer; the names of headers have small letters."""


class Orders(Protocol):
    """Executes the orders that arrive by POST, with bodies up to a length."""

    bytes_max: int

    def answer(
        self, path: str, headers: Mapping[str, str], client: HttpClient, body: bytes
    ) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the status and the answer for JSON; on a thread."""

    def secured(self, connection: socket.socket) -> ssl.SSLSocket | None:
        """Return a client's socket inside TLS; None without certificates."""

    def identity(self, tls: ssl.SSLSocket) -> str:
        """Return the identity that a client has proved; "" if it is not accepted."""


class HttpThread:
    """Answers HTTP requests within ``with``.

    Args:
        address: The address to listen on; ``"host:0"`` takes any free port.
        get: Answers GET and HEAD.
        orders: Answers POST; None if nothing does.

    Attributes:
        url: Its URL, with the real port.

    Raises:
        ListenError: It cannot listen there.
        UsageError: The address cannot be parsed.
    """

    def __init__(
        self, address: str | Address, get: HttpGet, orders: Orders | None = None
    ) -> None:
        where = Address.parse(address)
        try:
            self._server = _Server((where.host, where.port), get, orders)
        except OSError as exc:
            raise ListenError(f"cannot listen at {where}: {exc}") from exc
        keep_from_children(self._server)
        host = f"[{where.host}]" if ":" in where.host else where.host
        self.url: str = f"http://{host}:{self._server.server_port}"

    def __enter__(self) -> Self:
        """Begin to answer."""
        serve = self._server.serve_forever
        threading.Thread(target=serve, name="kvwire http", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        where: tuple[str, int],
        get: HttpGet,
        orders: Orders | None,
    ) -> None:
        sockaddr: Any
        (self.address_family, *_, sockaddr), *_ = socket.getaddrinfo(
            *where, type=socket.SOCK_STREAM
        )
        super().__init__(sockaddr, _Request)
        self.get = get
        self.orders = orders
        self._places = threading.BoundedSemaphore(HTTP_CONNECTIONS_MAX)
        # The time each connection was accepted. bounded: HTTP_CONNECTIONS_MAX
        self.since: dict[socket.socket, float] = {}

    def verify_request(self, request: object, client_address: object) -> bool:
        """Reserve a place; if there is none, the connection is closed."""
        return self._places.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection."""
        self.since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            del self.since[request]
            self._places.release()  # the system cannot start a thread
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and release its place."""
        try:
            super().process_request_thread(self._secured(request), client_address)
        except Exception:  # noqa: BLE001 - before its first byte; handle_error logs it
            self.handle_error(request, client_address)
            self.shutdown_request(request)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, after its handshake if it is inside TLS."""
        if isinstance(request, ssl.SSLSocket):
            request.do_handshake()
        super().finish_request(request, client_address)

    def _secured(self, request: socket.socket) -> socket.socket:
        """Return the socket inside TLS if its client has begun with that."""
        if self.orders is None:
            return request
        request.settimeout(_SILENT_S)
        if request.recv(1, socket.MSG_PEEK) != _TLS_HANDSHAKE:
            return request
        since = self.since.get(request)
        tls = self.orders.secured(request)
        if tls is None or since is None:
            return request
        self.since[tls] = since
        self.since.pop(request, None)
        return tls

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End slow connections: each piece may arrive in time, but never the last."""
        now = time.monotonic()
        for request, since in list(self.since.items()):
            if now - since > _SILENT_S:
                with contextlib.suppress(OSError):
                    # Its thread uses the TLS of it.
                    socket.socket.shutdown(request, socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log the error, unless the client has just disconnected."""
        error = sys.exception()
        if not isinstance(error, OSError):
            logger.error("%s was not answered", client_address, exc_info=error)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENT_S

    def do_GET(self) -> None:
        """Answer one request."""
        client = self._client
        # From here on, any slowness is not the client's.
        self.server.since.pop(self.connection, None)
        self._answer(self.server.get(self._path, self._headers, client))

    def do_HEAD(self) -> None:
        """Answer as to GET, without the body: probes of load balancers ask so."""
        self.do_GET()

    def do_POST(self) -> None:
        """Carry out one order."""
        orders = self.server.orders
        status = HTTPStatus.NOT_FOUND
        answer: dict[str, Any] = {"error": "this server accepts no orders"}
        length = self.headers.get("content-length", "")
        if orders is not None and not length.isdecimal():
            status = HTTPStatus.LENGTH_REQUIRED
            answer = {"error": "send a content-length"}
        elif orders is not None and float(length) > orders.bytes_max:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            answer = {"error": f"the body has more than {orders.bytes_max} bytes"}
        elif orders is not None:
            if self.headers.get("expect", "").lower() == "100-continue":
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self.rfile.read(int(length))
            # From here on, any slowness is not the client's.
            self.server.since.pop(self.connection, None)
            client = self._client
            status, answer = orders.answer(self._path, self._headers, client, body)
        content = json.dumps(answer).encode() + b"\n"
        self._answer(HttpReply.of(status, "application/json", content))

    @property
    def _client(self) -> HttpClient:
        identity = ""
        if isinstance(self.connection, ssl.SSLSocket):
            assert self.server.orders is not None
            identity = self.server.orders.identity(self.connection)
        return HttpClient(self.client_address[0], identity)

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    @property
    def _headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    def _answer(self, reply: HttpReply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name.title(), value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def version_string(self) -> str:
        """Return the ``Server`` header, which otherwise has Python's version."""
        return "kvwire"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Do not log each request."""
