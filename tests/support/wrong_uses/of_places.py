"""Wrong threads and loops, forgotten words, what is closed already."""

from __future__ import annotations

import asyncio
from typing import Final

from kvwire import ClosedOK, ConnectionClosed, Outcome
from tests.support.wrong_uses import steps
from tests.support.wrong_uses.of_calls import call, untyped
from tests.support.wrong_uses.things import WrongUse

PLACES: Final = [
    call(
        "conn.send, from another thread",
        lambda t: t.from_thread(lambda: t.conn.send(1, b"x")),
        "Connection.send: called from thread 'worker', and what it is",
    ),
    call(
        "comm.connect, on another loop",
        lambda t: t.from_loop(lambda: t.a.connect("127.0.0.1:1")),
        "Communicator.connect: called from thread 'worker', and what",
    ),
    call(
        "await request, on another loop",
        steps.request_elsewhere,
        "await Request: called from thread 'worker', and what it is",
    ),
    call(
        "conn.send, in a process that was forked",
        lambda t: t.from_fork(lambda: t.conn.send(1, b"x")),
        "Connection.send: what it is called on belongs to process",
    ),
    call(
        "with kvwire.open()",
        lambda t: untyped.open().__enter__(),
        "with kvwire.open: write `async with`, in a coroutine;",
    ),
    call(
        "with comm",
        lambda t: t.a.__enter__(),
        "with Communicator: write `async with`, in a coroutine",
    ),
    call(
        "with conn",
        lambda t: t.conn.__enter__(),
        "with Connection: write `async with`, in a coroutine",
    ),
    call(
        "with out",
        lambda t: t.a.publish("x", t.kv, [0]).__enter__(),
        "with Outgoing: write `async with`, in a coroutine",
    ),
    call(
        "kvwire.open().listen(...), without await",
        lambda t: untyped.open().listen,
        "listen: it is not open yet: `it = await kvwire.open(...)`",
    ),
    call(
        "comm.connect, after close",
        steps.after_close,
        "the communicator is closed",
        ClosedOK,
    ),
    call(
        "conn.send, after close",
        steps.send_after_close,
        "this side closed the connection",
        ConnectionClosed,
    ),
    call(
        "kvwire.Engine(lane=4)",
        lambda t: untyped.Engine(lane=4),
        "arguments: there is no key 'lane'; did you mean 'lanes'?",
    ),
    call(
        "engine.connect, from its own thread",
        lambda _: asyncio.to_thread(steps.engine_inside),
        "an Engine cannot be waited for from its own thread, which",
    ),
    call(
        "engine.connect, after close",
        lambda _: asyncio.to_thread(steps.engine_closed),
        "the Engine is closed",
        ClosedOK,
    ),
    call(
        "BlockStore.open([...]).put(...), without await",
        lambda t: untyped.BlockStore.open(["memory:1MiB"]).put,
        "put: it is not open yet: `it = await kvwire.BlockStore.open",
    ),
    call(
        "with BlockStore.open([...])",
        lambda t: untyped.BlockStore.open(["memory:1MiB"]).__enter__(),
        "with kvwire.BlockStore.open: write `async with`, in a",
    ),
    WrongUse(
        "a store address where no store server is",
        steps.no_store,
        Outcome,
        "no welcome within 0.3 s",
    ),
    call(
        "store.get(hashes, tensors, [0])",
        lambda t: steps.store("memory:1MiB", lambda s: s.get([b"h"], [1], [0])),
        "cache: a kvwire.PagedCache is needed, and this is a list",
    ),
    call(
        "store.get(['text'], cache, [0])",
        lambda t: steps.store("memory:1MiB", lambda s: s.get(["h"], t.kv, [0])),
        "hashes: one is not bytes; a hash is the same everywhere",
    ),
    call(
        "store.put(2 hashes, cache, [0])",
        lambda t: steps.store("memory:1MiB", lambda s: s.put([b"a", b"b"], t.kv, [0])),
        "hashes: 2 of group 'kv' stand for 4 tokens, and its 1 blocks",
    ),
    call(
        "BlockStore.open('memory:1GiB')",
        lambda t: untyped.BlockStore.open("memory:1GiB"),
        'tiers: a list, such as ["memory:8GiB"]',
    ),
    call(
        "BlockStore.open(['memory'])",
        lambda t: steps.store("memory"),
        "tier 'memory': write memory:8GiB, or disk:path?size=100GiB",
    ),
    call(
        "BlockStore.open(['memory:lots'])",
        lambda t: steps.store("memory:lots"),
        "tier 'memory:lots': size 'lots': write a number and B, KiB",
    ),
    call(
        "BlockStore.open(['memroy:1MiB'])",
        lambda t: steps.store("memroy:1MiB"),
        "tiers: 'memroy:1MiB' is first; every block passes through",
    ),
    call(
        "BlockStore.open(['disk:/x?sise=1MiB'])",
        lambda t: steps.store("disk:/x?sise=1MiB"),
        "tiers: 'disk:/x?sise=1MiB' is first; every block passes",
    ),
]
