"""Which engines a proxy has, which one it takes, how much it takes, what it shows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvwire import UsageError
from kvwire.directory import Record, open_directory
from kvwire_vllm.announce import BOTH, DECODE, PREFILL
from kvwire_vllm.proxy import client
from kvwire_vllm.proxy.budget import RetryBudget
from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.engines import VllmEngine, VllmServer
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import (
    PROXY_RETRY_RESERVE,
    PROXY_RETRY_SHARE,
)
from kvwire_vllm.proxy.members import AllowedHosts, read_member
from packages.vllm.tests.support.proxies import (
    D1,
    D2,
    HERE,
    P1,
    P2,
    Engines,
    Handler,
    broken,
    dies,
    fails,
    gone,
    member,
    record,
    refused,
    when,
)
from tests.support import virtual_time
from tests.support.pairs import until

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


# --- retries --------------------------------------------------------------------------


def test_retries_are_a_share_of_the_requests() -> None:
    now = 0.0
    budget = RetryBudget(lambda: now)
    reserve = int(PROXY_RETRY_RESERVE)
    assert [budget.spend() for _ in range(reserve + 1)] == [True] * reserve + [False]
    for _ in range(round(3 / PROXY_RETRY_SHARE) + 1):
        budget.deposit()
    assert [budget.spend() for _ in range(4)] == [True] * 3 + [False]
    now = 2.0
    assert [budget.spend() for _ in range(3)] == [True] * 2 + [False]
    assert (budget.spent, budget.refused) == (reserve + 5, 3)


# --- whether engines live -------------------------------------------------------------


def test_death_is_noticed_within_a_second() -> None:
    """And silence, and a sick engine, and their ends. Virtual time."""
    silent = asyncio.Event()

    async def watch() -> None:
        clock = asyncio.get_running_loop().time
        fleet = EngineFleet([P1, P2], [D1, D2], clock=clock)
        network = Engines()
        prober = client.Prober(fleet, network)
        probing = asyncio.create_task(prober.run())

        def states() -> list[str]:
            return [engine.state for engine in fleet.engines]

        await virtual_time.pass_time(client.PROBE_S)
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
