"""Wrong uses that take more than one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvwire
from kvwire import Outcome
from tests.support.wrong_uses.things import ME


def grant(t: Any) -> Any:
    """Make a grant of 8 bytes."""
    return t.b.register(bytearray(8), "readwrite").grant(t.back)


def unawaited(t: Any) -> None:
    """Pass a coroutine where a connection is due."""
    connecting = t.a.connect("inproc://nobody")
    try:
        t.a.register(bytearray(1)).grant(connecting)
    finally:
        connecting.close()


def spec(**changed: Any) -> kvwire.KVSpec:
    """Make a spec with some fields changed."""
    fields: dict[str, Any] = {
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 4,
        "block_tokens": 2,
        "dtype": "float32",
    }
    return kvwire.KVSpec(**fields | changed)


def marked_twice(t: Any) -> None:
    out = t.b.publish("x", t.kv, [0])
    out.ready(layers=0)
    out.ready(layers=0)


async def pull_closed(t: Any) -> Outcome:
    """Pull on a connection that this side has closed."""
    await t.conn.close()
    outcome: Outcome = await t.conn.pull("x", t.kv, [0])
    return outcome


async def push_aborted(t: Any) -> Outcome:
    """Push on a connection that this side has aborted."""
    t.conn.abort("no more")
    outcome: Outcome = await t.conn.push("x", t.kv, [0])
    return outcome


async def other_model(t: Any) -> Outcome:
    """Pull into another model's cache."""
    other_spec = spec(layers=2, head_dim=8)
    tensors = [np.zeros((4, 2, 2, 1, 8), np.float32) for _ in range(2)]
    other = kvwire.PagedCache(other_spec, tensors)
    t.b.publish("x", other, [0])
    outcome: Outcome = await t.conn.pull("x", t.kv, [0])
    return outcome


async def request_elsewhere(t: Any) -> object:
    """Await a request on another loop."""
    request = t.conn.recv(1)

    async def wait() -> object:
        return await request

    return await t.from_loop(wait)


async def after_close(t: Any) -> None:
    """Connect with a communicator that is closed."""
    await t.a.close()
    await t.a.connect("127.0.0.1:1")


async def send_after_close(t: Any) -> None:
    """Send on a connection that is closed."""
    await t.conn.close()
    await t.conn.send(1, b"x")


def engine_inside() -> None:
    """Call an engine from its own thread."""

    async def inside(_: kvwire.Communicator) -> None:
        engine.connect("127.0.0.1:1")

    with kvwire.Engine() as engine:
        engine.start(inside).result()


def engine_closed() -> None:
    """Call an engine that is closed."""
    engine = kvwire.Engine()
    engine.close()
    engine.connect("127.0.0.1:1")


async def store(tier: str, call: Callable[[Any], Any] | None = None) -> None:
    """Open a store with one tier, and call it."""
    async with kvwire.BlockStore.open([tier]) as opened:
        if call is not None:
            await call(opened)


async def no_store(t: Any) -> Outcome:
    """Get from a store whose server is a communicator."""
    where = await t.b.listen("127.0.0.1:0")
    tier = f"kvwire://127.0.0.1:{where.port}?timeout=0.3"
    async with kvwire.BlockStore.open([tier]) as opened:
        outcome: Outcome = await opened.get([b"h"], t.kv, [0])
        return outcome


async def directory_away(t: Any) -> None:
    """Look for a peer in a directory that cannot be reached."""
    async with kvwire.open(
        directory="redis://127.0.0.1:1", handshake_timeout_s=0.5
    ) as comm:
        await comm.peer("role=prefill").connect()


async def twice(t: Any) -> None:
    """Listen where this process listens."""
    await t.b.listen(await t.a.listen("127.0.0.1:0"))


async def expired(t: Any) -> None:
    """Show a certificate whose time is over."""
    ca = t.ca()
    await t.meet(ca.config(ME, days=(-3, -1)), ca.config(ME))


async def unlisted(t: Any) -> None:
    """Show a certificate whose name the peer does not accept."""
    ca = t.ca()
    await t.meet(ca.config(ME), ca.config(ME, "spiffe://kvwire.test/else"))


async def connect(t: Any, *, to: Any) -> None:
    await t.a.connect(to)


async def listen(t: Any, *, on: Any) -> None:
    await t.a.listen(on)
