"""Verbs at the proxy, carried out by a real store server behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvwire import BlockStore, StoreServer, UsageError
from kvwire.integrations.vllm.proxy.app import ProxyApp
from kvwire.integrations.vllm.proxy.client import EngineClient
from kvwire.integrations.vllm.proxy.engines import VllmEngine
from kvwire.integrations.vllm.proxy.store_verbs import StoreBehind
from kvwire.kv.hashing import HashScheme
from kvwire.observe.http import MetricsServer
from kvwire.security.keys import write_key_file
from kvwire.store.server.orders import StoreOrders
from tests.support.caches import Filled
from tests.support.engines.proxies import (
    D1,
    D2,
    Engines,
    Handler,
    Said,
    answer,
    app,
    call,
    fails,
    fine,
    fleet_in_turns,
    post,
    says,
    turns_until,
    when,
)

TOKENS = list(range(100, 116))
HASHES = HashScheme(4).block_hashes(TOKENS)
CACHE = Filled(seed=1).cache
WELL: dict[str, Any] = {
    "prefix": 4,
    "blocks": ["done"] * 4,
    "reasons": {},
    "counts": {"done": 4},
    "held": {},
}


class Behind(Engines):
    """Engines that tokenize, and a real store."""

    def __init__(self, store: str, **handlers: Any) -> None:
        super().__init__(**handlers)
        self.store = store
        self.tokenized: list[Any] = []
        self.foreign: list[Any] = []  # the answer of a server that is no store

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | bytes | None,
    ) -> AsyncIterator[Any]:
        if url.startswith(self.store) and self.foreign:
            yield answer(200, self.foreign[0])
        elif url.startswith(self.store):
            asking = EngineClient._request(self, method, url, headers, body)
            async with asking as said:
                yield said
        elif url.endswith("/tokenize"):
            self.tokenized.append(body)
            refuses = isinstance(body, Mapping) and body.get("prompt") == "refuse"
            yield answer(400 if refuses else 200, {"tokens": TOKENS})
        else:
            async with super()._request(method, url, headers, body) as said:
                yield said


@dataclass
class Site:
    """A store with a tenant's blocks, and a proxy before it."""

    store: BlockStore
    http: MetricsServer
    key: dict[str, str]
    network: Behind
    proxy: ProxyApp

    async def order(self, verb: str, **fields: Any) -> tuple[int, Any]:
        said = await call(
            self.proxy, "POST", f"/kv/{verb}", json=fields, headers=self.key
        )
        return said.status_code, said.json()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    for who in ("x", "all"):
        write_key_file(tmp_path / who)
    key = (tmp_path / "x").read_text().strip()
    tenants = [f"x?key={tmp_path}/x"]
    async with (
        BlockStore.open(["memory:1MiB"], tenants=tenants) as store,
        StoreServer(store, "127.0.0.1:0", psk_file=str(tmp_path / "all")) as server,
    ):
        await store.put(HASHES, CACHE, range(4), tenant="x")
        orders = StoreOrders(server)
        with MetricsServer(store, "127.0.0.1:0", orders=orders) as http:
            url = http.url.removesuffix("/metrics")
            network = Behind(url)
            proxy = app(network, store=StoreBehind(url, 4))
            authorization = {"authorization": f"Bearer {key}"}
            async with proxy.running():
                yield Site(store, http, authorization, network, proxy)


async def test_a_prompt_names_blocks_by_tokens_or_text(site: Site) -> None:
    status, told = await site.order("pin", prompt=TOKENS, ttl_s=60)
    assert (status, told["counts"]) == (200, {"done": 4})
    assert site.store.tenant_stats()["x"].tiers["memory:1MiB"].pinned_bytes
    for asked in ({"prompt": "text"}, {"messages": [{"role": "user"}], "model": "m"}):
        status, told = await site.order("locate", **asked)
        assert (status, told["prefix"]) == (200, 4)
        assert site.network.tokenized[-1] == asked
    status, told = await site.order("unpin", hashes=[one.hex() for one in HASHES])
    assert (status, told["counts"]) == (200, {"done": 4})
    status, told = await site.order("locate", prompt="refuse")
    assert status == 400
    assert "cannot tokenize the prompt" in told["error"]["message"]


