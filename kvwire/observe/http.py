"""HTTP for a served store: ``/metrics``, ``/health``, and verbs.

A thread of its own answers, so that a blocked event loop cannot delay it: ``/health``
asks the loop for a turn, and answers 503 if it gets none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol, Self, TypeVar

from kvwire import BlockStore, Communicator, ListenError
from kvwire.backend import keep_from_children
from kvwire.extras import needed_by
from kvwire.observe.prometheus import CommunicatorCollector, StoreCollector
from kvwire.types import Address

with needed_by("kvwire.observe.http", extra="metrics"):
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

logger: logging.Logger = logging.getLogger("kvwire.store")
T = TypeVar("T")

# A Kubernetes probe waits 1 s by default, and should get the reason by then.
LOOP_TURN_S: Final = 0.5
# The longest time that a silent client holds a thread.
_SILENT_S: Final = 5.0
# Connections at once: a few scrapers, probes and people. Others are closed, since each
# needs a thread.
_ASKERS_MAX: Final = 16


class MetricsServer:
    """Answer GET of both paths within ``with``, on the store's loop.

    Args:
        store: The store.
        communicator: The communicator of the store's server, to include its numbers.
        orders: Answers every POST; ``StoreOrders(server)`` of
            ``kvwire.store.server.orders`` carries out verbs.
        address: The address to listen on; ``"host:0"`` takes any free port. Anybody who
            reaches it can read names and addresses of tiers and clients, and numbers.

    Attributes:
        url: The URL of ``/metrics``, with the real port.
        orders: Answers POST; None if nothing does.

    Raises:
        ListenError: It cannot listen there.
        UsageError: The address cannot be parsed.
    """

    def __init__(
        self,
        store: BlockStore,
        address: str | Address,
        communicator: Communicator | None = None,
        orders: Orders | None = None,
    ) -> None:
        where = Address.parse(address)
        self._store = store
        self._loop = asyncio.get_running_loop()
        self.orders: Orders | None = orders
        self._registry = CollectorRegistry()
        self._registry.register(StoreCollector(store))
        if communicator is not None:
            self._registry.register(CommunicatorCollector(communicator))
        try:
            self._server = _Server((where.host, where.port), _Request, self)
        except OSError as exc:
            raise ListenError(f"cannot listen at {where}: {exc}") from exc
        keep_from_children(self._server)
        host = f"[{where.host}]" if ":" in where.host else where.host
        self.url: str = f"http://{host}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        """Begin to answer."""
        serve = self._server.serve_forever
        threading.Thread(target=serve, name="kvwire metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Return status, content type and body for a path."""
        match path:
            case "/metrics":
                metrics = generate_latest(self._registry)
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, metrics
            case "/health":
                return self._health()
        said = b"there are /metrics and /health\n"
        return HTTPStatus.NOT_FOUND, "text/plain", said

    def _health(self) -> tuple[HTTPStatus, str, bytes]:
        turns = self._on_loop(lambda: True)
        trouble = {name: said for name, said in self._store.report.items() if said}
        state = ("degraded" if trouble else "ok") if turns else "stuck"
        body = json.dumps({"status": state, "trouble": trouble}).encode() + b"\n"
        status = HTTPStatus.OK if turns else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", body

    def _on_loop(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work` on the loop; None if the loop is blocked."""
        made: queue.SimpleQueue[T] = queue.SimpleQueue()
        try:
            self._loop.call_soon_threadsafe(lambda: made.put(work()))
            return made.get(timeout=LOOP_TURN_S)
        except (RuntimeError, queue.Empty):  # the loop is closed, or stuck
            return None


class Orders(Protocol):
    """Carries out the orders that come by POST, with bodies up to a length."""

    bytes_max: int

    def answer(
        self, path: str, headers: Mapping[str, str], client: str, body: bytes
    ) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the status and the answer for JSON; on a thread."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        where: tuple[str, int],
        request: type[BaseHTTPRequestHandler],
        owner: MetricsServer,
    ) -> None:
        sockaddr: Any
        (self.address_family, *_, sockaddr), *_ = socket.getaddrinfo(
            *where, type=socket.SOCK_STREAM
        )
        super().__init__(sockaddr, request)
        self.owner = owner
        self._places = threading.BoundedSemaphore(_ASKERS_MAX)
        # The time each connection was accepted. bounded: _ASKERS_MAX
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
        self._answer(*self.server.owner.answer(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        """Carry out one order."""
        orders = self.server.owner.orders
        status = HTTPStatus.NOT_FOUND
        told: dict[str, Any] = {"error": "no orders are taken here"}
        length = self.headers.get("content-length", "")
        if orders is not None and not length.isdecimal():
            status = HTTPStatus.LENGTH_REQUIRED
            told = {"error": "send a content-length"}
        elif orders is not None and float(length) > orders.bytes_max:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            told = {"error": f"the body has more than {orders.bytes_max} bytes"}
        elif orders is not None:
            body = self.rfile.read(int(length))
            # From here on it is not the client who is slow.
            self.server.since.pop(self.connection, None)
            headers = {name.lower(): value for name, value in self.headers.items()}
            path = self.path.partition("?")[0]
            status, told = orders.answer(path, headers, self.client_address[0], body)
        content = json.dumps(told).encode() + b"\n"
        self._answer(status, "application/json", content)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing for each request."""
