"""What is tried again, and where: on engines that are well, and never on all of them.

What an engine could answer is answered, however many tries others have had.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from kvwire.aio import start_task
from kvwire_vllm.proxy.client import EngineFailed
from kvwire_vllm.proxy.dispatch import ClientRequest, Dispatcher
from kvwire_vllm.proxy.engines import VllmServer
from kvwire_vllm.proxy.fleet import EngineFleet
from packages.vllm.tests.support.decoders import (
    Client,
    Decoder,
)
from packages.vllm.tests.support.proxies import (
    ASK,
    EVENTS,
    Engines,
    Handler,
    Said,
    answer,
    app,
    broken,
    call,
    dies,
    fails,
    fine,
    gone,
    post,
    refused,
    when,
)
from tests.support.pairs import until

DECODE = [VllmServer(f"http://d{i}", (f"d{i}:1",)) for i in range(6)]
PREFILL = [VllmServer(f"http://p{i}", (f"p{i}:1",)) for i in range(6)]


front = partial(app, prefill=(), decode=DECODE)


class Mortal:
    """An engine that dies of its first request."""

    dead = False

    async def __call__(self, _: dict[str, Any]) -> Said:
        self.dead = True
        raise aiohttp.ServerDisconnectedError


async def test_a_request_that_decode_engines_die_of() -> None:
    """Two are enough. The client is not told to come again in a moment."""
    engines = Engines(**{f"d{i}": Mortal() for i in range(6)})
    said = await post(front(engines))
    assert said.status_code == 502
    assert "retry-after" not in said.headers
    assert len(engines.asked) == 2


async def test_a_request_that_prefill_engines_die_of() -> None:
    """It is not computed by decode engines then."""
    engines = Engines(**{f"p{i}": Mortal() for i in range(6)})
    said = await post(front(engines, prefill=PREFILL))
    assert said.status_code == 502
    assert sum(host[0] == "p" for host in engines.hosts()) == 2


async def test_a_prompt_to_count_that_engines_die_of() -> None:
    """As for a request that needs both roles: two are enough."""
    engines = Engines(**{f"d{i}": Mortal() for i in range(6)})
    assert (await call(front(engines), "POST", "/tokenize", json=ASK)).is_error
    assert len(engines.asked) == 2


async def test_engines_that_were_dead_already_are_not_counted() -> None:
    """Before a request that an engine has died of, the next one is looked at."""
    engines = Engines(d0=Mortal(), d1=broken, d2=dies, d3=broken)
    assert (await post(front(engines))).status_code == 200
    assert engines.hosts() == ["d0", "d4"]


async def test_engines_that_nobody_reaches_are_not_counted() -> None:
    engines = Engines(d0=refused, d1=dies, d2=refused, d3=refused, d4=refused)
    assert (await post(front(engines))).status_code == 200
    # After the one that died, each is looked at before it is asked.
    assert engines.hosts() == ["d0", "d1", "d5"]


async def test_engines_that_were_down_before_are_not_counted() -> None:
    """So a fleet whose prefill engines are all broken answers as one without any."""
    engines = Engines(p0=broken, p1=broken, p2=broken)
    application = front(engines, prefill=PREFILL[:3])
    for _ in range(3):
        assert (await post(application)).status_code == 200


async def test_a_client_whose_requests_are_answered_with_500() -> None:
    """vLLM does that to some that are the client's fault: no engine is down for it."""

    async def picky(body: dict[str, Any]) -> Said:
        at_fault = "response_format" in body
        return await (fails(500, "an odd value") if at_fault else fine)(body)

    engines = Engines(p0=picky, p1=picky, d0=picky, d1=picky)
    fleet = EngineFleet(PREFILL[:2], DECODE[:2])
    application = app(engines, fleet=fleet)
    for number in range(20):
        odd = {"response_format": {"type": "json_object"}}
        said = await post(application, {**ASK, **odd})
        assert said.status_code == 500
        assert "an odd value" in said.json()["error"]["message"]
        assert (await post(application)).status_code == 200
        assert {engine.state for engine in fleet.engines} == {"up"}, number
    prefilled = [body for host, body in engines.asked if host[0] == "p"]
    assert sum("response_format" not in body for body in prefilled) == 20


