"""Wrong uses that are more than one call of what can be written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

import kvwire
import kvwire_store
from tests.support.wrong_uses.things import ME, SPEC, Things, grant

Step = Callable[[Things], Any]


def _unawaited(t: Things) -> None:
    connecting = t.a.connect("inproc://nobody")
    try:
        t.a.register(bytearray(1)).grant(connecting)
    finally:
        connecting.close()


def _marked_twice(t: Things) -> None:
    out = t.b.publish("x", t.kv, [0])
    out.ready(layers=0)
    out.ready(layers=0)


async def _pull_closed(t: Things) -> Any:
    await t.conn.close()
    return await t.conn.pull("x", t.kv, [0])


async def _push_aborted(t: Things) -> Any:
    t.conn.abort("no more")
    return await t.conn.push("x", t.kv, [0])


async def _other_model(t: Things) -> Any:
    tensors = [np.zeros((4, 2, 2, 1, 8), np.float32) for _ in range(2)]
    t.b.publish("x", kvwire.PagedCache(replace(SPEC, head_dim=8), tensors), [0])
    return await t.conn.pull("x", t.kv, [0])


async def _request_elsewhere(t: Things) -> object:
    request = t.conn.recv(1)

    async def wait() -> object:
        return await request

    return await t.from_loop(wait)


async def _opened_twice(_: Things) -> None:
    opening = kvwire.open()
    async with opening:
        await opening


async def _after_close(t: Things) -> None:
    await t.a.close()
    await t.a.connect("127.0.0.1:1")


async def _send_after_close(t: Things) -> None:
    await t.conn.close()
    await t.conn.send(1, b"x")


def _engine_inside() -> None:
    async def inside() -> None:
        engine.connect("127.0.0.1:1")

    with kvwire.Engine() as engine:
        engine.run(inside())


def _engine_closed() -> None:
    engine = kvwire.Engine()
    engine.close()
    engine.connect("127.0.0.1:1")


async def _store(verb: str, hashes: list[Any], cache: Any) -> None:
    """Call a store with one tier."""
    async with kvwire_store.BlockStore.open(["memory:1MiB"]) as store:
        await getattr(store, verb)(hashes, cache, [0])


async def _no_store(t: Things) -> Any:
    where = await t.b.listen("127.0.0.1:0")
    tier = f"kvwire://127.0.0.1:{where.port}?timeout=0.3"
    async with kvwire_store.BlockStore.open([tier]) as opened:
        return await opened.get([b"h"], t.kv, [0])


async def _directory_away(t: Things) -> None:
    where = "redis://127.0.0.1:1"
    async with kvwire.open(directory=where, handshake_timeout_s=0.5) as comm:
        await comm.peer("role=prefill").connect()


async def _listen_twice(t: Things) -> None:
    await t.b.listen(await t.a.listen("127.0.0.1:0"))


def _with_key(text: str, mode: int = 0o600) -> Step:
    return lambda t: t.opened(trust="psk", psk_file=t.file(text, mode))


def _with_certificates(**changed: str) -> Step:
    return lambda t: t.opened(**t.ca().config(ME) | changed)


def _psk(t: Things, name: str = "key") -> dict[str, str]:
    return {"trust": "psk", "psk_file": t.key(name)}


async def _expired(t: Things) -> None:
    ca = t.ca()
    await t.meet(ca.config(ME, days=(-3, -1)), ca.config(ME))


async def _unlisted(t: Things) -> None:
    ca = t.ca()
    await t.meet(ca.config(ME), ca.config(ME, "spiffe://kvwire.test/else"))


STEPS: Final[dict[str, Step]] = {
    # Configuration
    "open(name='x' * 200)": lambda t: t.opened(name="x" * 200),
    "open({'lanes': 4})": lambda t: kvwire.open({"lanes": 4}),  # type: ignore[arg-type]
    "a config file that is not there": lambda t: kvwire.Config.load(
        "/nowhere/kvwire.toml"
    ),
    "a config file that is no TOML": lambda t: t.toml("trust = psk"),
    "a key misspelt in a file": lambda t: t.toml("leese_s = 3"),
    "a table where a number is due": lambda t: t.toml("[lanes]\nx = 1"),
    # Addresses
    "listen where somebody listens": _listen_twice,
    # Peers, keys and certificates
    "a web server at the address": lambda t: t.stranger(
        b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n"
    ),
    "an SSH server at the address": lambda t: t.stranger(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a Redis at the address, which hangs up": lambda t: t.stranger(
        b"-ERR unknown command\r\n", ends=True
    ),
    "somebody at the address who says nothing": lambda t: t.stranger(b""),
    "somebody at the address who hangs up": lambda t: t.stranger(b"", ends=True),
    "somebody at the address who speaks TLS": lambda t: t.stranger(
        b"\x16\x03\x01" + bytes(40)
    ),
    "loopback to psk": lambda t: t.meet({}, _psk(t)),
    "psk to loopback": lambda t: t.meet(_psk(t), {}),
    "another key": lambda t: t.meet(_psk(t, "k1"), _psk(t, "k2")),
    "loopback to mtls": lambda t: t.meet({}, t.ca().config(ME)),
    "mtls to loopback": lambda t: t.meet(t.ca().config(ME), {}),
    "a certificate of another CA": lambda t: t.meet(
        t.ca("one").config(ME), t.ca("two").config(ME)
    ),
    "a certificate whose name `tls_peers` does not list": _unlisted,
    "names in `tls_peers` beside `*`, everybody": lambda t: t.opened(
        **t.ca().config(ME, "*", ME)
    ),
    "a certificate that has expired": _expired,
    "a certificate that is not there": _with_certificates(tls_cert_file="/nowhere"),
    "a CA file that is no PEM": _with_certificates(tls_ca_file="/dev/null"),
    "a key file that is not there": lambda t: t.opened(
        trust="psk", psk_file="/nowhere/key"
    ),
    "a key file that everybody may read": _with_key("00" * 32, 0o644),
    "a key file that holds a password": _with_key("secret"),
    "a key file that is too short": _with_key("00" * 8),
    "a directory that cannot be reached": _directory_away,
    "another model on the other side": lambda t: t.meet(
        {"profile": {"model": "a"}}, {"profile": {"model": "b"}}
    ),
    "transports that the sides do not share": lambda t: t.meet(
        {"require": ["tcp"]}, {"require": ["local"], "prefer": ["local"]}
    ),
    # Messages, regions and grants
    "conn.send(1, array[::2])": lambda t: t.conn.send(1, np.zeros(8)[::2]),
    "grant[3]": lambda t: grant(t)[3],
    "grant[::2]": lambda t: grant(t)[::2],
    "region.grant(comm.connect(...)), without await": _unawaited,
    # Caches and KV transfers
    "plan_prefill([], [inc])": lambda t: kvwire.plan_prefill(
        [], [t.a.expect("x", t.kv, [0])]
    ),
    "PagedCache(spec, tensors of another shape)": lambda t: kvwire.PagedCache(
        SPEC, [np.zeros((4, 2), np.float32)] * 2
    ),
    "PagedCache(spec, tensors of float64)": lambda t: kvwire.PagedCache(
        SPEC, [np.zeros((4, 2, 2, 1, 4))] * 2
    ),
    "PagedCache.grouped({'kv': spec})": lambda t: kvwire.PagedCache.grouped(
        {"kv": SPEC}  # type: ignore[dict-item]
    ),
    "conn.pull('x' * 300, cache, [0])": lambda t: t.conn.pull("x" * 300, t.kv, [0]),
    "comm.publish('x', cache, ...), twice": lambda t: [
        t.a.publish("x", t.kv, [n]) for n in (0, 1)
    ],
    "comm.expect('x', cache, ...), twice": lambda t: [
        t.a.expect("x", t.kv, [n]) for n in (0, 1)
    ],
    "out.ready(layers=0), twice": _marked_twice,
    "kvwire.join(of other blocks)": lambda t: kvwire.join(
        t.a.expect("x", t.kv, [0]), t.a.expect("y", t.kv, [1])
    ),
    "pull what nobody publishes, with a deadline": lambda t: t.conn.pull(
        "x", t.kv, [0], deadline=0.05
    ),
    "pull on a connection that is closed": _pull_closed,
    "push on a connection that was aborted": _push_aborted,
    "pull another model's cache": _other_model,
    # Threads, loops and forgotten words
    "conn.send, from another thread": lambda t: t.from_thread(
        lambda: t.conn.send(1, b"x")
    ),
    "comm.connect, on another loop": lambda t: t.from_loop(
        lambda: t.a.connect("127.0.0.1:1")
    ),
    "await request, on another loop": _request_elsewhere,
    "conn.send, in a process that was forked": lambda t: t.from_fork(
        lambda: t.conn.send(1, b"x")
    ),
    "await kvwire.open(), twice the same": _opened_twice,
    "comm.connect, after close": _after_close,
    "conn.send, after close": _send_after_close,
    "engine.connect, from its own thread": lambda t: asyncio.to_thread(_engine_inside),
    "engine.connect, after close": lambda t: asyncio.to_thread(_engine_closed),
    "a store address where no store server is": _no_store,
    "store.get(hashes, tensors, [0])": lambda t: _store("get", [b"h"], [1]),
    "store.get(['text'], cache, [0])": lambda t: _store("get", ["h"], t.kv),
    "store.put(2 hashes, cache, [0])": lambda t: _store("put", [b"a", b"b"], t.kv),
}
