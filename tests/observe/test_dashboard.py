"""The dashboard and the alert rules ask for metrics that the collectors have.

Its panels are asked of a real Prometheus that scrapes a busy pair.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry, start_http_server

import kvwire
from kvwire.observe.prometheus import CommunicatorCollector
from kvwire_store import BlockStore
from kvwire_store.prometheus import StoreCollector
from kvwire_vllm.metrics import FIELDS, REASONS, STORE_FIELDS
from kvwire_vllm.proxy.client import EngineClient
from kvwire_vllm.proxy.dispatch import Dispatcher
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.view import ProxyCollector, ProxyState
from packages.store.tests.server_child import serving
from tests.support.caches import Memory
from tests.support.servers import Server, free_port
from tests.support.tree import ROOT
from tests.support.waiting import eventually

FOLDER: Final = ROOT / "docs" / "observe"
RUNBOOK: Final = (ROOT / "docs" / "howto" / "observe.md").read_text()
PROGRAM: Final = "prometheus"
# Two scrapes within each window, and a window within the time a test may take.
_SCRAPE: Final = "200ms"
_WINDOW: Final = "2s"
# Of the alert rules: five minutes are ten scrapes, and a busy machine answers each.
_MINUTE_MS: Final = 1_000
_FAST_SCRAPE: Final = "500ms"
# Never set.
_PAUSE: Final = threading.Event()
_PAUSE_S: Final = 0.01

DASHBOARD: Final[dict[str, Any]] = json.loads((FOLDER / "grafana.json").read_text())
PANELS: Final[list[dict[str, Any]]] = DASHBOARD["panels"]
_NAME: Final = re.compile(r"(?<![\w:])kvwire_\w+")
_SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


async def exported() -> set[str]:
    fleet = EngineFleet()
    proxy = ProxyState(fleet, Dispatcher(EngineClient(), fleet))
    async with (
        kvwire.open() as communicator,
        BlockStore.open(["memory:1MiB"]) as store,
    ):
        families = [
            *CommunicatorCollector(communicator).collect(),
            *StoreCollector(store).collect(),
            *ProxyCollector(proxy).collect(),
        ]
    return {f.name + end for f in families for end in _SUFFIXES.get(f.type, ("",))}


async def test_every_metric_that_is_asked_for_is_exported() -> None:
    names = await exported()
    for file in ("grafana.json", "alerts.yaml"):
        asked = set(_NAME.findall((FOLDER / file).read_text()))
        assert len(asked) > 5
        assert not asked - names, file


def test_every_metric_of_the_connector_is_on_its_page() -> None:
    page = (ROOT / "docs" / "howto" / "vllm.md").read_text()
    named = set(re.findall(r"`vllm:kvwire_(\w+)`", page))
    assert named == {*FIELDS, *STORE_FIELDS, "unmoved_prompts_total", "info"}


def test_every_reason_of_the_connector_is_on_its_page() -> None:
    page = (ROOT / "docs" / "howto" / "vllm.md").read_text()
    _, _, section = page.partition("## Prompts that are computed twice")
    table, _, _ = section.partition("\n## ")
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {*REASONS}


def test_grafanas_own_types_read_the_dashboard() -> None:
    """Its SDK knows every field: what it writes of what it read is the same again."""
    plugins.register_default_plugins()
    read = Dashboard.from_json(DASHBOARD)
    written = json.loads(JSONEncoder().encode(read))
    assert _kept(DASHBOARD, written) == DASHBOARD
    assert {panel["type"] for panel in written["panels"]} == {"timeseries"}


def test_no_two_panels_share_a_place_or_a_number() -> None:
    places = set()
    for panel in PANELS:
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        places.add((where["x"], where["y"]))
        assert len(panel["targets"]) == 1
    numbers = [panel["id"] for panel in PANELS]
    assert len(places) == len(set(numbers)) == len(numbers)


def _kept(asked: object, written: Any) -> object:
    """What was written of the fields that were there; defaults are left out."""
    if isinstance(asked, dict):
        return {key: _kept(asked[key], written[key]) for key in asked if key in written}
    if isinstance(asked, list):
        return [_kept(*pair) for pair in zip(asked, written, strict=True)]
    return written


def test_every_alert_has_one_entry_and_names_it() -> None:
    rules = (FOLDER / "alerts.yaml").read_text()
    alerts = re.findall(r"^ +- alert: (\w+)$", rules, re.MULTILINE)
    entries = re.findall(r'^\| <a id="(\w+)"></a>`(\w+)` \|', RUNBOOK, re.MULTILINE)
    assert len(alerts) > 10
    assert entries == [(alert.lower(), alert) for alert in alerts]
    named = re.findall(r"runbook: 'docs/howto/observe\.md#(\w+)'", rules)
    assert named == [alert.lower() for alert in alerts]


# --- a real Prometheus ----------------------------------------------------------------


def scrape_block() -> str:
    """What the page has a reader put into `prometheus.yml`."""
    (found,) = re.findall(r"^```yaml\n(.*?)^```$", RUNBOOK, re.MULTILINE | re.DOTALL)
    return str(found)


def query_of(panel: dict[str, Any]) -> str:
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

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = self.ask("alerts")["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}

    def judged(self) -> bool:
        """Whether every rule has been evaluated, without an error."""
        groups = self.ask("rules")["groups"]
        return all(rule["health"] == "ok" for one in groups for rule in one["rules"])

    def answers(self, query: str) -> bool:
        with suppress(OSError):  # it is starting
            return bool(self.ask("query", query=query)["result"])
        return False


def quick(rules: str) -> str:
    """Alert rules in which a minute is a fraction of a second."""
    minutes = re.sub(r"\b1h\b", "60m", rules)
    return re.sub(r"\b(\d+)m\b", lambda m: f"{int(m[1]) * _MINUTE_MS}ms", minutes)


@contextmanager
def prometheus(port: int, *, fast: bool = False) -> Iterator[Prometheus]:
    """Run a server that scrapes a port of this machine."""
    with tempfile.TemporaryDirectory(prefix="kvwire-prometheus-") as folder:
        config = scrape_block()
        rules = FOLDER / "alerts.yaml"
        if fast:
            rules = Path(folder) / "alerts.yaml"
            rules.write_text(quick((FOLDER / "alerts.yaml").read_text()))
        for old, new in (
            ("rule_files: [alerts.yaml]", f"rule_files: ['{rules}']"),
            ('["10.0.0.7:9400", "10.0.0.8:9400"]', f'["127.0.0.1:{port}"]'),
        ):
            assert old in config
            config = config.replace(old, new)
        scrape = _FAST_SCRAPE if fast else _SCRAPE
        pace = f"scrape_interval: {scrape}, scrape_timeout: {scrape}"
        if fast:
            pace += f", evaluation_interval: {scrape}"
        file = Path(folder) / "prometheus.yml"
        file.write_text(f"global: {{{pace}}}\n{config}")
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
        BlockStore.open(["memory:64MiB"]) as store,
    ):
        communicators = CommunicatorCollector(prefill)
        communicators.add(decode)
        registry.register(communicators)
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
    prefill: kvwire.Communicator, conn: kvwire.Connection, store: BlockStore
) -> None:
    """Transfers, of which each tenth is given up, and blocks that come and go."""
    mine, theirs = Memory().cache, Memory().cache
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


@pytest.mark.skipif(
    shutil.which(PROGRAM) is None,
    reason="no prometheus: apt-get install prometheus, or its release on the PATH",
)
async def test_a_prometheus_answers_each_panel_and_takes_the_rules() -> None:
    async with busy_pair() as port:
        with prometheus(port) as server:
            for panel in PANELS:
                answered = partial(server.answers, query_of(panel))
                assert await asyncio.to_thread(eventually, answered), panel["title"]
            groups = await asyncio.to_thread(server.ask, "rules")
    rules = [rule for group in groups["groups"] for rule in group["rules"]]
    assert len(rules) > 5
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}  # not evaluated yet
    assert not [rule for rule in rules if rule.get("lastError")]


_STORED: Final = "rate(kvwire_store_written_blocks_total[5s]) > 0"


@contextmanager
def puts(where: str) -> Iterator[None]:
    """Have a thread put blocks into a store server, whatever becomes of it."""
    over = threading.Event()

    async def work() -> None:
        cache = Memory().cache
        async with BlockStore.open(["memory:1MiB", where]) as store:
            for number in range(1_000_000):
                if over.is_set():
                    return
                await store.put([number.to_bytes(32)], cache, [0])
                await asyncio.to_thread(over.wait, _PAUSE_S)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(PROGRAM) is None,
    reason="no prometheus: apt-get install prometheus, or its release on the PATH",
)
async def test_the_alerts_of_an_operators_walk_are_true(tmp_path: Path) -> None:
    """A store server at work, whose disk goes, which is killed, and comes back."""
    port, metrics = free_port(), free_port()
    disk = tmp_path / "kv"
    command = [
        f"--metrics=127.0.0.1:{metrics}",
        "--tier=memory:1MiB",
        f"--tier=disk:{disk}?size=8MiB",
    ]

    address = f"kvwire://127.0.0.1:{port}"
    with puts(address), prometheus(metrics, fast=True) as server:
        async with serving(*command, port=port):
            assert await asyncio.to_thread(eventually, partial(server.answers, _STORED))
            assert await asyncio.to_thread(eventually, server.judged)
            await fires(server, set())
            shutil.rmtree(disk)
            await fires(server, {"KvwireStoreRefuses", "KvwireStoreTrouble"})
        await fires(server, {"KvwireTargetDown"})
        async with serving(*command, port=port):
            await fires(server, set())
            assert await asyncio.to_thread(eventually, partial(server.answers, _STORED))


async def fires(server: Prometheus, alerts: set[str]) -> None:
    """These alerts fire at last, and no others."""
    same = await asyncio.to_thread(eventually, lambda: server.firing() == alerts)
    assert same, (alerts, server.firing())


# Of a minute each: what a tier has, what it has evicted, and whether blocks were found.
_FULL: Final = {"kvwire_store_blocks": "100+0x120"}
_THRASH: Final = _FULL | {"kvwire_store_evicted_blocks_total": "0+10x120"}
_HITS: Final = "kvwire_store_hit_blocks_total"
_MISSES: Final = "kvwire_store_missed_blocks_total"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
@pytest.mark.parametrize(
    ("alert", "tier", "store", "fires"),
    [
        ("KvwireStoreTooSmall", _THRASH, {_HITS: "0+1x120", _MISSES: "0+9x120"}, True),
        ("KvwireStoreTooSmall", _THRASH, {_HITS: "0+9x120", _MISSES: "0+1x120"}, False),
        ("KvwireStoreTooSmall", _FULL, {_HITS: "0+1x120", _MISSES: "0+9x120"}, False),
        ("KvwireTargetDown", {}, {"up": "0+0x120"}, True),
        ("KvwireTargetDown", {}, {"up": "1+0x120"}, False),
        (
            "KvwireStoreRefuses",
            {},
            {"kvwire_store_refused_blocks_total": "0+1x120"},
            True,
        ),
        (
            "KvwireStoreRefuses",
            {},
            {"kvwire_store_refused_blocks_total": "7+0x120"},
            False,
        ),
    ],
)
def test_an_alert_fires_when_it_should(
    alert: str, tier: dict[str, str], store: dict[str, str], fires: bool, tmp_path: Path
) -> None:
    """A full tier that evicts what nobody asks for again is no fault."""
    series = [
        {"series": f'{name}{{job="kvwire",instance="a",store="s"{more}}}', "values": v}
        for labelled, more in ((tier, ',tier="t"'), (store, ""))
        for name, v in labelled.items()
    ]
    query = {
        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
        "eval_time": "110m",
        "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
    }
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [query]}
    rules = {"rule_files": [str(FOLDER / "alerts.yaml")], "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(rules))  # JSON is YAML
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