async def test_prefill_that_fails_a_request_and_is_well() -> None:
    """Decode computes the prompt: it knows better whether the request is at fault."""
    engines = Engines(p0=fails(500), p1=fails(500))
    said = await post(front(engines, prefill=PREFILL[:2]))
    assert said.status_code == 200
    assert engines.hosts() == ["p0", "d0", "d0"]
    assert engines.params("d0")[1] is None


async def test_when_an_engine_that_has_failed_may_be_asked_again() -> None:
    async def busy(_: dict[str, Any]) -> Said:
        status, headers, parts = answer(503, {})
        return status, {**headers, "retry-after": "7"}, parts

    said = await post(front(Engines(**{f"d{i}": busy for i in range(6)})))
    assert (said.status_code, said.headers["retry-after"]) == (503, "7")


async def test_a_stream_that_engines_die_of() -> None:
    """At one token: the first engine, and the one that went on."""

    async def begins(body: dict[str, Any]) -> Said:
        async def parts() -> Any:
            yield b'data: {"choices":[{"index":0,"text":""}]}\n\n'
            async for part in Decoder(0, dies=True).parts(body):
                yield part

        return 200, EVENTS, parts()

    engines = Engines(
        d0=Decoder(3, dies=True), **{f"d{i}": begins for i in range(1, 6)}
    )
    client = Client(front(engines, migrate=True))
    async with asyncio.timeout(60):
        await client.read()
    assert client.done
    assert client.events[-1]["error"]["code"] == 502
    assert engines.hosts() == ["d0", "d1"]


async def test_without_descriptors_no_engine_is_taken_for_down() -> None:
    """It is this process that has none, so no other engine is asked either."""

    async def none_left(_: dict[str, Any]) -> Said:
        error = OSError(errno.EMFILE, "")
        raise aiohttp.ClientConnectorError(Mock(), error)

    engines = Engines(**{f"d{i}": none_left for i in range(6)})
    engines.dead += (none_left,)
    fleet = EngineFleet([], DECODE)
    said = await post(app(engines, fleet=fleet))
    assert said.status_code == 503
    assert said.json()["error"]["message"] == "Too many open files"
    assert len(engines.asked) == 1
    await asyncio.gather(*map(engines.probe, fleet.engines))
    assert {one.state for one in fleet.engines} == {"up"}


# --- who answers when some engines do not ---------------------------------------------

MANY = 100


def dispatcher(
    engines: Engines,
    prefill: int,
    decode: int,
    clock: Callable[[], float] = lambda: 0.0,
) -> Dispatcher:
    fleet = EngineFleet(PREFILL[:prefill], DECODE[:decode], clock=clock)
    return Dispatcher(engines, fleet)


async def ask(asking: Dispatcher, **more: Any) -> tuple[int, bytes]:
    async with AsyncExitStack() as stack:
        request = ClientRequest("/v1/completions", {**ASK, **more})
        said = await asking.ask(request, stack)
        return said.status, await said.body(2**20)


FAILURES = pytest.mark.parametrize("fails", [refused, broken, dies, gone])


@FAILURES
async def test_without_prefill_decode_answers_all(fails: Handler) -> None:
    """The one prefill engine is down: only the first request asks it."""
    engines = Engines(p0=fails)
    asking = dispatcher(engines, 1, 1)
    assert {(await ask(asking))[0] for _ in range(MANY)} == {200}
    assert engines.hosts().count("p0") == 1
    assert asking.retries <= 1


@FAILURES
@pytest.mark.parametrize("who", ["p0", "d0"])
async def test_an_engine_that_dies_costs_no_answer(who: str, fails: Handler) -> None:
    """All are asked at once, so none knows yet that the engine is dead."""
    begun = asyncio.Event()

    async def late(body: dict[str, Any]) -> Said:
        await begun.wait()
        return await fails(body)

    engines = Engines(**{who: late})
    engines.dead += (late,)
    asking = dispatcher(engines, 1, 2)
    asked = [asyncio.ensure_future(ask(asking)) for _ in range(MANY)]
    await until(lambda: engines.hosts().count(who) >= MANY // 2)
    begun.set()
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}