async def test_the_store_checks_the_key(site: Site) -> None:
    site.key = {}
    status, told = await site.order("locate", prompt=TOKENS)
    assert (status, "authorization" in told["error"]) == (401, True)
    # And no engine has been given it.
    sent = site.network.headers.values()
    assert not any("authorization" in headers for headers in sent)


async def test_a_request_under_way_names_its_prompt(site: Site) -> None:
    may_answer = asyncio.Event()
    site.network.handlers["d1"] = site.network.handlers["d2"] = when(may_answer)
    ask = {"prompt": TOKENS, "max_tokens": 9}
    names = {"x-request-id": "mine"}
    asking = asyncio.ensure_future(post(site.proxy, ask, headers=names))
    await turns_until(lambda: any(body for _, body in site.network.asked))
    status, told = await site.order("retain", request="mine", priority=90)
    assert (status, told["counts"]) == (200, {"done": 4})
    may_answer.set()
    assert (await asking).status_code == 200
    status, told = await site.order("locate", request="mine")
    assert status == 404
    assert "no running request has the id 'mine'" in told["error"]["message"]


async def test_a_locate_shows_engines_that_report_their_blocks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_in_turns([], [D1, D2])

    def holders(engines: list[VllmEngine], tokens: list[int]) -> Mapping[str, int]:
        return {engine.url: 9 for engine in engines if engine.url == D1.url}

    for policy in fleet._policies.values():
        monkeypatch.setattr(policy, "holders", holders)
    url = site.http.url.removesuffix("/metrics")
    site.proxy = app(site.network, fleet=fleet, store=StoreBehind(url, 4))
    status, told = await site.order("locate", prompt=TOKENS)
    assert status == 200
    assert told["held"][D1.url] == [True, True, False, False]
    assert told["held"]["memory:1MiB"] == [True] * 4


def blocks_of(size: int) -> Handler:
    """An engine that reports the size of its blocks."""
    line = f'vllm:cache_config_info{{engine="0",block_size="{size}"}} 1.0\n'

    async def handler(body: dict[str, Any]) -> Said:
        return await (fine if body else says(line.encode(), headers={}))(body)

    return handler


async def test_an_engine_reports_the_size_of_its_blocks(site: Site) -> None:
    url = site.http.url.removesuffix("/metrics")
    site.proxy = app(site.network, store=StoreBehind(url))
    status, told = await site.order("locate", prompt=TOKENS)
    assert (status, "--store-block-tokens" in told["error"]["message"]) == (503, True)
    site.network.handlers |= {"d1": blocks_of(4), "d2": blocks_of(4)}
    status, told = await site.order("locate", prompt=TOKENS)
    assert (status, told["prefix"]) == (200, 4)
    # By another size all blocks would have other names, and seem to be missing.
    site.proxy = app(site.network, store=StoreBehind(url, 16))
    status, told = await site.order("pin", prompt=TOKENS, ttl_s=60)
    assert status == 409
    why = told["error"]["message"]
    assert "--store-block-tokens 16, and an engine's blocks have 4 tokens" in why
    hashes = [one.hex() for one in HASHES]
    status, told = await site.order("pin", hashes=hashes, ttl_s=60)
    assert (status, told["counts"]) == (200, {"done": 4})


async def test_an_engine_that_restarts_may_have_other_blocks(site: Site) -> None:
    url = site.http.url.removesuffix("/metrics")
    site.network.handlers |= {"d1": blocks_of(8)}
    fleet = fleet_in_turns([], [D1])
    site.proxy = app(site.network, fleet=fleet, store=StoreBehind(url))
    status, told = await site.order("locate", prompt=TOKENS)
    assert (status, told["counts"]) == (200, {"missing": 2})
    site.network.handlers |= {"d1": fails(503)}
    assert (await post(site.proxy)).status_code == 503
    site.network.handlers |= {"d1": blocks_of(4)}
    status, told = await site.order("locate", prompt=TOKENS)
    assert (status, told["prefix"]) == (200, 4)


