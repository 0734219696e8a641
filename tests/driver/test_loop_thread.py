"""A call from another thread, loop or process is refused where it is made."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

import kvwire
import kvwire_store
from kvwire import UsageError
from kvwire.aio import LoopThread
from tests.support.caches import Memory
from tests.support.pairs import Pair, connected

# What only reads, or says that it is thread-safe.
ANYWHERE: Final = {
    kvwire.Communicator: set[str](),
    kvwire.Connection: set[str](),
    kvwire.Peer: set[str](),
    kvwire.Region: set[str](),
    # `send`, `throw` and `close` are what asyncio calls of a coroutine.
    kvwire.Request: {"done", "result", "send", "throw", "close"},
    kvwire.Outgoing: {"done", "ready", "finish", "extend"},
    kvwire.Incoming: {"done", "layer_landed"},
    kvwire_store.BlockStore: {"open", "stats", "tenant_stats"},
    kvwire_store.StoreRequest: {"done"},
}


class Things:
    """One object of each kind, and a call of each of their methods."""

    def __init__(self, pair: Pair, store: kvwire_store.BlockStore) -> None:
        comm, conn, kv = pair.far, pair.right, Memory().cache
        peer, keys = comm.peer("127.0.0.1:1"), [b"k"]
        self.region = comm.register(bytearray(8))
        self.grant = pair.near.register(bytearray(8)).grant(pair.left)
        self.request = conn.recv(1)
        self.outgoing = comm.publish("x", kv, [0], growing=True, tokens=8)
        self.incoming = comm.expect("y", Memory().cache, [1])
        self.stored = store.put(keys, kv, [0])
        self.calls: dict[tuple[type, str], Callable[[], object]] = {
            (kvwire.Communicator, "listen"): lambda: comm.listen("inproc://"),
            (kvwire.Communicator, "connect"): lambda: comm.connect(pair.address),
            (kvwire.Communicator, "connections"): comm.connections,
            (kvwire.Communicator, "accept"): comm.accept,
            (kvwire.Communicator, "peer"): lambda: comm.peer("127.0.0.1:1"),
            (kvwire.Communicator, "members"): comm.members,
            (kvwire.Communicator, "announce"): lambda: comm.announce(role="decode"),
            (kvwire.Communicator, "withdraw"): comm.withdraw,
            (kvwire.Communicator, "register"): lambda: comm.register(bytearray(1)),
            (kvwire.Communicator, "publish"): lambda: comm.publish("z", kv, [0]),
            (kvwire.Communicator, "expect"): lambda: comm.expect("z", kv, [0]),
            (kvwire.Communicator, "expose"): lambda: comm.expose("z", kv),
            (kvwire.Communicator, "transfers"): comm.transfers,
            (kvwire.Communicator, "snapshot"): comm.snapshot,
            (kvwire.Communicator, "fired"): lambda: comm.fired(None),
            (kvwire.Communicator, "close"): comm.close,
            (kvwire.Communicator, "abort"): comm.abort,
            (kvwire.Connection, "send"): lambda: conn.send(1, b"x"),
            (kvwire.Connection, "recv"): lambda: conn.recv(1),
            (kvwire.Connection, "discard"): lambda: conn.discard(1),
            (kvwire.Connection, "put"): lambda: conn.put(b"12345678", self.grant),
            (kvwire.Connection, "get"): lambda: conn.get(self.grant, bytearray(8)),
            (kvwire.Connection, "pull"): lambda: conn.pull("z", kv, [0]),
            (kvwire.Connection, "push"): lambda: conn.push("z", kv, [0]),
            (kvwire.Connection, "window"): lambda: conn.window("z"),
            (kvwire.Connection, "close"): conn.close,
            (kvwire.Connection, "abort"): conn.abort,
            (kvwire.Connection, "wait_closed"): conn.wait_closed,
            (kvwire.Peer, "connect"): peer.connect,
            (kvwire.Peer, "send"): lambda: peer.send(1, b"x"),
            (kvwire.Peer, "recv"): lambda: peer.recv(1),
            (kvwire.Peer, "put"): lambda: peer.put(b"12345678", self.grant),
            (kvwire.Peer, "get"): lambda: peer.get(self.grant, bytearray(8)),
            (kvwire.Peer, "pull"): lambda: peer.pull("z", kv, [0]),
            (kvwire.Peer, "push"): lambda: peer.push("z", kv, [0]),
            (kvwire.Peer, "window"): lambda: peer.window("z"),
            (kvwire.Peer, "close"): peer.close,
            (kvwire.Region, "grant"): lambda: self.region.grant(conn),
            (kvwire.Region, "revoke"): self.region.revoke,
            (kvwire.Region, "close"): self.region.close,
            (kvwire.Request, "cancel"): self.request.cancel,
            (kvwire.Request, "released"): self.request.released,
            (kvwire.Outgoing, "drained"): self.outgoing.drained,
            (kvwire.Outgoing, "abort"): self.outgoing.abort,
            (kvwire.Outgoing, "renew_lease"): self.outgoing.renew_lease,
            (kvwire.Incoming, "drained"): self.incoming.drained,
            (kvwire.Incoming, "abort"): self.incoming.abort,
            (kvwire.Incoming, "layer"): lambda: self.incoming.layer(0),
            (kvwire.Incoming, "layer_event"): lambda: self.incoming.layer_event(0),
            (kvwire_store.BlockStore, "match"): lambda: store.match(keys, kv),
            (kvwire_store.BlockStore, "present"): lambda: store.present(keys, kv),
            (kvwire_store.BlockStore, "put"): lambda: store.put(keys, kv, [0]),
            (kvwire_store.BlockStore, "get"): lambda: store.get(keys, kv, [0]),
            (kvwire_store.BlockStore, "delete"): lambda: store.delete(keys, kv),
            (kvwire_store.BlockStore, "delete_all"): lambda: store.delete_all(kv),
            (kvwire_store.BlockStore, "pin"): lambda: store.pin(keys, kv),
            (kvwire_store.BlockStore, "unpin"): lambda: store.unpin(keys, kv),
            (kvwire_store.BlockStore, "prefetch"): lambda: store.prefetch(keys, kv),
            (kvwire_store.BlockStore, "flush"): store.flush,
            (kvwire_store.BlockStore, "require_room"): lambda: store.require_room(kv),
            (kvwire_store.BlockStore, "close"): store.close,
            (kvwire_store.StoreRequest, "drained"): self.stored.drained,
        }
        self.marks: list[Callable[[], object]] = [
            lambda: self.outgoing.extend([1]),
            self.outgoing.ready,
            self.outgoing.finish,
        ]

    def refusals(self) -> list[str]:
        """What each call says where this is called."""
        awaited = (self.request, self.stored, self.outgoing, self.incoming)
        calls: list[Callable[[], object]] = [*self.calls.values()]
        calls += [functools.partial(_awaited, each) for each in awaited]
        return [_refusal(call) for call in calls]

    async def over(self) -> None:
        self.request.cancel()
        self.outgoing.abort()
        self.incoming.abort()
        await self.outgoing.drained()
        await self.incoming.drained()
        await self.region.close()


async def _awaited(thing: Any) -> object:
    return await thing


def _refusal(call: Callable[[], object]) -> str:
    async def run() -> None:
        result = call()
        if inspect.isawaitable(result):
            await result

    try:
        asyncio.run(run())
    except UsageError as exc:
        return str(exc)
    return f"{call} was not refused"


@asynccontextmanager
async def made() -> AsyncIterator[Things]:
    async with (
        connected("inproc") as pair,
        kvwire_store.BlockStore.open(["memory:1MiB"]) as store,
    ):
        found = Things(pair, store)
        yield found
        await found.over()


@pytest.fixture
async def things() -> AsyncIterator[Things]:
    async with made() as found:
        yield found


def test_every_public_method_is_tried() -> None:
    tried = {key for key in _methods() if key[1] not in ANYWHERE[key[0]]}
    assert tried == set(_keys())


def _methods() -> set[tuple[type, str]]:
    return {
        (cls, name)
        for cls in ANYWHERE
        for name in dir(cls)
        if not name.startswith("_") and inspect.isfunction(getattr(cls, name))
    }


def _keys() -> list[tuple[type, str]]:
    async def keys() -> list[tuple[type, str]]:
        async with made() as found:
            return list(found.calls)

    return asyncio.run(keys())


async def test_another_thread_is_refused(things: Things) -> None:
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.extend(things.refusals()), name="me")
    thread.start()
    await asyncio.to_thread(thread.join)
    owner = threading.current_thread().name
    for text in said:
        assert "called from thread 'me', but the object belongs" in text
        assert f"event loop of thread {owner!r}" in text
        assert "engine.run(coroutine)" in text
        assert "kvwire.Engine" in text
    assert not things.request.done()


async def test_marks_may_come_from_any_thread(things: Things) -> None:
    def mark() -> None:
        for call in things.marks:
            call()

    await asyncio.to_thread(mark)
    assert not things.outgoing.done()


def test_another_loop_of_the_same_thread_is_refused() -> None:
    loop = asyncio.new_event_loop()

    async def opened() -> tuple[
        kvwire.Communicator, kvwire.Communicator, kvwire.Request[bytearray]
    ]:
        comm, far = await kvwire.open(), await kvwire.open()
        conn = await comm.connect(await far.listen("inproc://"))
        return comm, far, conn.recv(1)

    async def named() -> kvwire.Peer:
        return comm.peer("127.0.0.1:1")

    comm, far, request = loop.run_until_complete(opened())
    peer = loop.run_until_complete(named())
    # Not only by the await: no task of the request may start on the wrong loop.
    assert _refusal(lambda: peer.send(1, b"x")).startswith("Peer.send: ")
    for call in (lambda: comm.listen("inproc://"), lambda: request):
        assert "another event loop, which is not running" in _refusal(call)
    loop.run_until_complete(comm.close())
    loop.run_until_complete(far.close())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    with pytest.raises(UsageError, match="is closed: open a communicator in each"):
        comm.register(bytearray(1))


async def test_a_loop_may_move_to_another_thread() -> None:
    thread = LoopThread()
    thread.ident += 1  # as if it had been another
    thread.check("anything")
    assert thread.ident == threading.get_ident()
