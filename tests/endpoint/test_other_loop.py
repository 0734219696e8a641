"""A call from another thread or loop is refused where it is made."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

import kvwire
import kvwire_store
from kvwire.aio import LoopThread
from kvwire_store.request import StoreRequest
from tests.support.caches import Filled, chain

# Calls that may come from any thread and loop, that only look, or that a task makes.
ANYWHERE: Final = {
    kvwire.Window: {"offer", "withdraw"},
    kvwire.RemoteWindow: {"ticket"},
    kvwire.Request: {"done", "result", "send", "throw", "close"},
    kvwire.Outgoing: {"done", "extend", "finish", "ready"},
    kvwire.Incoming: {"done", "layer_landed"},
    kvwire_store.BlockStore: {"open", "stats", "tenant_stats"},
    StoreRequest: {"done"},
}
KV: Final = Filled().cache
NAMES: Final = chain(1)
HOST: Final = "127.0.0.1:0"


class Objects:
    """One object of each class, with what a call of it needs."""

    def __init__(self) -> None:
        self.made: dict[type, Any] = {}
        self.grant: Any = None
        self.ticket = b""
        self._stack = AsyncExitStack()

    async def make(self) -> None:
        enter = self._stack.enter_async_context
        a = await enter(kvwire.open(name="a"))
        b = await enter(kvwire.open(name="b"))
        address = await b.listen(HOST)
        conn = await a.connect(address)
        back = await b.accept()
        region = b.register(bytearray(8), "readwrite")
        self.grant = region.grant(back)
        window = b.expose("w", Filled(seed=1).cache)
        self.ticket = window.offer([1])
        store = await enter(kvwire_store.BlockStore.open(["memory:1MiB"]))
        for one in (
            a,
            conn,
            a.peer(str(address)),
            region,
            window,
            await conn.window("w"),
            conn.recv(7),
            a.publish("out", KV, [0]),
            a.expect("in", KV, [1]),
            store,
            store.put(NAMES, KV, [2]),
        ):
            self.made[type(one)] = one

    async def end(self) -> None:
        await self._stack.aclose()


CALLS: Final[dict[type, dict[str, Callable[[Any, Objects], Any]]]] = {
    kvwire.Communicator: {
        "abort": lambda o, _: o.abort(),
        "accept": lambda o, _: o.accept(),
        "announce": lambda o, _: o.announce(),
        "close": lambda o, _: o.close(),
        "connect": lambda o, _: o.connect(HOST),
        "connections": lambda o, _: o.connections(),
        "expect": lambda o, _: o.expect("x", KV, [3]),
        "expose": lambda o, _: o.expose("x", KV),
        "fired": lambda o, _: o.fired(None),
        "listen": lambda o, _: o.listen(HOST),
        "members": lambda o, _: o.members(),
        "peer": lambda o, _: o.peer("127.0.0.1:1"),
        "publish": lambda o, _: o.publish("x", KV, [3]),
        "register": lambda o, _: o.register(bytearray(8)),
        "snapshot": lambda o, _: o.snapshot(),
        "transfers": lambda o, _: o.transfers(),
        "drain": lambda o, _: o.drain(),
        "withdraw": lambda o, _: o.withdraw(),
    },
    kvwire.Connection: {
        "abort": lambda o, _: o.abort(),
        "close": lambda o, _: o.close(),
        "discard": lambda o, _: o.discard(1),
        "get": lambda o, all_: o.get(all_.grant, bytearray(8)),
        "pull": lambda o, _: o.pull("x", KV, [3]),
        "push": lambda o, _: o.push("x", KV, [3]),
        "put": lambda o, all_: o.put(bytes(8), all_.grant),
        "recv": lambda o, _: o.recv(1),
        "send": lambda o, _: o.send(1, b"small"),
        "wait_closed": lambda o, _: o.wait_closed(),
        "window": lambda o, _: o.window("w"),
    },
    kvwire.Peer: {
        "close": lambda o, _: o.close(),
        "connect": lambda o, _: o.connect(),
        "get": lambda o, all_: o.get(all_.grant, bytearray(8)),
        "pull": lambda o, _: o.pull("x", KV, [3]),
        "push": lambda o, _: o.push("x", KV, [3]),
        "put": lambda o, all_: o.put(bytes(8), all_.grant),
        "recv": lambda o, _: o.recv(1),
        "send": lambda o, _: o.send(1, b"small"),
        "window": lambda o, _: o.window("w"),
    },
    kvwire.Region: {
        "close": lambda o, _: o.close(),
        "grant": lambda o, all_: o.grant(all_.made[kvwire.Connection]),
        "revoke": lambda o, _: o.revoke(),
    },
    kvwire.Window: {"close": lambda o, _: o.close()},
    kvwire.RemoteWindow: {
        "close": lambda o, _: o.close(),
        "get": lambda o, all_: o.get(all_.ticket, KV, [4]),
    },
    kvwire.Request: {
        "cancel": lambda o, _: o.cancel(),
        "released": lambda o, _: o.released(),
        "await": lambda o, _: o,
    },
    kvwire.Outgoing: {
        "abort": lambda o, _: o.abort(),
        "drained": lambda o, _: o.drained(),
        "renew_lease": lambda o, _: o.renew_lease(),
        "await": lambda o, _: o,
    },
    kvwire.Incoming: {
        "abort": lambda o, _: o.abort(),
        "drained": lambda o, _: o.drained(),
        "layer": lambda o, _: o.layer(0),
        "layer_event": lambda o, _: o.layer_event(0),
        "await": lambda o, _: o,
    },
    kvwire_store.BlockStore: {
        "close": lambda o, _: o.close(),
        "delete": lambda o, _: o.delete(NAMES, KV),
        "delete_all": lambda o, _: o.delete_all(KV),
        "flush": lambda o, _: o.flush(),
        "get": lambda o, _: o.get(NAMES, KV, [3]),
        "match": lambda o, _: o.match(NAMES, KV),
        "pin": lambda o, _: o.pin(NAMES, KV),
        "prefetch": lambda o, _: o.prefetch(NAMES, KV),
        "present": lambda o, _: o.present(NAMES, KV),
        "put": lambda o, _: o.put(NAMES, KV, [3]),
        "require_room": lambda o, _: o.require_room(KV),
        "unpin": lambda o, _: o.unpin(NAMES, KV),
    },
    StoreRequest: {
        "drained": lambda o, _: o.drained(),
        "await": lambda o, _: o,
    },
}


@pytest.fixture
async def objects() -> AsyncIterator[Objects]:
    made = Objects()
    await made.make()
    assert made.made.keys() == CALLS.keys()
    yield made
    await made.end()


def refusal(call: Callable[[], Any]) -> str:
    """What a call says on a loop of its own."""

    async def run() -> None:
        made = call()
        if inspect.isawaitable(made):
            await made

    with pytest.raises(kvwire.UsageError) as raised:
        asyncio.run(run())
    return str(raised.value)


def test_every_public_call_is_listed() -> None:
    for kind, calls in CALLS.items():
        public = {
            name
            for name in dir(kind)
            if not name.startswith("_") and callable(getattr(kind, name))
        }
        listed = calls.keys() - {"await"}
        assert public == listed | ANYWHERE.get(kind, set()), kind


async def test_each_is_refused_in_another_thread(objects: Objects) -> None:
    said: dict[str, str] = {}

    def refused() -> None:
        for kind, calls in CALLS.items():
            for name, call in calls.items():
                one = objects.made[kind]
                said[f"{kind} {name}"] = refusal(lambda: call(one, objects))  # noqa: B023

    thread = threading.Thread(target=refused, name="me")
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(said) == sum(map(len, CALLS.values()))
    owner = threading.current_thread().name
    for name, text in said.items():
        assert "called from thread 'me', but the object belongs" in text, name
        assert f"event loop of thread {owner!r}" in text, name
        assert "engine.run(coroutine)" in text, name
        assert "kvwire.Engine" in text, name
    assert not objects.made[kvwire.Request].done()


def test_each_is_refused_while_another_loop_of_the_thread_runs() -> None:
    objects = Objects()
    own = asyncio.new_event_loop()
    try:
        own.run_until_complete(objects.make())
        for kind, calls in CALLS.items():
            for name, call in calls.items():
                one = objects.made[kind]
                why = refusal(lambda: call(one, objects))  # noqa: B023
                assert "the object belongs to another event loop" in why, (kind, name)
    finally:
        own.run_until_complete(objects.end())
        own.run_until_complete(own.shutdown_asyncgens())
        own.close()
    with pytest.raises(kvwire.UsageError, match="is closed: open a communicator in"):
        objects.made[kvwire.Communicator].register(bytearray(1))


async def test_marks_may_come_from_any_thread(objects: Objects) -> None:
    out = objects.made[kvwire.Outgoing]

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