async def test_without_a_store_there_are_no_verbs() -> None:
    said = await call(app(Engines()), "POST", "/kv/pin", json={"prompt": TOKENS})
    assert said.status_code == 404


async def test_a_move_to_an_engine_lets_it_load_what_the_store_has(site: Site) -> None:
    status, told = await site.order("move", prompt=[*TOKENS, 1], to=D1.url, model="m")
    assert (status, told["blocks"]) == (200, ["done"] * 4)
    # Of its blocks it computes none, since there is one more token.
    asked = ("d1", {"prompt": [*TOKENS, 1], "max_tokens": 1, "model": "m"})
    assert site.network.asked[-1] == asked
    # The tenant's key is for the store.
    assert "authorization" not in site.network.headers["d1"]
    # An engine loads from the first token on.
    await site.store.delete(HASHES[2:3], CACHE, tenant="x")
    status, told = await site.order("move", prompt=TOKENS, to=D2.url)
    assert (status, told["prefix"]) == (200, 2)
    assert told["blocks"] == ["done", "done", "missing", "deferred"]
    why = {at[0]: reason for reason, at in told["reasons"].items()}
    assert why[2] == "it is not in the store"
    assert "one before it is not in the store" in why[3]
    assert site.network.asked[-1] == ("d2", {"prompt": TOKENS[:9], "max_tokens": 1})
    status, told = await site.order("move", prompt=TOKENS[:8], to=D2.url)
    assert (status, told["blocks"]) == (200, ["done", "done"])
    ((_, last),) = site.network.asked[-1:]
    assert (last["prompt"][:8], len(last["prompt"])) == (TOKENS[:8], 9)
    # Without any the engine would compute them, which is no move.
    await site.store.delete(HASHES[:1], CACHE, tenant="x")
    status, told = await site.order("move", prompt=TOKENS, to=D1.url)
    assert (status, told["prefix"]) == (200, 0)
    assert len([body for _, body in site.network.asked if body]) == 3


async def test_a_move_to_an_engine_that_cannot_is_refused_or_deferred(
    site: Site,
) -> None:
    site.network.handlers["d1"] = fails(503)
    status, told = await site.order("move", prompt=TOKENS, to=D1.url)
    assert (status, told["counts"]) == (200, {"deferred": 4})
    assert list(told["reasons"]) == [f"{D1.url}: it has answered with 503"]
    hashes = [one.hex() for one in HASHES]
    for fields, why in (
        ({"hashes": hashes, "to": D1.url}, "by prompt, messages or request"),
        ({"prompt": TOKENS, "to": "http://d9"}, "no engine at 'http://d9'"),
    ):
        status, told = await site.order("move", **fields)
        assert (status, why in told["error"]["message"]) == (400, True)
    # And before anything else the store checks the key.
    site.key = {}
    status, told = await site.order("move", prompt=TOKENS, to=D2.url)
    assert status == 401
    assert not any(body for host, body in site.network.asked if host == "d2")
    with pytest.raises(UsageError, match="ask its proxy"):
        await site.store.move(HASHES, CACHE, to=D1.url, tenant="x")


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        "<html>",
        {**WELL, "blocks": ["here"]},
        {**WELL, "prefix": -1},
        {**WELL, "prefix": 5},
        {**WELL, "prefix": "all"},
        {**WELL, "reasons": {"why": [4]}},
        {**WELL, "reasons": {"why": [-1]}},
        {**WELL, "held": None},
    ],
)
async def test_what_is_no_store_is_named(site: Site, said: Any) -> None:
    """The option names a server that serves something else."""
    site.network.foreign = [said]
    for verb, fields in (("locate", {}), ("move", {"to": D1.url})):
        status, told = await site.order(verb, prompt=TOKENS, **fields)
        assert status == 503
        assert "the answer is no store's; --store" in told["error"]["message"]
    site.network.foreign = [WELL]
    status, told = await site.order("locate", prompt=TOKENS)
    assert (status, told["prefix"]) == (200, 4)
