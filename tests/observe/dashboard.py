"""The dashboard's panels, asked of a real Prometheus that scrapes a busy pair."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from prometheus_client import CollectorRegistry, start_http_server

import kvwire
from kvwire.observe.prometheus import CommunicatorCollector, StoreCollector
from tests.support.servers import Server
from tests.support.tree import ROOT

FOLDER: Final = ROOT / "docs" / "observe"
PROGRAM: Final = "prometheus"
SPEC: Final = kvwire.KVSpec(
    layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="float16"
)
# Two scrapes within each window, and a window within the time a test may take.
_SCRAPE: Final = "200ms"
_WINDOW: Final = "2s"
# Never set.
_PAUSE: Final = threading.Event()
_PAUSE_S: Final = 0.01

DASHBOARD: Final[dict[str, Any]] = json.loads((FOLDER / "grafana.json").read_text())


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, each with one query."""
    return list(DASHBOARD["panels"])


def query_of(panel: dict[str, Any]) -> str:
    """Its query, as Grafana sends it."""
    query: str = panel["targets"][0]["expr"]
    return query.replace("$__rate_interval", _WINDOW)


class Prometheus:
    """A server that scrapes one port, and knows our alert rules."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **arguments: str | float) -> Any:
        """The data of an answer of its HTTP interface."""
        said = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{said}") as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def answers(self, query: str) -> bool:
        """Whether a query has a value now."""
        with suppress(OSError):  # it is starting
            return bool(self.ask("query", query=query)["result"])
        return False


@contextmanager
def prometheus(port: int) -> Iterator[Prometheus]:
    """Run a server that scrapes a port of this machine."""
    with tempfile.TemporaryDirectory(prefix="kvwire-prometheus-") as folder:
        scrape = {"targets": [f"127.0.0.1:{port}"]}
        config = {
            "global": {"scrape_interval": _SCRAPE, "scrape_timeout": _SCRAPE},
            "rule_files": [str(FOLDER / "alerts.yaml")],
            "scrape_configs": [{"job_name": "kvwire", "static_configs": [scrape]}],
        }
        file = Path(folder) / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is YAML
        server = Server(
            [
                *(PROGRAM, f"--config.file={file}"),
                *(f"--storage.tsdb.path={folder}/data",),
                "--web.listen-address=127.0.0.1:{port}",
            ],
            "Server is ready to receive web requests",
        )
        server.start()
        try:
            yield Prometheus(f"http://127.0.0.1:{server.port}")
        finally:
            server.kill()


@asynccontextmanager
async def busy_pair() -> AsyncIterator[int]:
    """Two communicators and a store at work; the port of their metrics."""
    registry = CollectorRegistry()
    async with (
        kvwire.open(name="prefill-0") as prefill,
        kvwire.open(name="decode-0") as decode,
        kvwire.BlockStore.open(["memory:64MiB"]) as store,
    ):
        for one in (prefill, decode):
            registry.register(CommunicatorCollector(one))
        conn = await decode.connect(await prefill.listen("127.0.0.1:0"))
        registry.register(StoreCollector(store, "decode-0"))
        server, thread = start_http_server(0, "127.0.0.1", registry)
        work = asyncio.create_task(_work(prefill, conn, store))
        try:
            yield server.server_port
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            server.shutdown()
            server.server_close()
            thread.join()


async def _work(
    prefill: kvwire.Communicator, conn: kvwire.Connection, store: kvwire.BlockStore
) -> None:
    """Transfers, of which each tenth is given up, and blocks that come and go."""
    mine, theirs = _cache(), _cache()
    for number in range(1_000_000):
        out = prefill.publish(number, mine, [0, 1, 2])
        out.ready(layers=slice(0, 2))
        if number % 10:
            out.ready(layers=slice(2, 4))
            out.finish()
        else:
            out.abort("the request was cancelled")
        await conn.pull(number, theirs, [0, 1, 2])
        keys = [max(0, number - ago).to_bytes(32) for ago in range(3)]
        await store.get(keys, theirs, [0, 1, 2])
        await store.put(keys[:1], mine, [0])
        await asyncio.to_thread(_PAUSE.wait, _PAUSE_S)


def _cache() -> kvwire.PagedCache:
    tensors = [np.zeros((4, 2, 16, 2, 64), np.float16) for _ in range(4)]
    return kvwire.PagedCache(SPEC, tensors, layout="NHD")
