"""What the proxy reads part by part is closed by name, whoever leaves, and when."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import Any

import aiohttp
import pytest

from kvwire.aio import start_task
from kvwire_vllm.proxy.dispatch import ClientRequest, Dispatcher
from kvwire_vllm.proxy.fleet import EngineFleet
from packages.vllm.tests.support.decoders import (
    COUNT,
    Client,
    Decoder,
    moved,
    mover,
)
from packages.vllm.tests.support.proxies import (
    ASK,
    D1,
    EVENTS,
    P1,
    PATH,
    Engines,
    Said,
    app,
    streamed,
    when,
)
from tests.support.pairs import turns


@contextmanager
def collected() -> Iterator[list[str]]:
    """Names of the proxy's generators that were left to the garbage collector."""
    names: list[str] = []
    hooks = sys.get_asyncgen_hooks()

    def note(generator: Any) -> None:
        if "/vllm/proxy/" in generator.ag_code.co_filename:
            names.append(generator.ag_code.co_name)
        elif hooks.finalizer is not None:
            hooks.finalizer(generator)

    sys.set_asyncgen_hooks(finalizer=note)
    try:
        yield names
        gc.collect()
    finally:
        sys.set_asyncgen_hooks(finalizer=hooks.finalizer)


async def endless(_: dict[str, Any]) -> Said:
    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield b"data: 1\n\n"
            await asyncio.sleep(0)

    return 200, EVENTS, parts()


@pytest.mark.parametrize("migrate", [False, True])
@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_leaves_within_a_stream(migrate: bool, reads: bool) -> None:
    """While the next part is read, and while one is written that it does not take."""
    network = Engines(d1=endless)
    application = app(network, prefill=(), decode=[D1], migrate=migrate)
    with collected() as names:
        async with aclosing(streamed(application, max_tokens=COUNT)) as parts:
            await anext(parts)
            for _ in range(100 * reads):
                await anext(parts)
            await turns(100)
        await turns(10)
    assert not names


@pytest.mark.parametrize("dies", [False, True])
async def test_a_stream_that_goes_on_elsewhere(dies: bool) -> None:
    first = Decoder(3, dies=dies)
    application, _ = mover(d1=first, d2=Decoder())
    with collected() as names:
        client = Client(application)
        await client.read(3)
        await moved(application, client, first, engine=D1.url)
        client.right()
    assert not names


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

    fleet = EngineFleet([P1], [D1])
    network = Engines(p1=when(asyncio.Event()), d1=fails)
    asked = ClientRequest(PATH, dict(ASK))
    async with AsyncExitStack() as stack:
        dispatcher = Dispatcher(network, fleet)
        # Not at once, where tasks are eager: it is cancelled by its name.
        asking = start_task(dispatcher.ask(asked, stack))
        await asyncio.wait((asking,))
    asking = None
    await asyncio.sleep(0)
    gc.collect()
    assert not said