FULL = fails(503, "no room")
LATE = fails(504)


async def test_engines_without_room_are_no_reason_to_refuse() -> None:
    """Three say so; it is not the request that they fail of."""
    engines = Engines(p0=FULL, p1=FULL, d0=FULL)
    asking = dispatcher(engines, 2, 2)
    assert (await ask(asking))[0] == 200
    engines.handlers |= {"d0": FULL, "d1": FULL}
    with pytest.raises(EngineFailed, match="no room") as caught:
        await ask(asking)
    assert caught.value.status == 503


async def test_if_prefill_has_no_room_decode_computes_the_prompt() -> None:
    """The first request asks all of prefill's engines, which may be many."""
    engines = Engines(**{f"p{i}": FULL for i in range(6)})
    asking = dispatcher(engines, 6, 1)
    for number in range(9):
        assert (await ask(asking))[0] == 200
        asked = sum(host[0] == "p" for host in engines.hosts())
        assert asked == 6 + 3 * number


async def test_an_engine_with_room_is_found_among_many_without() -> None:
    """Those come last, until their health is checked again."""
    engines = Engines(**{f"d{i}": FULL for i in range(5)})
    asking = dispatcher(engines, 0, 6)
    for _ in range(MANY):
        assert (await ask(asking))[0] == 200
    assert len(engines.asked) == 5 + MANY


@pytest.mark.parametrize("prefill", [0, 6])
@pytest.mark.parametrize(
    ("fails", "lives", "state", "tries"),
    [
        (dies, True, "", 2),
        (dies, True, "slow", 2),
        (dies, False, "slow", 2),
        (broken, False, "slow", 2),
        (LATE, True, "", 1),
        (LATE, True, "slow", 1),
        (LATE, False, "slow", 2),
        (FULL, True, "slow", 4),
        (FULL, False, "down", 1),
        (refused, False, "down", 4),
    ],
)
async def test_a_failing_fleet_is_not_flooded(
    fails: Handler, lives: bool, state: str, tries: int, prefill: int
) -> None:
    """The number of its engines does not matter.

    A try is a request, or three: one of prefill, one of decode, and one without KV.
    """
    hosts = [server.url[-2:] for server in PREFILL + DECODE]
    engines = Engines(**dict.fromkeys(hosts, fails))
    engines.dead = () if lives else (fails,)
    fleet = EngineFleet(PREFILL[:prefill], DECODE)
    for engine in fleet.engines:
        engine.slow = state == "slow"
        engine.down = "it has died" if state == "down" else ""
    with pytest.raises(EngineFailed):
        await ask(Dispatcher(engines, fleet))
    each = 3 if prefill and state != "down" else 1
    assert len(engines.asked) <= tries * each


@FAILURES
async def test_without_decode_prefill_answers_alone(fails: Handler) -> None:
    """Where decode says that it has failed, it may have for want of KV: once more."""
    engines = Engines(d0=fails)
    asking = dispatcher(engines, 1, 1)
    for _ in range(MANY):
        assert await ask(asking) == (200, b'{"tokens": 9}')
    assert engines.hosts().count("d0") == 1 + (fails is broken)
    assert engines.params("p0")[-MANY:] == [None] * MANY


@pytest.mark.parametrize("seed", range(5))
async def test_engines_of_both_roles_come_and_go(seed: int) -> None:
    """One of them is well at any time; which one, nobody knows before it is asked."""
    chance = random.Random(seed)
    engines = Engines()
    fleet = EngineFleet(PREFILL[:2], DECODE[:2])
    asking = Dispatcher(engines, fleet)
    hosts = ["p0", "p1", "d0", "d1"]
    for _ in range(MANY):
        well = chance.choice(hosts)
        failing = {host: chance.choice((refused, gone)) for host in hosts}
        engines.handlers = failing | {well: fine}
        assert (await ask(asking))[0] == 200
        for engine in fleet.engines:
            engine.healthy()  # nobody knows who it is the next time


