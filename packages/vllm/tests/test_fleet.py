"""The engines of a proxy: which one it takes, how they live, and what it shows."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from kvwire import UsageError
from kvwire.directory import Record, open_directory
from kvwire_vllm.announce import BOTH, DECODE, PREFILL
from kvwire_vllm.proxy import client, prober
from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.engines import VllmEngine, VllmServer
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.members import AllowedHosts, read_member
from packages.vllm.tests.support.proxies import (
    ASK,
    D1,
    D2,
    P1,
    P2,
    PATH,
    Engines,
    Handler,
    app,
    broken,
    call,
    dies,
    fails,
    gone,
    operate,
    post,
    refused,
    user_of,
    when,
)
from tests.directory.records import a_lease_has_ended
from tests.support import virtual_time
from tests.support.pairs import until
from tests.support.servers import nats_server, redis_server

HERE = AllowedHosts()


def record(port: int, role: str, incarnation: str, **fields: Any) -> Record:
    """What an engine of this host announces."""
    http = {"http": f"http://127.0.0.1:{port}", "slots": "8"}
    return Record(
        name=f"{role}-{port}",
        address=f"tcp://127.0.0.1:{port}",
        incarnation=incarnation,
        role=role,
        labels=http | fields.pop("labels", {}),
        **fields,
    )


def member(port: int = 1, role: str = "decode", start: int = 1, **fields: Any) -> Any:
    """As a proxy reads it from a directory: its key, and its record."""
    said = record(port, role, f"{start:032x}", **fields)
    return said.key, read_member(said, HERE)


# --- the fleet ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        ([(0, 0.0, 0), (1, 0.0, 0)], 0),
        ([(2, 0.0, 0), (1, 0.0, 0)], 1),
        # What it says itself counts where other proxies keep it busy.
        ([(0, 0.5, 8), (3, 0.1, 8)], 1),
        ([(5, 0.5, 8), (3, 0.9, 0)], 1),
        ([(1, 0.0, 0), (1, 0.0, 0), (0, 0.0, 0)], 2),
    ],
)
def test_the_least_loaded(told: list[tuple[int, float, int]], taken: int) -> None:
    fleet = EngineFleet([VllmServer(f"http://e{i}", ()) for i in range(len(told))])
    for engine, (running, load, slots) in zip(fleet.engines, told, strict=True):
        engine.running, engine.load, engine.slots = running, load, slots
    assert fleet.pick(PREFILL, ()) is fleet.engines[taken]


def test_engines_with_equal_loads_take_turns() -> None:
    fleet = EngineFleet([P1, P2, D1])
    taken = [fleet.pick(PREFILL, ()) for _ in range(6)]
    assert taken == [*fleet.engines, *fleet.engines]


def test_engines_that_are_down_are_not_picked() -> None:
    fleet = EngineFleet([P1, P2])
    one, two = fleet.engines

    def taken(*tried: VllmEngine, down: bool = False) -> set[Any]:
        return {fleet.pick(PREFILL, tried, down=down) for _ in range(4)}

    one.lost("Connection refused")
    assert taken() == {two}
    assert taken(two) == {None}
    assert taken(two, down=True) == {one}
    assert taken(one, two, down=True) == {None}
    one.healthy()
    assert taken() == {one, two}
    two.slow = True
    assert taken() == {one}
    assert taken(one) == {two}
    assert fleet.lives()
    for engine in fleet.engines:
        engine.lost("Connection refused")
    assert not fleet.lives()


def test_who_answers() -> None:
    """A decode engine; a prefill engine before one that is down; one that is down."""
    fleet = EngineFleet([P1], [D1])
    prefill, decode = fleet.engines

    def answers(*tried: VllmEngine) -> VllmEngine | None:
        return fleet.pick_to_answer(tried)

    assert answers() is decode
    decode.slow = True
    assert answers() is decode
    decode.lost("Connection refused")
    assert answers() is prefill
    prefill.lost("Connection refused")
    assert answers() is decode
    assert answers(decode) is prefill
    assert answers(decode, prefill) is None


def test_one_server_in_both_roles() -> None:
    (engine,) = EngineFleet([P1], [P1]).engines
    assert engine.role == BOTH


def test_an_engine_is_there_when_it_has_answered_and_all_its_ranks_are() -> None:
    fleet = EngineFleet()

    def rank(number: int, start: int) -> None:
        labels = {"rank": str(number), "http": "http://127.0.0.1:1"}
        labels |= {"ranks": "2", "stages": "2"}
        fleet.joined(*member(7 + number, start=start, labels=labels))

    rank(1, 1)
    assert not fleet.engines
    rank(0, 2)
    (engine,) = fleet.engines
    assert engine.server.remote == ("tcp://127.0.0.1:7", "tcp://127.0.0.1:8")
    assert engine.server.stages == 2
    assert fleet.pick(DECODE, ()) is None
    engine.ready = True
    assert fleet.pick(DECODE, ()) is engine
    fleet.left(f"{1:032x}")
    assert not fleet.engines


def test_an_engine_changes_leaves_and_starts_again() -> None:
    fleet = EngineFleet()
    fleet.joined(*member())
    (first,) = fleet.engines
    first.ready = True
    fleet.at(first.url).drain()
    assert fleet.pick(DECODE, ()) is None
    fleet.at(first.url).drain(draining=False)
    fleet.joined(*member(role=PREFILL, load=0.5))  # it says something new
    assert fleet.engines == [first]
    assert (first.role, first.load) == (PREFILL, 0.5)
    assert fleet.pick(DECODE, ()) is None
    with first.at_work():
        # The next start is there before the record of the last one has gone.
        fleet.joined(*member(start=2))
        second, leaving = fleet.engines
        assert (second.ready, leaving) == (False, first)
        fleet.left(f"{1:032x}")
        assert second in fleet.engines
        assert first.state == "leaving"
    assert fleet.engines == [second]
    fleet.joined(*member(port=9, start=2))  # and moves
    assert [engine.url for engine in fleet.engines] == ["http://127.0.0.1:9"]
    with pytest.raises(UsageError, match=r"no engine at .*known engines: http://127"):
        fleet.at(second.url)


def test_only_engines_of_one_model_share_a_request() -> None:
    fleet = EngineFleet()
    fleet.joined(*member(1, PREFILL, 1, model="a"))
    fleet.joined(*member(2, PREFILL, 2, model="b"))
    for engine in fleet.engines:
        engine.ready = True
    chosen = fleet.pick(PREFILL, (), "b")
    assert chosen is not None
    assert chosen.model == "b"
    assert fleet.pick(PREFILL, (), "c") is None


# --- what a directory says ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"address": "tcp://10.0.0.1:1"}, "10.0.0.1.*not allowed: add it"),
        ({"address": "inproc://x"}, "tcp://host:port"),
        ({"role": "store"}, "role 'store'"),
        ({"http": "http://169.254.169.254"}, "not allowed: add it"),
        ({"http": "http://127.0.0.1.evil.example:80"}, "not allowed: add it"),
        ({"http": "http://u:p@127.0.0.1:80"}, "not an http://"),
        ({"http": "http://127.0.0.1:80/a?b=c"}, "not an http://"),
        ({"http": "http://127.0.0.1:80/admin"}, "not an http://"),
        ({"http": "file:///etc/passwd"}, "not an http://"),
        ({"http": "http://127.0.0.1:99999"}, "http"),
        ({"http": "http://[::1"}, "http"),
        ({"http": ""}, "not an http://"),
        ({"rank": "-1"}, "`int` >= 0.*rank"),
        ({"rank": "2", "ranks": "2"}, "rank 2 of 2"),
        ({"ranks": "1000"}, "`int` <= .*ranks"),
        ({"ranks": "3", "stages": "2"}, "3 ranks cannot be divided among 2"),
        ({"slots": "٣"}, "Expected `int`.*slots"),
        ({"slots": "9" * 100}, "slots"),
        ({"slots": "9000000"}, "slots"),
    ],
)
def test_a_record_that_is_not_used(fields: dict[str, str], words: str) -> None:
    own = {key: fields[key] for key in fields.keys() & {"address", "role"}}
    labels = {
        "http": "http://127.0.0.1:80",
        **{k: fields[k] for k in fields.keys() - own},
    }
    said = {"name": "x", "address": "tcp://127.0.0.1:1", "role": DECODE, **own}
    made = Record(**said, labels=labels)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        read_member(made, HERE)


@pytest.mark.parametrize(
    ("allowed", "fine", "not_fine"),
    [
        ([], ["127.0.0.1", "::1", "localhost"], ["10.0.0.1", "host"]),
        (["10.0.0.0/8"], ["10.9.8.7"], ["127.0.0.1", "localhost", "11.0.0.1"]),
        (["fd00::/8", "10.0.0.1"], ["fd00::1", "10.0.0.1"], ["10.0.0.2", "fe80::1"]),
        (["Engine-1"], ["engine-1", "ENGINE-1"], ["engine-2", "xengine-1"]),
        (
            ["*.fleet.svc"],
            ["a.fleet.svc", "a.b.fleet.svc"],
            ["fleet.svc", "afleet.svc", "a/b.fleet.svc", "a@b.fleet.svc"],
        ),
    ],
)
def test_hosts_that_are_allowed(
    allowed: list[str], fine: list[str], not_fine: list[str]
) -> None:
    hosts = AllowedHosts(allowed)
    for host in fine:
        hosts.check(host)
    for host in not_fine:
        with pytest.raises(UsageError, match="not allowed: add it to --allow"):
            hosts.check(host)


@pytest.mark.parametrize(
    "text", ["", "*.", "10.0.0.0/99", "300.1.1.1", "a b", "http://a"]
)
def test_what_allows_nobody(text: str) -> None:
    with pytest.raises(UsageError, match="allow"):
        AllowedHosts([text])


async def test_a_fleet_follows_a_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines come, say something new and go; what is no engine is passed over."""
    directory = open_directory(f"file:{tmp_path}?interval_s=0.01")
    fleet = EngineFleet()
    discovery = Discovery(open_directory(str(directory.url.geturl())), fleet, HERE)
    watching = asyncio.create_task(discovery.watch())
    forged = record(1, DECODE, "2" * 32, labels={"http": "http://10.0.0.1:1"})
    store = Record(name="s", address="tcp://127.0.0.1:3", incarnation="3" * 32)
    try:
        await directory.announce(store)
        await directory.announce(forged)
        await directory.announce(record(1, DECODE, "1" * 32))
        await fleet.news.wait()
        await until(lambda: discovery.ignored == 1)
        assert [engine.url for engine in fleet.engines] == ["http://127.0.0.1:1"]
        assert "10.0.0.1" in caplog.text
        await directory.announce(record(1, BOTH, "1" * 32, load=0.7))
        await until(lambda: fleet.engines[0].load == 0.7)
        await directory.withdraw("1" * 32)
        await until(lambda: not fleet.engines)
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await discovery.close()
        await directory.close()


