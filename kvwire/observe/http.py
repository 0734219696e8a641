"""HTTP for a served store: ``/metrics``, ``/health``, ``/top``, and verbs.

A separate thread answers, so that a blocked event loop cannot delay it. ``/health``
answers 503 if the loop is blocked.
"""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, Protocol, Self, TypeVar

from kvwire import BlockStore, Communicator, Snapshot
from kvwire.extras import needed_by
from kvwire.observe.listening import HttpReply, HttpThread, Orders
from kvwire.observe.page import DATA, PAGE, page_data, page_file
from kvwire.observe.prometheus import CommunicatorCollector, StoreCollector
from kvwire.observe.view import RateMemory, store_view
from kvwire.store.server.messages import StatsReport
from kvwire.store.server.orders import OrderRefused
from kvwire.types import Address, HttpClient

with needed_by("kvwire.observe.http", extra="metrics"):
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

T = TypeVar("T")
_JSON: Final = "application/json"

# A Kubernetes probe waits 1 s by default, and should have the answer by then.
LOOP_TURN_S: Final = 0.5


class ServerOrders(Orders, Protocol):
    """Executes the orders of a server's clients, and decides what they may read."""

    def reader(self, headers: Mapping[str, str], client: HttpClient) -> str:
        """Return the tenant that sent a request, or "" for the operator; on a thread.

        Raises:
            OrderRefused: The sender is neither.
        """

    def report(self, tenant: str) -> tuple[StatsReport, Snapshot | None]:
        """Return the numbers that a tenant, or the operator, may see; on the loop."""


class MetricsServer:
    """Serves these paths over HTTP within ``with``, on the store's loop.

    Args:
        store: The store.
        communicator: The communicator of the store's server, to include its numbers.
        orders: Answers every POST, and decides who may read the page;
            ``StoreOrders(server)`` of ``kvwire.store.server.orders`` executes verbs.
        address: The address to listen on; ``"host:0"`` uses any free port. Anybody who
            can connect to it can read the names and addresses of tiers and clients, and
            numbers.

    Attributes:
        url: The URL of ``/metrics``, with the real port.
        orders: Answers POST; None if POST is refused, and the page too.

    Raises:
        ListenError: It cannot listen there.
        UsageError: The address cannot be parsed.
    """

    def __init__(
        self,
        store: BlockStore,
        address: str | Address,
        communicator: Communicator | None = None,
        orders: ServerOrders | None = None,
    ) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self.orders: ServerOrders | None = orders
        self._rates = RateMemory()
        self._registry = CollectorRegistry()
        self._registry.register(StoreCollector(store))
        if communicator is not None:
            self._registry.register(CommunicatorCollector(communicator))
        self._thread = HttpThread(address, self.get, orders)
        self.url: str = f"{self._thread.url}/metrics"

    def __enter__(self) -> Self:
        """Begin to answer."""
        self._thread.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop answering."""
        self._thread.__exit__(*error)

    def get(
        self, path: str, headers: Mapping[str, str], client: HttpClient
    ) -> HttpReply:
        """Return the answer to a GET."""
        match path:
            case "/metrics":
                metrics = generate_latest(self._registry)
                return HttpReply.of(HTTPStatus.OK, CONTENT_TYPE_LATEST, metrics)
            case "/health":
                return self._health()
        if self.orders is not None:
            if path == DATA:
                return self._top(self.orders, headers, client)
            if (file := page_file(path)) is not None:
                return HttpReply(HTTPStatus.OK, *file)
        text = f"the paths are /metrics, /health and {PAGE}\n".encode()
        return HttpReply.of(HTTPStatus.NOT_FOUND, "text/plain", text)

    def _top(
        self, orders: ServerOrders, headers: Mapping[str, str], client: HttpClient
    ) -> HttpReply:
        try:
            tenant = orders.reader(headers, client)
        except OrderRefused as exc:
            return HttpReply(exc.status, *page_data({"error": str(exc)}))
        found = self._on_loop(lambda: orders.report(tenant))
        if found is None:
            why = "the server's event loop is blocked, or is ending"
            return HttpReply(HTTPStatus.SERVICE_UNAVAILABLE, *page_data({"error": why}))
        report, snapshot = found
        processes = [snapshot] if snapshot is not None else []
        before = self._rates.before(processes) if processes else ()
        view = store_view(report, processes, before)
        return HttpReply(HTTPStatus.OK, *page_data(view))

    def _health(self) -> HttpReply:
        turns = self._on_loop(lambda: True)
        trouble = {
            name: reason for name, reason in self._store.report.items() if reason
        }
        state = ("degraded" if trouble else "ok") if turns else "stuck"
        body = json.dumps({"status": state, "trouble": trouble}).encode() + b"\n"
        status = HTTPStatus.OK if turns else HTTPStatus.SERVICE_UNAVAILABLE
        return HttpReply.of(status, _JSON, body)

    def _on_loop(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work` on the loop; None if the loop is blocked."""
        made: queue.SimpleQueue[T] = queue.SimpleQueue()
        try:
            self._loop.call_soon_threadsafe(lambda: made.put(work()))
            return made.get(timeout=LOOP_TURN_S)
        except (RuntimeError, queue.Empty):  # the loop is closed, or stuck
            return None
