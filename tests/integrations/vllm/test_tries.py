"""A request that engines may fail of is not tried on all of them."""

from __future__ import annotations

import asyncio
import errno
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from starlette.applications import Starlette

from kvwire.directory.base import ended
from kvwire.integrations.vllm.proxy.app import make_app
from kvwire.integrations.vllm.proxy.client import Prober
from kvwire.integrations.vllm.proxy.engines import VllmServer
from kvwire.integrations.vllm.proxy.policy import AT_ONCE, IN_SEQUENCE
from tests.integrations.vllm.test_moving import Client, Decoder
from tests.integrations.vllm.test_proxy import (
    EVENTS,
    Engines,
    Handler,
    Said,
    broken,
    post,
    refused,
    turns_until,
)
from tests.integrations.vllm.turns import fleet_in_turns

DECODE = [VllmServer(f"http://d{i}", (f"d{i}:1",)) for i in range(6)]
PREFILL = [VllmServer(f"http://p{i}", (f"p{i}:1",)) for i in range(6)]


async def dies(_: dict[str, Any]) -> Said:
    raise aiohttp.ServerDisconnectedError


def front(engines: Engines, **options: Any) -> Starlette:
    fleet = fleet_in_turns(options.pop("prefill", ()), DECODE)
    options = {"order": AT_ONCE, **options}
    return make_app(fleet, client=engines, **options)


@pytest.mark.parametrize(("fails", "status"), [(broken, 500), (dies, 502)])
async def test_a_request_that_decode_engines_fail_of(
    fails: Handler, status: int
) -> None:
    """Two are enough. The client is not told to come again in a moment."""
    engines = Engines(**{f"d{i}": fails for i in range(6)})
    said = await post(front(engines))
    assert said.status_code == status
    assert "retry-after" not in said.headers
    assert len(engines.asked) == 2


async def test_a_request_that_prefill_engines_fail_of() -> None:
    """It is not computed by decode engines then."""
    engines = Engines(**{f"p{i}": dies for i in range(6)})
    said = await post(front(engines, prefill=PREFILL, order=IN_SEQUENCE))
    assert said.status_code == 502
    assert [host[0] for host in engines.hosts()] == ["p", "p"]


async def test_engines_that_nobody_reaches_are_not_counted() -> None:
    engines = Engines(d0=refused, d1=refused, d2=refused, d3=dies, d4=refused)
    assert (await post(front(engines))).status_code == 200
    assert len(engines.asked) == 6


async def test_engines_that_were_down_before_are_not_counted() -> None:
    """So a fleet whose prefill engines are all broken answers as one without any."""
    engines = Engines(p0=broken, p1=broken, p2=broken)
    application = front(engines, prefill=PREFILL[:3], order=IN_SEQUENCE)
    assert (await post(application)).status_code == 500
    for _ in range(3):
        assert (await post(application)).status_code == 200


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
    async with asyncio.timeout(5):
        await client.read()
    assert client.done
    assert client.events[-1]["error"]["code"] == 502
    assert engines.hosts() == ["d0", "d2"]


async def test_without_descriptors_no_engine_is_taken_for_down() -> None:
    """It is this process that has none, so no other engine is asked either."""

    async def none_left(_: dict[str, Any]) -> Said:
        error = OSError(errno.EMFILE, "")
        raise aiohttp.ClientConnectorError(Mock(), error)

    engines = Engines(**{f"d{i}": none_left for i in range(6)})
    fleet = fleet_in_turns([], DECODE)
    said = await post(make_app(fleet, client=engines, order=AT_ONCE))
    assert said.status_code == 503
    assert said.json()["error"]["message"] == "Too many open files"
    assert len(engines.asked) == 1
    prober = Prober(fleet, engines)
    probing = asyncio.ensure_future(prober.run())
    await turns_until(lambda: len(engines.asked) == 1 + len(DECODE))
    await ended(probing)
    assert {one.state(fleet.clock()) for one in fleet.engines} == {"up"}
