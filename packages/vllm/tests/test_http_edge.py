"""What clients, browsers and attackers send the proxy over HTTP, and what they get."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from kvwire.limits import MIB
from kvwire_vllm.proxy import app as proxy_app
from kvwire_vllm.proxy import body as proxy_body
from kvwire_vllm.proxy.admission import Admission
from kvwire_vllm.proxy.app import ProxyApp
from kvwire_vllm.proxy.limits import (
    PROXY_BODY_VALUES_MAX,
    PROXY_HEADERS_MAX,
)
from packages.vllm.tests.support.proxies import (
    ASK,
    BODY,
    D1,
    EVENTS,
    PATH,
    Engines,
    Handler,
    Said,
    app,
    call,
    fine,
    post,
    proxy,
    turns_until,
    when,
)

H2C = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def generate(headers: bytes, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    line = b"POST /v1/completions HTTP/" + version
    return line + b"\r\nhost: x\r\n" + headers + b"\r\n" + body


class Client:
    """A connection to a proxy, of which the test writes each byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: Any) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes) -> tuple[int, Mapping[str, str]]:
        """The status and the headers of the answer."""
        self.writer.write(data)
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
        line, *fields = head.decode().rstrip().split("\r\n")
        named = (field.partition(": ") for field in fields)
        return int(line.split()[1]), {name.lower(): value for name, _, value in named}

    async def rest(self) -> bytes:
        """What comes until the proxy closes."""
        async with asyncio.timeout(60):
            return await self.reader.read()

    async def is_cut(self) -> bool:
        try:
            return await self.rest() == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def connecting(
    serves: Engines | ProxyApp, **options: Any
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, Client]]]:
    """A proxy at a port; each call is another client of it."""
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(proxy(serves, **options))

        async def connect() -> Client:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            return Client(reader, writer)

        yield connect


def says(
    headers: Mapping[str, str],
    parts: Callable[[], AsyncIterator[bytes]],
    status: int = 200,
) -> Handler:
    """An engine that answers this to a request, and is well."""

    async def handler(body: dict[str, Any]) -> Said:
        return (status, headers, parts()) if body else await fine(body)

    return handler


def whole(headers: Mapping[str, str], body: bytes, status: int = 200) -> Handler:
    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 16):
            yield body[at : at + 16]

    return says(headers, parts, status)


# --- what is no request ---------------------------------------------------------------