# --- whether engines live -------------------------------------------------------------


def test_death_is_noticed_within_a_second() -> None:
    """And silence, and a sick engine, and their ends. Virtual time."""
    silent = asyncio.Event()

    async def watch() -> None:
        clock = asyncio.get_running_loop().time
        fleet = EngineFleet([P1, P2], [D1, D2], clock=clock)
        network = Engines()
        probing = asyncio.create_task(prober.Prober(fleet, network).run())

        def states() -> list[str]:
            return [engine.state for engine in fleet.engines]

        await virtual_time.pass_time(prober.PROBE_S)
        assert states() == ["up"] * 4
        sick, hung = fails(503), when(silent)
        network.dead += (sick, hung)
        network.handlers |= {"p1": refused, "p2": hung, "d1": sick}
        given_up = asyncio.create_task(waits(fleet.engines[1]))
        await virtual_time.pass_time(1.0)
        assert states() == ["down", "up", "down", "up"]
        assert fleet.lives()
        await virtual_time.pass_time(client.SLOW_S)
        assert states() == ["down", "slow", "down", "up"]
        assert not given_up.done()
        await virtual_time.pass_time(client.SILENT_S)
        with pytest.raises(TimeoutError):
            given_up.result()
        assert states() == ["down"] * 3 + ["up"]
        silent.set()
        network.handlers.clear()
        await virtual_time.pass_time(1.0)
        assert states() == ["up"] * 4
        probing.cancel()
        await asyncio.wait({probing})

    async def waits(engine: VllmEngine) -> None:
        async with asyncio.timeout(None) as wait:
            with engine.waited_for(wait):
                await asyncio.Event().wait()

    virtual_time.run(watch())


