"""The proxy's own routes and limits: /fleet, /metrics, /health, /drain, 429."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import pytest
from aiohttp import web

from kvwire.directory import open_directory
from kvwire_vllm.announce import DECODE
from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.fleet import EngineFleet
from packages.vllm.tests.support.proxies import (
    ASK,
    D1,
    D2,
    HERE,
    P1,
    PATH,
    Engines,
    app,
    call,
    member,
    operate,
    post,
    record,
    refused,
    turns_until,
    user_of,
    when,
)
from tests.directory.records import a_lease_has_ended
from tests.support.pairs import until
from tests.support.servers import nats_server, redis_server

SERVERS: Final = {"redis": redis_server, "nats": nats_server}
LEASE_S: Final = 2.0

# --- the application ------------------------------------------------------------------


async def test_too_many_requests() -> None:
    may_answer = asyncio.Event()
    network = Engines(d1=when(may_answer), d2=when(may_answer))
    application = app(network, running_max=1)
    asking = asyncio.ensure_future(post(application))
    await turns_until(lambda: len(network.asked) == 2)
    said = await post(application)
    assert said.status_code == 429
    assert int(said.headers["retry-after"]) >= 1
    assert "1 requests are running" in said.json()["error"]["message"]
    (shown,) = (await call(application, "GET", "/fleet")).json()["requests"]
    assert shown["waits_for"] == "the first token"
    assert shown["engines"] == [P1.url, D1.url]
    may_answer.set()
    assert (await asking).status_code == 200
    text = (await call(application, "GET", "/metrics")).text
    for line in (
        'kvwire_proxy_requests_total{status="200"} 1.0',
        'kvwire_proxy_requests_total{status="429"} 1.0',
        "kvwire_proxy_rejected_total 1.0",
        "kvwire_proxy_running 0.0",
        'kvwire_proxy_engine_up{engine="http://p1",role="prefill"} 1.0',
    ):
        assert line in text


async def test_a_bug_is_not_counted_as_a_client_that_has_left() -> None:
    async def bug(_: dict[str, Any]) -> Any:
        raise ZeroDivisionError

    application = app(Engines(p1=bug, p2=bug, d1=bug, d2=bug))
    assert (await post(application)).status_code == 500
    text = (await call(application, "GET", "/metrics")).text
    assert 'kvwire_proxy_requests_total{status="500"} 1.0' in text


async def test_health_is_that_of_the_engines() -> None:
    """A prefill engine can answer alone."""
    application = app(Engines(d1=refused, d2=refused))
    assert (await post(application)).status_code == 200
    assert (await call(application, "GET", "/health")).status_code == 200
    dead = Engines(p1=refused, p2=refused, d1=refused, d2=refused)
    application = app(dead)
    assert (await call(application, "GET", "/health")).status_code == 200
    await post(application)
    assert (await call(application, "GET", "/health")).status_code == 503
    nobody = app(Engines(), fleet=EngineFleet())
    assert (await call(nobody, "GET", "/health")).status_code == 503
    said = await post(nobody)
    assert said.status_code == 503
    assert (await call(nobody, "GET", "/v1/models")).status_code == 503
    why = "no engine takes requests: none is known"
    assert said.json()["error"]["message"] == why


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_directory_server_that_is_killed_costs_no_request(kind: str) -> None:
    """Its engines stay known for longer than a lease, and new ones are found again."""
    fleet, outcomes, over = EngineFleet(), Counter[int](), asyncio.Event()
    with SERVERS[kind]() as server:
        url = f"{kind}://127.0.0.1:{server.port}"
        engines = open_directory(url)
        await engines.announce(record(1, DECODE, "1" * 32, lease_s=LEASE_S))
        discovery = Discovery(open_directory(url), fleet, HERE)
        proxy = app(Engines(), fleet=fleet, discovery=discovery)
        checking = asynccontextmanager(proxy.checking)
        async with checking(web.Application()), user_of(proxy) as user:

            async def ask_on() -> None:
                while not over.is_set():
                    outcomes[(await user.post(PATH, json=ASK)).status_code] += 1

            await until(lambda: len(fleet.engines) == 1)
            clients = [asyncio.ensure_future(ask_on()) for _ in range(4)]
            server.kill()
            announced = asyncio.ensure_future(
                engines.announce(record(2, DECODE, "2" * 32, lease_s=LEASE_S))
            )
            await a_lease_has_ended(1.2 * LEASE_S)
            answers = outcomes[200]
            await until(lambda: outcomes[200] > answers)
            assert [engine.url for engine in fleet.engines] == ["http://127.0.0.1:1"]
            server.start()
            await announced
            await until(lambda: len(fleet.engines) == 2)
            over.set()
            await asyncio.gather(*clients)
        await engines.close()
    assert outcomes.keys() == {200}


async def test_draining_an_engine() -> None:
    may_answer = asyncio.Event()

    network = Engines(d1=when(may_answer))
    application = app(network)

    drain = partial(operate, application, "/drain")
    asking = asyncio.ensure_future(post(application))
    await turns_until(lambda: "d1" in network.hosts())
    assert await drain(engine=D1.url) == (202, {"engine": D1.url, "running": 1})
    waiting = asyncio.ensure_future(drain(engine=f"{D1.url}/", wait_s=30))
    for _ in range(3):
        await post(application)
    assert network.hosts().count("d1") == 1
    may_answer.set()
    assert await waiting == (200, {"engine": D1.url, "running": 0})
    assert (await asking).status_code == 200
    await drain(engine=D1.url, drain=False)
    for _ in range(2):
        await post(application)
    assert network.hosts().count("d1") == 2
    assert (await drain(engine="http://nobody"))[0] == 400
    assert (await drain(wait_s="x"))[0] == 400


async def test_what_engines_wait_for_is_shown() -> None:
    """To operators by engine, and by role to clients, who must not learn addresses."""
    network = Engines(p1=refused)
    application = app(network, prefill=[P1], decode=[D1])
    await operate(application, "/drain", engine=D1.url)
    said = await post(application)
    assert said.status_code == 503
    shown = (await call(application, "GET", "/fleet")).json()["engines"]
    restart = 'its restart, or POST /drain with "drain": false'
    assert {one["state"]: one["waits_for"] for one in shown} == {
        "draining": restart,
        "down": "an answer to /health: Connection refused",
    }
    assert (
        f"decode is draining and waits for {restart}"
        in (await call(application, "GET", "/health")).json()["status"]
    )
    network.handlers.clear()
    for engine in application._fleet.engines:
        await network.probe(engine)
    assert (await post(application)).status_code == 200


@pytest.mark.parametrize(
    ("key", "client", "header", "status"),
    [
        (b"", "127.0.0.1", "", 200),
        (b"", "10.0.0.1", "", 403),
        (b"secret", "127.0.0.1", "", 403),
        (b"secret", "127.0.0.1", "Bearer " + b"other".hex(), 403),
        (b"secret", "10.0.0.1", "Bearer " + b"secret".hex(), 200),
    ],
)
@pytest.mark.parametrize("path", ["/drain", "/migrate"])
async def test_who_may_drain_and_move(
    path: str, key: bytes, client: str, header: str, status: int
) -> None:
    application = app(Engines(), operator_key=key, migrate=True)
    said = await call(
        application,
        *("POST", path, client),
        json={"engine": D1.url},
        headers={"authorization": header},
    )
    assert said.status_code == status


async def test_an_engine_that_is_given_up_costs_another_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was silent for too long, so what waits for it is asked elsewhere."""

    network = Engines(d1=when(asyncio.Event()))
    fleet = EngineFleet([], [D1, D2])
    application = app(network, fleet=fleet)
    asking = asyncio.ensure_future(post(application))
    await turns_until(lambda: "d1" in network.hosts())
    fleet.engines[0].give_up()
    assert (await asking).json() == {"tokens": 9}
    assert network.hosts() == ["d1", "d2"]
    assert f"{D1.url}: it does not answer" in caplog.text


async def test_what_is_known_of_engines() -> None:
    fleet = EngineFleet([P1], [D1])
    fleet.joined(*member(5, labels={"carrying": "tcp:3"}, load=0.25))
    said = (await call(app(Engines(), fleet=fleet), "GET", "/fleet")).json()
    found, *others = said["engines"]
    assert (found["url"], found["state"]) == ("http://127.0.0.1:5", "starting")
    assert found["waits_for"] == "its first answer to /health"
    assert (found["load"], found["labels"]["carrying"]) == (0.25, "tcp:3")
    assert [one["url"] for one in others] == [D1.url, P1.url]
    assert said["requests"] == []