UNCLEAR = {
    "a length and chunks": generate(LENGTH + CHUNKED, CHUNKS),
    "chunks and a length": generate(CHUNKED + LENGTH, CHUNKS),
    "two lengths": generate(LENGTH + b"content-length: 3\r\n"),
    "one length twice": generate(LENGTH + LENGTH),
    "a list of lengths": generate(b"content-length: 50, 50\r\n"),
    "a sign": generate(b"content-length: +50\r\n"),
    "a negative length": generate(b"content-length: -1\r\n"),
    "an underscore": generate(b"content-length: 5_0\r\n"),
    "too many digits": generate(b"content-length: " + b"9" * 5000 + b"\r\n"),
    "no digits": generate(b"content-length: \r\n"),
    "chunks of nobody": generate(b"transfer-encoding: xchunked\r\n", CHUNKS),
    "chunks, not last": generate(b"transfer-encoding: chunked, gzip\r\n", CHUNKS),
    "chunks twice": generate(CHUNKED + CHUNKED, CHUNKS),
    "a space before the colon": generate(b"content-length : 50\r\n"),
    "a folded header": generate(b"x-a: b\r\n c\r\n" + LENGTH),
    "folded chunks": generate(b"transfer-encoding:\r\n chunked\r\n", CHUNKS),
    "a NUL": generate(b"x-a: b\0\r\n" + LENGTH),
    "a bare CR": generate(b"x-a: b\rc\r\n" + LENGTH),
    "bare LFs": generate(LENGTH).replace(b"\r\n", b"\n"),
    "a chunk of no size": generate(CHUNKED, b"xyz\r\n" + BODY),
    "a chunk of a sign": generate(CHUNKED, CHUNKS.replace(b"\r\n", b";\r\n", 1)[1:]),
    "a chunk of 2**80": generate(CHUNKED, b"f" * 20 + b"\r\n" + BODY),
    "a chunk that goes on": generate(CHUNKED, CHUNKS.replace(b"\r\n0", b"xx0")),
    "a line of LF in chunks": generate(CHUNKED, CHUNKS.replace(b"\r\n", b";\n", 1)),
    "a length behind chunks": generate(CHUNKED, CHUNKS[:-2] + LENGTH + b"\r\n"),
    "two hosts": generate(b"host: y\r\n" + LENGTH),
    "no host": generate(LENGTH).replace(b"host: x\r\n", b""),
    "another version": generate(LENGTH, version=b"9.9"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"a" * 64,
}


@pytest.mark.parametrize("offer", [b"", H2C], ids=["", "offered"])
@pytest.mark.parametrize("sent", UNCLEAR.values(), ids=UNCLEAR.keys())
async def test_what_two_servers_may_read_differently(sent: bytes, offer: bytes) -> None:
    """It is refused and its connection is closed, also after an offer of HTTP/2."""
    engines = Engines()
    async with connecting(engines) as connect:
        one = await connect()
        if offer:
            assert (await one.ask(generate(offer + LENGTH)))[0] == 200
            await one.reader.readuntil(b"\r\n0\r\n\r\n")
        asked = len(engines.asked)
        status, headers = await one.ask(sent + HEALTH)
        assert (status, headers["connection"]) == (400, "close")
        assert headers["server"] == "kvwire"
        body = await one.rest()
        message = json.loads(body)["error"]["message"]
        # One line, without the client's bytes and the parser's arrows.
        assert message
        assert not re.search(r"\n|b'|\^", message)
        assert not re.search(rb"HTTP/1\.\d \d", body)
        assert len(engines.asked) == asked


MANY = b"".join(b"x-%d: a\r\n" % number for number in range(PROXY_HEADERS_MAX + 1))


@pytest.mark.parametrize(
    ("sent", "piece"),
    [
        (generate(b"")[:-2], b"x-a: " + b"b" * 900 + b"\r\n"),
        (generate(MANY + LENGTH), b""),
        (generate(b"")[:-2] + b"x-a: ", b"b" * 1000),
        (b"GET /", b"a" * 1000),
        (b"", b"A" * 1000),
        (generate(CHUNKED, CHUNKS[:-2]), b"x-a: " + b"b" * 900 + b"\r\n"),
        (generate(CHUNKED, CHUNKS[:-2] + b"x-a: "), b"b" * 1000),
    ],
    ids=[
        *("headers", "many headers", "a header", "a target", "a method"),
        *("trailers", "a trailer"),
    ],
)
async def test_a_head_without_an_end(sent: bytes, piece: bytes) -> None:
    """It is refused before much of it has come; what is behind a body when that is."""
    engines = Engines()
    application = app(engines, prefill=(), decode=[D1], body_s=0.5)
    async with connecting(application) as connect:
        one = await connect()
        one.writer.write(sent)
        answered = asyncio.ensure_future(one.rest())
        written = 0
        with suppress(ConnectionError):
            while piece and not answered.done():
                assert written < 32 * MIB
                one.writer.write(piece)
                written += len(piece)
                await one.writer.drain()
                await asyncio.sleep(0)
        with suppress(ConnectionError):
            assert re.match(rb"HTTP/1.. 40[08]|$", await answered)
        assert not any(body for _, body in engines.asked)


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/pause"),
        *("/reset_mm_cache", "/collective_rpc", "/server_info", "/resume", "/shutdown"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile"),
        *("/scale_elastic_ep", "/update_weights", "/abort_requests", "/invocations"),
        *("/inference/v1/generate", "/docs", "/openapi.json", "/load", "/ping", "/"),
        *("/v1/models/../../sleep", "/v1/models/%2e%2e/%2e%2e/sleep", "//v1/models"),
        *("/v1/responses/../sleep", "/v1/models%3fa", "/V1/models", "/v1/responses"),
    ],
)
async def test_what_engines_have_for_their_operators_is_not_passed(path: str) -> None:
    engines = Engines()
    async with connecting(engines) as connect:
        for method in (b"GET", b"POST", b"OPTIONS"):
            head = b"%b %b HTTP/1.1\r\nhost: x\r\n\r\n" % (method, path.encode())
            assert (await (await connect()).ask(head))[0] == 404
    assert not engines.asked