# How an engine is lost, and whether its process can be another one afterwards.
LOST = [(refused, True), (gone, True), (broken, False), (dies, False)]


@pytest.mark.parametrize(("lost", "restarted"), LOST)
async def test_an_engine_that_was_drained_comes_back(
    lost: Handler, restarted: bool
) -> None:
    """Gone and back is restarted; one that is sick or silent for a while is not."""
    fleet = EngineFleet([], [D1])
    network = Engines()
    (engine,) = fleet.engines
    engine.drain()
    await network.probe(engine)
    assert engine.state == "draining"
    network.handlers["d1"] = lost
    await network.probe(engine)
    network.handlers.clear()
    await network.probe(engine)
    assert engine.state == ("up" if restarted else "draining")
    # What was seen before a drain begins is no restart.
    network.handlers["d1"] = lost
    await network.probe(engine)
    engine.drain()
    network.handlers.clear()
    await network.probe(engine)
    assert engine.state == "draining"
    engine.drain(draining=False)
    assert engine.state == "up"


SERVERS: Final = {"redis": redis_server, "nats": nats_server}
LEASE_S: Final = 2.0

# --- the proxy's own routes and limits ------------------------------------------------


async def test_too_many_requests() -> None:
    may_answer = asyncio.Event()
    network = Engines(d1=when(may_answer), d2=when(may_answer))
    application = app(network, running_max=1)
    asking = asyncio.ensure_future(post(application))
    await until(lambda: len(network.asked) == 2)
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
    await until(lambda: "d1" in network.hosts())
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
    fleet = EngineFleet([P1], [D1])
    application = app(network, fleet=fleet)
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
    for engine in fleet.engines:
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
    await until(lambda: "d1" in network.hosts())
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
