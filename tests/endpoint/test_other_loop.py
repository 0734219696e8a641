"""A call from another thread or loop is refused where it is made."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import kvwire
import kvwire_store
from kvwire.aio import LoopThread
from kvwire_store.request import StoreRequest
from tests.support.caches import Filled, chain
from tests.support.pairs import until

# Calls that may come from any thread and loop, that only look, or that a task makes.
ANYWHERE: Final = {
    kvwire.Communicator: set[str](),
    kvwire.Connection: set[str](),
    kvwire.Peer: set[str](),
    kvwire.Region: set[str](),
    kvwire.Window: {"offer", "withdraw"},
    kvwire.RemoteWindow: {"ticket"},
    kvwire.Request: {"done", "result", "send", "throw", "close"},
    kvwire.Outgoing: {"done", "extend", "finish", "ready"},
    kvwire.Incoming: {"done", "layer_landed"},
    kvwire_store.BlockStore: {"open", "stats", "tenant_stats"},
    StoreRequest: {"done"},
}


@asynccontextmanager
async def objects() -> AsyncIterator[dict[type, Any]]:
    """One of each class."""
    kv = Filled().cache
    async with (
        kvwire.open(name="a") as a,
        kvwire.open(name="b") as b,
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
    ):
        address = await b.listen("127.0.0.1:0")
        conn = await a.connect(address)
        window = b.expose("w", Filled(seed=1).cache)
        made = (
            *(a, conn, a.peer(str(address)), b.register(bytearray(8))),
            *(window, await conn.window("w"), conn.recv(7)),
            *(a.publish("out", kv, [0]), a.expect("in", kv, [1])),
            *(store, store.put(chain(1), kv, [2])),
        )
        found = {type(one): one for one in made}
        assert found.keys() == ANYWHERE.keys()
        yield found


def calls(found: dict[type, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each other call, with nothing where it needs something: that is not looked at."""
    for kind, one in found.items():
        for name in dir(kind):
            call = getattr(one, name, None)
            if name[0] == "_" or name in ANYWHERE[kind] or not callable(call):
                continue
            needed = [
                None
                for given in inspect.signature(call).parameters.values()
                if given.default is given.empty
                and given.kind <= given.POSITIONAL_OR_KEYWORD
            ]
            yield f"{kind} {name}", partial(call, *needed)
        if hasattr(kind, "__await__"):
            yield f"{kind} await", partial(_itself, one)


def _itself(one: Any) -> Any:
    return one


def refusal(call: Callable[[], Any]) -> str:
    """What a call says on a loop of its own."""

    async def run() -> None:
        made = call()
        if inspect.isawaitable(made):
            await made

    with pytest.raises(kvwire.UsageError) as raised:
        asyncio.run(run())
    return str(raised.value)


async def test_each_is_refused_in_another_thread() -> None:
    said: dict[str, str] = {}

    def refused() -> None:
        said.update((name, refusal(call)) for name, call in calls(found))

    async with objects() as found:
        thread = threading.Thread(target=refused, name="me")
        thread.start()
        await asyncio.to_thread(thread.join)
        assert not found[kvwire.Request].done()
    assert len(said) > 60
    owner = threading.current_thread().name
    for name, text in said.items():
        assert "called from thread 'me', but the object belongs" in text, name
        assert f"event loop of thread {owner!r}" in text, name
        assert "engine.run(coroutine)" in text, name
        assert "kvwire.Engine" in text, name


def test_each_is_refused_while_another_loop_of_the_thread_runs() -> None:
    own = asyncio.new_event_loop()
    entered = objects()
    try:
        found = own.run_until_complete(entered.__aenter__())
        for name, call in calls(found):
            assert "the object belongs to another event loop" in refusal(call), name
    finally:
        own.run_until_complete(entered.__aexit__(None, None, None))
        own.run_until_complete(own.shutdown_asyncgens())
        own.close()
    with pytest.raises(kvwire.UsageError, match="is closed: open a communicator in"):
        found[kvwire.Communicator].register(bytearray(1))


def test_a_communicator_is_aborted_between_two_runs_of_its_loop(tmp_path: Path) -> None:
    """Its connection ends with the call, and the next run withdraws its record."""

    async def begin() -> tuple[list[kvwire.Communicator], kvwire.Connection]:
        both = [await kvwire.open(directory=f"file:{tmp_path}") for _ in range(2)]
        address = await both[0].listen("127.0.0.1:0")
        both[0].announce(role="decode", address=address)
        await until(lambda: [*tmp_path.glob("*.json")])
        await both[1].connect(address)
        return both, await anext(both[0].connections())

    async def end() -> None:
        await until(lambda: not [*tmp_path.glob("*.json")])
        for one in both:
            await one.close()

    with asyncio.Runner() as runner:
        both, connection = runner.run(begin())
        both[0].abort()
        assert connection.closed
        runner.run(end())


async def test_marks_may_come_from_any_thread() -> None:
    async with objects() as found:
        out = found[kvwire.Outgoing]

        def mark() -> None:
            out.ready(layers=0)
            out.finish(partial=True)

        await asyncio.to_thread(mark)
        assert not out.done()


async def test_a_loop_may_move_to_another_thread() -> None:
    thread = LoopThread()
    thread.ident += 1  # as if it had been another
    thread.check("anything")
    assert thread.ident == threading.get_ident()