# --- offers of another protocol -------------------------------------------------------

HALVES = (BODY[: len(BODY) // 2], BODY[len(BODY) // 2 :])
IN_CHUNKS = b"".join(b"%x\r\n%s\r\n" % (len(half), half) for half in HALVES)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("headers", "body"),
    [(LENGTH, BODY), (CHUNKED, IN_CHUNKS + b"0\r\n\r\n")],
    ids=["length", "chunks"],
)
@pytest.mark.parametrize("offer", [H2C, WEBSOCKET, b""], ids=["h2c", "ws", "none"])
async def test_an_offer_is_passed_by(
    offer: bytes, headers: bytes, body: bytes, *, at_once: bool
) -> None:
    """Its request comes to an engine whole, also byte by byte; one more follows."""
    engines, sent = Engines(), generate(offer + headers, body)
    async with connecting(engines) as connect:
        one = await connect()
        for count in range(1, 3):
            for part in [sent] if at_once else [bytes((b,)) for b in sent]:
                one.writer.write(part)
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                answer = await one.reader.readuntil(b"\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            assert b" 9}" in answer
            heard = [body for _, body in engines.asked if body]  # not of its health
            assert heard == [ASK] * count


# --- how long, and how much -----------------------------------------------------------


async def test_a_head_that_comes_slowly() -> None:
    async with connecting(Engines(), idle_s=0.2) as connect:
        silent, slow = await connect(), await connect()
        slow.writer.write(generate(LENGTH)[:20])
        assert await silent.is_cut()
        assert await slow.is_cut()


@pytest.mark.parametrize(
    "sent",
    [
        generate(LENGTH, BODY[:-1]),
        generate(CHUNKED, CHUNKS[:-1]),
        generate(CHUNKED, b"1;" + b"a" * 10_000),
    ],
    ids=["a length", "chunks", "a chunk's extension"],
)
async def test_a_body_that_comes_slowly(sent: bytes) -> None:
    """It has so long, and for what has come some more; its place is free then."""
    application = app(
        Engines(),
        admission=Admission(1),
        body_s=0.2,
        body_bytes_per_s=10 * len(BODY),
    )
    async with connecting(application) as connect:
        one = await connect()
        began = asyncio.get_running_loop().time()
        status, _ = await one.ask(sent)
        assert status == 408
        assert asyncio.get_running_loop().time() - began > 0.2
        await one.rest()
        other = await connect()
        assert (await other.ask(generate(LENGTH)))[0] == 200


async def test_a_body_counts_before_it_is_read() -> None:
    """Who comes then is sent away before a body is sent."""
    application = app(Engines(), admission=Admission(1))
    async with connecting(application) as connect:
        slow, other = await connect(), await connect()
        status, _ = await slow.ask(generate(b"expect: 100-continue\r\n" + LENGTH, b""))
        assert status == 100
        status, headers = await other.ask(
            generate(b"expect: 100-continue\r\n" + LENGTH, b"")
        )
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert (await slow.ask(BODY))[0] == 200


async def test_bodies_of_all_requests_together() -> None:
    """As long as their answers are under way, for they may be sent again."""
    may_answer = asyncio.Event()
    engines = Engines(d1=when(may_answer), d2=when(may_answer))
    application = app(engines, admission=Admission(bodies_bytes_max=1000))
    body = {**ASK, "prompt": "a" * 600}
    first = asyncio.ensure_future(post(application, body))
    await turns_until(lambda: len(engines.asked) == 2)
    refused = await post(application, body)
    assert refused.status_code == 429
    assert " B are running" in refused.json()["error"]["message"]
    may_answer.set()
    assert (await first).status_code == 200
    assert (await post(application, body)).status_code == 200


BOMBS = {
    "lists": b'{"prompt":"a","z":[' + b"[]," * (PROXY_BODY_VALUES_MAX // 8) + b"0]}",
    "objects": b'{"prompt":[' + b"{}," * (PROXY_BODY_VALUES_MAX // 8) + b"0]}",
    "fields": b'{"":0' + b',"":0' * PROXY_BODY_VALUES_MAX + b"}",
    "numbers": b'{"prompt":[' + b"0," * PROXY_BODY_VALUES_MAX + b"0]}",
    "a deep one": b'{"prompt":[' + b"[" * (PROXY_BODY_VALUES_MAX // 8) + b"0]}",
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS.keys())
async def test_a_body_of_many_small_values(body: bytes) -> None:
    engines = Engines()
    said = await call(app(engines), "POST", PATH, content=body)
    assert said.status_code == 413
    assert f"{PROXY_BODY_VALUES_MAX} values" in said.json()["error"]["message"]
    assert not engines.asked


async def test_a_body_that_becomes_more() -> None:
    """A little gzip may become very much: nothing is unpacked."""
    engines = Engines()
    for coding in ("gzip", "deflate", "br", "zstd"):
        said = await call(
            app(engines),
            *("POST", PATH),
            content=gzip.compress(BODY),
            headers={"content-encoding": coding},
        )
        assert said.status_code == 415
    async with connecting(engines) as connect:
        one = await connect()
        packed = gzip.compress(BODY)
        headers = b"content-encoding: gzip\r\ncontent-length: %d\r\n" % len(packed)
        assert (await one.ask(generate(headers, packed)))[0] == 415
        other = await connect()
        coded = b"transfer-encoding: gzip, chunked\r\n"
        assert (await other.ask(generate(coded, CHUNKS)))[0] == 415
    assert not any(body for _, body in engines.asked)


async def test_a_length_that_is_too_much() -> None:
    """It is refused before it comes."""
    async with connecting(Engines()) as connect:
        for length in (b"67108865", b"4611686018427387904"):
            one = await connect()
            status, _ = await one.ask(generate(b"content-length: %s\r\n" % length, b""))
            assert status == 413


async def test_a_client_that_takes_nothing() -> None:
    """It is cut, and its turn and its engine are free again."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def much() -> AsyncIterator[bytes]:
        begun.set()
        try:
            while True:
                yield b"data: 1\n\n" * 10_000
        finally:
            ended.set()

    engine = says(EVENTS, much)
    engines = Engines(d1=engine, d2=engine)
    application = app(engines, admission=Admission(1), unread_s=0.2)
    async with connecting(application) as connect:
        one = await connect()
        one.writer.transport.pause_reading()
        one.writer.write(generate(LENGTH))
        async with asyncio.timeout(60):
            await begun.wait()
        refused = await connect()
        assert (await refused.ask(generate(LENGTH)))[0] == 429
        async with asyncio.timeout(60):
            await ended.wait()
        engines.handlers.clear()
        other = await connect()
        assert (await other.ask(generate(LENGTH)))[0] == 200


async def test_more_connections_than_there_may_be() -> None:
    """The oldest without a request makes room; with one, it does not."""
    may_answer = asyncio.Event()
    asked: asyncio.Queue[None] = asyncio.Queue()

    async def waits(body: dict[str, Any]) -> Said:
        if body:
            asked.put_nowait(None)
            await may_answer.wait()
        return await fine(body)

    engines = Engines(d1=waits, d2=waits)
    async with connecting(app(engines), connections_max=2) as connect:
        busy, idle = await connect(), await connect()
        asking = asyncio.ensure_future(busy.ask(generate(LENGTH)))
        assert (await idle.ask(HEALTH))[0] == 200
        await asyncio.wait_for(asked.get(), 60)
        third = await connect()
        also_busy = asyncio.ensure_future(third.ask(generate(LENGTH)))
        await idle.reader.readexactly(len(b'{"status":"ok"}'))
        assert await idle.is_cut()
        await asyncio.wait_for(asked.get(), 60)
        assert await (await connect()).is_cut()
        may_answer.set()
        assert [(await one)[0] for one in (asking, also_busy)] == [200, 200]


async def test_large_bodies_that_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a turn of the loop, and others have theirs between them."""
    turns: list[int] = []
    turn = 0
    decoded = proxy_body.decoded

    def noted(content: bytes, kind: Any) -> Any:
        turns.append(turn)
        return decoded(content, kind)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(proxy_app, "decoded", noted)
    counting = asyncio.ensure_future(count())
    application = app(Engines())
    body = {**ASK, "prompt": "a" * 100_000}
    said = await asyncio.gather(*(post(application, body) for _ in range(4)))
    counting.cancel()
    assert [one.status_code for one in said] == [200] * 4
    assert len(set(turns)) == 4


# --- what engines say -----------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_length_that_an_engine_gives(version: bytes) -> None:
    """A client of HTTP/1.0 knows no chunks, and gets none."""
    text = b'{"choices":["%s"]}' % (b"a" * 100)
    events = b"data: %s\n\ndata: [DONE]\n\n" % text
    plain = {"content-type": "application/json"}
    for kind, said, given in (
        (plain, text, True),
        (plain, text, False),
        (EVENTS, events, True),  # an error may be added to them
    ):
        length = {"content-length": str(len(said))} if given else {}
        engine = whole(kind | length, said)
        application = app(Engines(d1=engine, d2=engine))
        async with connecting(application) as connect:
            one = await connect()
            status, got = await one.ask(generate(LENGTH, version=version))
            assert status == 200
            kept = given and kind is plain
            assert ("content-length" in got) is kept
            assert ("transfer-encoding" in got) is (version == b"1.1" and not kept)
            if version == b"1.0":
                assert await one.rest() == said


async def test_a_length_that_an_engine_does_not_keep() -> None:
    """The connection is cut, so its client knows."""

    async def parts() -> AsyncIterator[bytes]:
        yield b"half"
        raise aiohttp.ClientError("reset")

    breaks = says({"content-type": "text/plain", "content-length": "8"}, parts)
    application = app(Engines(d1=breaks, d2=breaks))
    async with connecting(application) as connect:
        one = await connect()
        assert (await one.ask(generate(LENGTH)))[0] == 200
        assert await one.rest() == b"half"


async def test_a_head_alone() -> None:
    """An answer to HEAD has no body, or what follows it would be read as one."""
    async with connecting(Engines()) as connect:
        one = await connect()
        for path in (b"/v1/models", b"/health", b"/nothing", b"/v1/completions"):
            head = b"HEAD %s HTTP/1.1\r\nhost: x\r\n\r\n" % path
            status, headers = await one.ask(head)
            assert status == {b"/nothing": 404, b"/v1/completions": 405}.get(path, 200)
            assert headers.get("allow") == ("POST" if status == 405 else None)
        assert (await one.ask(HEALTH))[0] == 200


async def test_what_an_engine_says_of_its_answer() -> None:
    kept = {
        "content-type": "application/json",
        "content-encoding": "gzip",
        "retry-after": "7",
        "www-authenticate": "Bearer",
    }
    engine = whole({**kept, "set-cookie": "a=b"}, gzip.compress(b"{}"), 429)
    said = await post(app(Engines(d1=engine, d2=engine, p1=engine, p2=engine)))
    assert said.status_code == 429
    assert {name: said.headers[name] for name in kept} == kept
    assert "set-cookie" not in said.headers


# --- pages in browsers ----------------------------------------------------------------

PAGES = [
    ({}, 200),
    ({"host": "localhost:8000"}, 200),
    ({"host": "127.0.0.1:8000"}, 200),
    ({"host": "[::1]:8000"}, 200),
    ({"host": "this-machine:8000"}, 200),
    ({"host": "kvwire.localhost"}, 200),
    ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
    ({"host": "localhost:8000", "origin": "http://localhost:3000"}, 403),
    ({"host": "localhost:8000", "origin": "http://page.example"}, 403),
    ({"host": "localhost:8000", "origin": "null"}, 403),
    ({"host": "localhost:8000", "origin": "http://["}, 403),
    # A name that its owner has let stand for 127.0.0.1.
    ({"host": "page.example:8000", "origin": "http://page.example:8000"}, 403),
    ({"host": "page.example:8000"}, 403),
    ({"host": "page.example."}, 403),
    ({"host": "[::1"}, 403),
]


@pytest.mark.parametrize("path", ["/drain", "/migrate"])
@pytest.mark.parametrize(("headers", "status"), PAGES)
async def test_a_page_in_a_browser(
    path: str, headers: dict[str, str], status: int
) -> None:
    """It asks from this host, whoever has written it; a key is what it has not."""
    application = app(Engines(), migrate=True)
    asked = {"engine": D1.url}
    said = await call(application, "POST", path, json=asked, headers=headers)
    assert said.status_code == status
    application = app(Engines(), migrate=True, operator_key=b"key")
    headers = {**headers, "authorization": "Bearer " + b"key".hex()}
    said = await call(application, "POST", path, json=asked, headers=headers)
    assert said.status_code == 200