async def test_an_error_names_all_that_have_failed() -> None:
    engines = Engines(p0=refused, d0=refused, d1=gone)
    with pytest.raises(EngineFailed) as caught:
        await ask(dispatcher(engines, 1, 2))
    said = caught.value.why
    assert said.startswith("no engine has answered: ")
    assert "prefill: Connection refused" in said
    assert "decode: Connection refused" in said
    assert "decode: no connection within 5 s" in said


@pytest.mark.parametrize(("fails", "first"), [(broken, 1), (dies, 1), (gone, 6)])
async def test_of_engines_that_are_down_one_is_reached(
    fails: Handler, first: int
) -> None:
    """The first request finds out that they are; who is silent takes 5 s."""
    engines = Engines(**{f"d{i}": fails for i in range(6)})
    asking = dispatcher(engines, 0, 6)
    for number in range(MANY):
        with pytest.raises(EngineFailed):
            await ask(asking)
        assert len(engines.asked) == first + number


async def test_decode_that_fails_with_prefill_is_not_blamed() -> None:
    """It may have waited for KV that will not come."""
    failing = asyncio.Event()

    async def fails(_: dict[str, Any]) -> Said:
        await failing.wait()
        return answer(500, {})

    engines = Engines(p0=fails, d0=fails)
    asking = dispatcher(engines, 1, 1)
    asked = asyncio.ensure_future(ask(asking))
    await until(lambda: len(engines.asked) == 2)
    failing.set()
    engines.handlers = {}  # of the next try
    assert (await asked)[0] == 200
    assert engines.hosts() == ["p0", "d0", "d0"]


async def test_a_client_that_leaves_as_its_engine_fails() -> None:
    """In the same turn of the loop: nobody is told of an error that nobody has seen."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: said.append(context["message"])
    )
    asking: asyncio.Task[Any] | None = None

    async def fails(_: dict[str, Any]) -> Said:
        assert asking is not None
        asking.cancel()
        raise aiohttp.ServerDisconnectedError

    network = Engines(p0=when(asyncio.Event()), d0=fails)
    asked = ClientRequest("/v1/completions", dict(ASK))
    async with AsyncExitStack() as stack:
        # Not at once, where tasks are eager: it is cancelled by its name.
        asking = start_task(dispatcher(network, 1, 1).ask(asked, stack))
        await asyncio.wait((asking,))
    asking = None
    await asyncio.sleep(0)
    gc.collect()
    assert not said


# --- answers that are errors ----------------------------------------------------------

REFUSALS = [400, 401, 403, 404, 408, 413, 422, 429, 501]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream": True}], ids=str)
@pytest.mark.parametrize("who", ["p0", "d0"])
@pytest.mark.parametrize("status", REFUSALS)
async def test_a_refusal_is_an_answer(
    status: int, who: str, more: dict[str, Any]
) -> None:
    """The client has its text; it costs no other client a try, and harms no engine."""
    engines = Engines(**{who: fails(status, "no such model")})
    fleet = EngineFleet(PREFILL[:1], DECODE[:1])
    asking = Dispatcher(engines, fleet)
    answers = who == "d0" or "n" not in more
    for number in range(3):
        got, body = await ask(asking, **more)
        assert got == (status if answers else 200)
        assert (b"no such model" in body) is answers
        assert engines.hosts().count("d0") <= number + 1
    assert asking.retries == 0
    for engine in fleet.engines:
        assert (engine.failed, engine.state) == (0, "up")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [404, 429])
async def test_a_refusal_of_a_request_that_could_move(
    status: int, stream: bool
) -> None:
    engines = Engines(p0=fails(status, "why"), d0=fails(status, "why"))
    application = front(engines, prefill=PREFILL[:1], migrate=True)
    said = await post(application, {**ASK, "stream": stream})
    assert (said.status_code, said.json()) == (status, {"error": {"message": "why"}})
