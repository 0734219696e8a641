"""HTTP for a served store: ``/metrics`` and ``/health``.

A separate thread answers, so that a blocked event loop cannot delay it. ``/health``
answers 503 if the loop is blocked.
"""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Self, TypeVar

from kvwire import Communicator
from kvwire.extras import needed_by
from kvwire.observe.listening import HttpReply, HttpThread
from kvwire.observe.prometheus import CommunicatorCollector
from kvwire.types import Address
from kvwire_store.prometheus import StoreCollector
from kvwire_store.store import BlockStore

with needed_by("kvwire_store.metrics_server", extra="metrics"):
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

T = TypeVar("T")
_JSON: Final = "application/json"

# A Kubernetes probe waits 1 s by default, and should have the answer by then.
LOOP_TURN_S: Final = 0.5


class MetricsServer:
    """Serves these paths over HTTP within ``with``, on the store's loop.

    Args:
        store: The store.
        communicator: The communicator of the store's server, to include its numbers.
        address: The address to listen on; ``"host:0"`` uses any free port. Anybody who
            can connect to it can read the names and addresses of tiers and clients, and
            numbers.

    Attributes:
        url: The URL of ``/metrics``, with the real port.

    Raises:
        ListenError: It cannot listen there.
        UsageError: The address cannot be parsed.
    """

    def __init__(
        self,
        store: BlockStore,
        address: str | Address,
        communicator: Communicator | None = None,
    ) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._registry = CollectorRegistry()
        self._registry.register(StoreCollector(store))
        if communicator is not None:
            self._registry.register(CommunicatorCollector(communicator))
        self._thread = HttpThread(address, self.get)
        self.url: str = f"{self._thread.url}/metrics"

    def __enter__(self) -> Self:
        """Begin to answer."""
        self._thread.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop answering."""
        self._thread.__exit__(*error)

    def get(self, path: str, _: object = None, /) -> HttpReply:
        """Return the answer to a GET."""
        match path:
            case "/metrics":
                metrics = generate_latest(self._registry)
                return HttpReply.of(HTTPStatus.OK, CONTENT_TYPE_LATEST, metrics)
            case "/health":
                return self._health()
        text = b"the paths are /metrics and /health\n"
        return HttpReply.of(HTTPStatus.NOT_FOUND, "text/plain", text)

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
