"""Engines that compute each other's prompts again: who notices, and how soon."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

import kvwire
from kvwire.integrations.vllm.metrics import REASONS
from kvwire.integrations.vllm.proxy import checking
from kvwire.integrations.vllm.proxy.app import ProxyApp
from kvwire.integrations.vllm.proxy.engines import VllmServer
from kvwire.integrations.vllm.proxy.policy import AT_ONCE, IN_SEQUENCE
from kvwire.integrations.vllm.proxy.sharing import (
    FOREIGN,
    MOVED,
    UNSENT,
    EngineReading,
    SharedPrompts,
    judge,
    read_metrics,
)
from tests.support.engines.proxies import (
    D1,
    P1,
    Engines,
    Said,
    answer,
    app,
    call,
    fleet_in_turns,
    post,
    refused,
    says,
    turns_until,
)
from tests.support.pairs import turns

OF_VLLM = 'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
LABELS = 'engine="0",model_name="m"'


@dataclass
class FakeVllm:
    """An engine with counters, whose prompts move, or do not for a reason."""

    role: str = "kv_both"
    connector: bool = True
    reason: str = ""
    # What it answers as prefill; None for kvwire's.
    params: dict[str, Any] | None = None
    version: str = kvwire.__version__
    more: str = OF_VLLM
    results: Counter[str] = field(default_factory=Counter)

    async def __call__(self, body: dict[str, Any]) -> Said:
        if not body:
            return await says(self.metrics().encode(), headers={})(body)
        asked = body.get("kv_transfer_params") or {}
        said: dict[str, Any] = {"tokens": body["max_tokens"]}
        if asked.get("do_remote_decode"):
            here = {"transfer_id": asked["transfer_id"] or "mine"}
            here |= {"do_remote_prefill": True}
            params = here if self.params is None else self.params
            if not self.connector:
                params = self.params or {}
            said["kv_transfer_params"] = params or None
        elif asked.get("do_remote_prefill") and self.connector:
            self.results[self.reason or MOVED] += 1
        return answer(200, said)

    def metrics(self) -> str:
        if not self.connector:
            return self.more
        lines = [
            f'vllm:kvwire_unmoved_prompts_total{{{LABELS},reason="{name}"}} '
            f"{float(self.results[name])}"
            for name in REASONS
        ]
        moved, begun = self.results[MOVED], self.results.total()
        labels = f'{LABELS},version="{self.version}",kv_role="{self.role}"'
        return self.more + "\n".join(
            [
                "# TYPE vllm:kvwire_missing_blocks histogram",
                f'vllm:kvwire_missing_blocks_bucket{{{LABELS},le="0.0"}} {moved}.0',
                f'vllm:kvwire_missing_blocks_bucket{{{LABELS},le="+Inf"}} {begun}.0',
                f"vllm:kvwire_missing_blocks_count{{{LABELS}}} {begun}.0",
                f"vllm:kvwire_sent_bytes_count{{{LABELS}}} 7.0",
                f"vllm:kvwire_sent_bytes_created{{{LABELS}}} 1.79e9",
                f'vllm:kvwire_unmoved_prompts_created{{{LABELS},reason="missing"}} 9e9',
                *lines,
                f"vllm:kvwire_info{{{labels}}} 1.0",
                "",
            ]
        )


NIXL = {"remote_engine_id": "e", "remote_block_ids": [1], "do_remote_prefill": True}
NIXL_METRICS = f"{OF_VLLM}vllm:nixl_bytes_transferred_count{{{LABELS}}} 3.0\n"
STORE_METRICS = f"{OF_VLLM}vllm:kvwire_save_s_count{{{LABELS}}} 5.0\n"
EXTERNAL = (
    f'{OF_VLLM}vllm:prompt_tokens_by_source_total{{{LABELS},source="'
    'external_kv_transfer"} 99.0\n'
)

# Engines, the order, and by engine: the finding, and words of its remedy.
SIBLINGS: dict[str, tuple[FakeVllm, FakeVllm, str, dict[str, tuple[str, str, str]]]] = {
    "neither has a connector": (
        FakeVllm(connector=False),
        FakeVllm(connector=False),
        AT_ONCE,
        {
            "p1": ("connector", "missing", '"kv_role": "kv_producer"'),
            "d1": ("connector", "missing", '"kv_role": "kv_consumer"'),
        },
    ),
    "prefill has, decode has not": (
        FakeVllm("kv_producer"),
        FakeVllm(connector=False),
        AT_ONCE,
        {"d1": ("connector", "missing", "KvwireConnector")},
    ),
    "the same in sequence": (
        FakeVllm("kv_producer"),
        FakeVllm(connector=False),
        IN_SEQUENCE,
        {"d1": ("connector", "missing", "KvwireConnector")},
    ),
    "decode has, prefill has not": (
        FakeVllm(connector=False),
        FakeVllm("kv_consumer"),
        AT_ONCE,
        {"p1": ("connector", "missing", "MultiConnector")},
    ),
    "prefill has another connector": (
        FakeVllm(connector=False, params=NIXL, more=NIXL_METRICS),
        FakeVllm("kv_consumer"),
        AT_ONCE,
        {"p1": ("connector", "missing", "KvwireConnector")},
    ),
    "prefill with MultiConnector answers for another child": (
        FakeVllm(params=NIXL),
        FakeVllm(),
        AT_ONCE,
        {"p1": ("prompts", "missing", "--order in-sequence")},
    ),
    "the key is not the proxy's": (
        FakeVllm(params={}),
        FakeVllm(),
        AT_ONCE,
        {"p1": ("prompts", "missing", "if it has the connector")},
    ),
    "decode refuses what the proxy names": (
        FakeVllm(),
        FakeVllm(reason="refused"),
        AT_ONCE,
        {"d1": ("prompts", "missing", "--psk-file")},
    ),
    "a wrong address": (
        FakeVllm(),
        FakeVllm(reason="unreachable"),
        AT_ONCE,
        {"d1": ("prompts", "missing", "--prefill URL=KV")},
    ),
    "other weights, or another release of vLLM": (
        FakeVllm(),
        FakeVllm(reason="unequal"),
        AT_ONCE,
        {"d1": ("prompts", "missing", "decode's log names the field")},
    ),
    "another key": (
        FakeVllm(),
        FakeVllm(reason="untrusted"),
        IN_SEQUENCE,
        {"d1": ("prompts", "missing", "psk_file")},
    ),
    "computed, and gone when decode asks": (
        FakeVllm(),
        FakeVllm(reason="unpublished"),
        IN_SEQUENCE,
        {"d1": ("prompts", "missing", "lease_s")},
    ),
    "every transfer breaks off": (
        FakeVllm(),
        FakeVllm(reason="missing"),
        IN_SEQUENCE,
        {"d1": ("prompts", "missing", "reason for each transfer")},
    ),
    "roles the wrong way round": (
        FakeVllm("kv_consumer"),
        FakeVllm("kv_producer"),
        AT_ONCE,
        {
            "p1": ("kv_role", "warn", "kv_producer"),
            "d1": ("kv_role", "warn", "kv_consumer"),
        },
    ),
    "other releases of kvwire": (
        FakeVllm(version="0.1"),
        FakeVllm(version="0.2"),
        AT_ONCE,
        {
            "p1": ("versions", "warn", "one release"),
            "d1": ("versions", "warn", "one release"),
        },
    ),
    "only a store's connector": (
        FakeVllm(connector=False, more=STORE_METRICS),
        FakeVllm(connector=False, more=f"{EXTERNAL}{STORE_METRICS}"),
        AT_ONCE,
        {
            "p1": ("connector", "missing", "KvwireConnector"),
            "d1": ("connector", "missing", "KvwireConnector"),
        },
    ),
    "metrics are off": (
        FakeVllm(connector=False, params={"transfer_id": "x"}, more="# nothing\n"),
        FakeVllm(),
        IN_SEQUENCE,
        {"p1": ("metrics", "warn", "--disable-log-stats")},
    ),
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are read without a pause, so that no test waits."""
    monkeypatch.setattr(checking, "PROBE_S", 0)
    monkeypatch.setattr(checking, "SOON_S", 0)


