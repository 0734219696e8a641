"""A small HTTP server on threads, for scrapers, probes and people.

Each request has a thread, so that a blocked event loop cannot delay it. The number of
connections and their time are bounded.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple, Protocol, Self

from kvwire import ListenError
from kvwire.backend import keep_from_children
from kvwire.types import Address

# An HTTP server's connections at once, each with a thread: a few scrapers, probes and
# people. Further connections are closed.
HTTP_CONNECTIONS_MAX: Final = 16

logger: logging.Logger = logging.getLogger("kvwire.store")

# The longest time that a silent client holds a thread.
_SILENT_S: Final = 5.0


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

    Attributes:
        url: Its URL, with the real port.

    Raises:
        ListenError: It cannot listen there.
        UsageError: The address cannot be parsed.
    """

    def __init__(self, address: str | Address, get: HttpGet) -> None:
        where = Address.parse(address)
        try:
            self._server = _Server((where.host, where.port), get)
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

    def __init__(self, where: tuple[str, int], get: HttpGet) -> None:
        sockaddr: Any
        (self.address_family, *_, sockaddr), *_ = socket.getaddrinfo(
            *where, type=socket.SOCK_STREAM
        )
        super().__init__(sockaddr, _Request)
        self.get = get
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
            super().process_request_thread(request, client_address)
        except Exception:  # noqa: BLE001 - before its first byte; handle_error logs it
            self.handle_error(request, client_address)
            self.shutdown_request(request)
        finally:
            self._places.release()

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
                    request.shutdown(socket.SHUT_RDWR)

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
        # From here on, any slowness is not the client's.
        self.server.since.pop(self.connection, None)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._answer(self.server.get(self.path.partition("?")[0], headers))

    def do_HEAD(self) -> None:
        """Answer as to GET, without the body: probes of load balancers ask so."""
        self.do_GET()

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