async def _findings(application: ProxyApp) -> dict[str, list[dict[str, str]]]:
    found = (await call(application, "GET", "/fleet")).json()["engines"]
    return {one["url"].removeprefix("http://"): one["findings"] for one in found}


@pytest.mark.parametrize("name", SIBLINGS)
async def test_it_is_said_within_ten_requests(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvwire.vllm")
    p1, d1, order, expected = SIBLINGS[name]
    for one in (p1, d1):
        one.results.clear()
    network = Engines(p1=p1, d1=d1)
    application = app(network, order, prefill=[P1], decode=[D1])
    async with application.running():
        asked = 0
        while {e for e, found in (await _findings(application)).items() if found} != {
            *expected
        }:
            assert (await post(application)).status_code == 200
            asked += 1
            assert asked <= 10
        found = await _findings(application)
        metrics = (await call(application, "GET", "/metrics")).text
    for engine, (about, state, words) in expected.items():
        (finding,) = found[engine]
        assert (finding["name"], finding["state"]) == (about, state)
        assert words in finding["remedy"]
        logged = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert sum(engine in one.getMessage() for one in logged) == 1
        role = {"p1": "prefill", "d1": "decode"}[engine]
        line = (
            f'kvwire_proxy_engine_computes_twice{{engine="http://{engine}",'
            f'role="{role}"}} {float(state == "missing")}'
        )
        assert line in metrics


@pytest.mark.parametrize(
    ("p1", "d1", "order"),
    [
        (FakeVllm("kv_producer"), FakeVllm("kv_consumer"), AT_ONCE),
        (FakeVllm("kv_producer"), FakeVllm("kv_consumer"), IN_SEQUENCE),
        # Two engines with another connector share prompts behind this order.
        (
            FakeVllm(connector=False, params=NIXL, more=NIXL_METRICS),
            FakeVllm(connector=False, more=NIXL_METRICS),
            IN_SEQUENCE,
        ),
    ],
)
async def test_nothing_is_said_where_nothing_is_wrong(
    p1: FakeVllm, d1: FakeVllm, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    network = Engines(p1=p1, d1=d1)
    application = app(network, order, prefill=[P1], decode=[D1])
    async with application.running():
        read = 0
        for _ in range(10):
            read = len(network.sent)
            assert (await post(application)).status_code == 200
        await turns_until(
            lambda: (
                {P1.url, D1.url}
                == {
                    url.removesuffix("/metrics")
                    for _, url, _ in network.sent[read:]
                    if url.endswith("/metrics")
                }
            )
        )
        assert await _findings(application) == {"p1": [], "d1": []}
    if d1.connector:
        assert d1.results == {MOVED: 10}
    assert not caplog.records


async def test_a_finding_ends(caplog: pytest.LogCaptureFixture) -> None:
    """An operator has opened the port: half of the recent prompts move again."""
    caplog.set_level(logging.INFO, "kvwire.vllm")
    decode = FakeVllm(reason="unreachable")
    application = app(Engines(d1=decode), prefill=[P1], decode=[D1])
    async with application.running():
        while not (await _findings(application))["d1"]:
            await post(application)
        decode.reason = ""
        while (await _findings(application))["d1"]:
            await post(application)
    assert decode.results[MOVED] <= 20
    assert "the finding about prompts is gone" in caplog.text


async def test_a_thousand_engines_are_read_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = [VllmServer(f"http://e{n}", (f"e{n}:1",)) for n in range(1000)]
    under_way = most = 0

    class Counted(Engines):
        @asynccontextmanager
        async def _request(self, *asked: Any) -> AsyncIterator[Said]:
            nonlocal under_way, most
            reads = asked[1].endswith("/metrics")
            under_way += reads
            most = max(most, under_way)
            await turns(5)
            async with super()._request(*asked) as said:
                yield said
            under_way -= reads

    network = Counted(**{f"e{n}": FakeVllm(connector=False) for n in range(1000)})
    application = app(network, prefill=servers[:500], decode=servers[500:])
    async with application.running():
        while not all((await _findings(application)).values()):
            await turns(1)
    assert 1 < most <= 32


async def test_one_engine_alone_shares_nothing() -> None:
    network = Engines(d1=FakeVllm(connector=False))
    application = app(network, prefill=[], decode=[D1])
    async with application.running():
        for _ in range(5):
            await post(application)
        assert (await _findings(application))["d1"] == []
    assert f"{D1.url}/metrics" not in [url for _, url, _ in network.sent]


async def test_metrics_are_read_only_if_there_were_requests() -> None:
    network = Engines(p1=FakeVllm("kv_producer"), d1=FakeVllm("kv_consumer"))
    application = app(network, prefill=[P1], decode=[D1])

    def reads() -> int:
        return [url for _, url, _ in network.sent].count(f"{D1.url}/metrics")

    async with application.running():
        await turns_until(lambda: reads() == 1)
        await post(application)
        await turns_until(lambda: reads() == 2)
        for _ in range(50):
            await call(application, "GET", "/fleet")
        assert reads() == 2


async def test_each_reading_shows_the_size_of_blocks() -> None:
    """An engine that restarts between two requests may have another one."""
    size = 'vllm:cache_config_info{block_size="4"} 1.0\n'
    network = Engines(p1=FakeVllm("kv_producer"), d1=FakeVllm("kv_consumer", more=size))
    fleet = fleet_in_turns([P1], [D1])
    engine = fleet.engines[1]
    engine.block_tokens = 8
    application = app(network, fleet=fleet)
    async with application.running():
        await turns_until(lambda: engine.shared.reading is not None)
        assert engine.block_tokens == 4


async def test_engines_that_cannot_be_read_are_read_again() -> None:
    """One that was not there yet, as its proxy was started first."""
    network = Engines(p1=refused, d1=FakeVllm("kv_consumer"))
    application = app(network, prefill=[P1], decode=[D1])
    async with application.running():
        await call(application, "GET", "/health")
        assert (await _findings(application))["p1"] == []
        network.handlers["p1"] = FakeVllm(connector=False)
        while not (found := (await _findings(application))["p1"]):
            await call(application, "GET", "/health")
        assert found[0]["name"] == "connector"


async def test_decode_does_not_wait_for_a_prompt_of_another_connector() -> None:
    network = Engines(p1=FakeVllm(params=NIXL), d1=FakeVllm())
    application = app(network, prefill=[P1], decode=[D1])
    assert (await post(application)).status_code == 200
    (engine,) = (await call(application, "GET", "/fleet")).json()["engines"][1:]
    assert engine["url"] == P1.url


# --- the parts ------------------------------------------------------------------------


def test_what_metrics_show() -> None:
    engine = FakeVllm("kv_consumer", more=f"{EXTERNAL}{NIXL_METRICS}")
    engine.results.update({MOVED: 5, "unreachable": 2, "refused": 1})
    assert read_metrics(engine.metrics()) == EngineReading(
        is_vllm=True,
        version=kvwire.__version__,
        kv_role="kv_consumer",
        others=("NixlConnector",),
        sent=7,
        results={MOVED: 5, "unreachable": 2, "refused": 1},
        external=99,
    )
    assert read_metrics("") == EngineReading(results={MOVED: 0})
    for text, size in (("128", 128), ("None", 0)):
        cache = f'vllm:cache_config_info{{block_size="{text}",engine="0"}} 1.0\n'
        assert read_metrics(f"{OF_VLLM}{cache}").block_tokens == size


def test_an_engine_that_starts_anew_counts_from_zero() -> None:
    shared = SharedPrompts()
    shared.take(EngineReading(results={MOVED: 5}))
    shared.take(EngineReading(results={MOVED: 7}))
    assert shared.recent == {MOVED: 7}
    shared.take(EngineReading(results={MOVED: 1, "missing": 2}))
    assert shared.recent == {MOVED: 8, "missing": 2}


def test_old_results_are_forgotten() -> None:
    shared = SharedPrompts()
    shared.note({MOVED: 1000})
    for _ in range(25):
        shared.note({UNSENT: 1})
    (finding,) = judge(shared, "prefill", in_sequence=False)
    assert finding.name == "prompts"


def test_few_lost_prompts_are_no_finding() -> None:
    for recent in ({"missing": 2}, {"missing": 5, MOVED: 5}):
        shared = SharedPrompts(recent=Counter(recent))
        assert not list(judge(shared, "decode", in_sequence=False))


@pytest.mark.parametrize("reason", [*REASONS, UNSENT, FOREIGN])
def test_each_reason_has_a_remedy(reason: str) -> None:
    shared = SharedPrompts(recent=Counter({reason: 3}))
    (finding,) = judge(shared, "decode", in_sequence=False)
    assert finding.text.startswith("3 of 3 were computed twice: ")
    assert finding.remedy
