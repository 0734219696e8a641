"""What the proxy takes from clients over HTTP, and what it passes on of answers."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from typing import Any

import aiohttp
import pytest

from kvwire_vllm.proxy.app import ProxyApp
from packages.vllm.tests.support.decoders import COUNT, Client, Decoder, moved, mover
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
    post,
    proxy,
    says,
    streamed,
    user_of,
)
from tests.support.pairs import turns, until

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def answers(serves: ProxyApp, sent: bytes) -> list[bytes]:
    """What a proxy sends to a connection with these bytes, which then ends."""
    async with proxy(serves) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            writer.write(sent)
            return (await reader.read()).split(b"HTTP/1.")[1:]


def generate(headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    line = b"POST /v1/completions HTTP/%s\r\nhost: x\r\n" % version
    return line + headers + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)


# --- what is not passed to engines ----------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/wake_up", "/collective_rpc", "/shutdown", "/openapi.json", "/"),
        *("/v1/load_lora_adapter", "/update_weights", "/inference/v1/generate"),
        *("/v1/models/../../sleep", "/v1/models/%2e%2e/%2e%2e/sleep", "//v1/models"),
        *("/v1/responses/../sleep", "/v1/models%3fa", "/V1/models", "/v1/responses"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_what_engines_have_for_their_operators(path: str, method: str) -> None:
    engines = Engines()
    line = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    (answer,) = await answers(app(engines), line.encode())
    assert answer.startswith(b"1 404")
    assert not engines.asked


async def test_another_method() -> None:
    said = await call(app(Engines()), "GET", PATH)
    assert (said.status_code, said.headers["allow"]) == (405, "POST")
    assert said.json()["error"]["message"]


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
async def test_an_offer_of_another_protocol_is_passed_by(offer: str) -> None:
    """The request with it comes to an engine whole, and so does the next one."""
    engines = Engines()
    offered = {"connection": "upgrade", "upgrade": offer, "http2-settings": "AAMA"}
    async with user_of(app(engines, prefill=(), decode=[D1])) as user:
        for headers in (offered, {}):
            said = await user.post(PATH, content=BODY, headers=headers)
            assert said.json() == {"tokens": 9}
    assert engines.asked == [("d1", ASK)] * 2


async def test_a_length_that_is_too_much() -> None:
    """It is refused before all of it has come."""
    said = await call(app(Engines()), "POST", PATH, content=b" " * (2**26 + 1))
    assert said.status_code == 413
    assert said.json()["error"]["code"] == 413


async def test_bytes_of_a_header_that_are_not_latin() -> None:
    engines = Engines()
    sent = {b"x-request-id": "é€".encode()}
    said = await call(app(engines), "POST", PATH, json=ASK, headers=sent)
    assert said.status_code == 200
    assert engines.headers["d1"]["x-request-id"] == "é€"


# --- what engines say -----------------------------------------------------------------

JSON = {"content-type": "application/json"}
TEXT = b'{"choices":["%s"]}' % (b"a" * 100)
EVENT = b"data: %s\n\ndata: [DONE]\n\n" % TEXT


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(
    ("headers", "said", "kept"),
    [
        (JSON | {"content-length": str(len(TEXT))}, TEXT, True),
        (JSON, TEXT, False),
        # An error may be added to them.
        (EVENTS | {"content-length": str(len(EVENT))}, EVENT, False),
    ],
)
async def test_a_length_that_an_engine_gives(
    version: bytes, headers: Mapping[str, str], said: bytes, *, kept: bool
) -> None:
    """A client of HTTP/1.0 knows no chunks, and gets none."""
    engine = says(said, headers=headers)
    asked = generate(b"connection: close\r\n", version)
    (answer,) = await answers(app(Engines(d1=engine), prefill=()), asked)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(version[2:] + b" 200")
    assert (b"content-length" in head.lower()) is kept
    assert (b"chunked" in head.lower()) is (version == b"1.1" and not kept)
    assert said in body


async def test_a_head_alone() -> None:
    """An answer to HEAD has no body, or what follows it would be read as one."""
    lines = (b"/v1/models", b"/health", b"/nothing")
    heads = b"".join(b"HEAD %s HTTP/1.1\r\nhost: x\r\n\r\n" % line for line in lines)
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    said = await answers(app(Engines()), heads + last)
    assert [one[:5] for one in said] == [b"1 200", b"1 200", b"1 404", b"1 200"]
    assert not any(one.partition(b"\r\n\r\n")[2] for one in said[:-1])


async def test_what_an_engine_says_of_its_answer() -> None:
    """What a client may see, and what HTTP can carry."""
    kept = {
        **JSON,
        "content-encoding": "gzip",
        "retry-after": "7",
        "www-authenticate": "Bearer",
    }
    more = {"set-cookie": "a=b", "x-request-id": "a\x01b"}
    engine = says(gzip.compress(b"{}"), status=429, headers=kept | more)
    said = await post(app(Engines(d1=engine), prefill=()))
    assert said.status_code == 429
    assert {name: said.headers[name] for name in kept} == kept
    assert not more.keys() & said.headers.keys()


async def test_an_error_text_that_clients_cannot_be_sent() -> None:
    async def odd(_: dict[str, Any]) -> Said:
        async def parts() -> AsyncIterator[bytes]:
            yield json.dumps({"error": {"message": "\ud800"}}).encode()

        return 500, JSON, parts()

    said = await post(app(Engines(d1=odd), prefill=(), decode=[D1]))
    assert said.status_code == 500
    assert "ud800" in said.json()["error"]["message"]


# --- clients that leave ---------------------------------------------------------------


def endless(ended: asyncio.Event) -> Handler:
    async def parts() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: 1\n\n" * 10_000
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def handler(_: dict[str, Any]) -> Said:
        return 200, EVENTS, parts()

    return handler


async def test_a_client_that_leaves_without_having_read() -> None:
    """Its place and its engine are free again."""
    ended = asyncio.Event()
    engines = Engines(d1=endless(ended))
    application = app(engines, prefill=(), decode=[D1], running_max=1)
    async with proxy(application) as port, asyncio.timeout(60):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(generate())
        await until(lambda: bool(engines.asked))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as other:
            async with other.post(PATH, data=BODY) as said:
                assert said.status == 429
            writer.transport.abort()
            await ended.wait()
            engines.handlers.clear()
            async with other.post(PATH, data=BODY) as said:
                assert said.status == 200


async def test_a_client_that_leaves_between_two_parts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is no error of ours, and costs no traceback."""
    left = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await left.wait()
        for _ in range(9):  # without a turn in which the proxy would notice
            yield b"data: 2\n\n"
        await asyncio.Event().wait()

    async def handler(_: dict[str, Any]) -> Said:
        return 200, EVENTS, parts()

    application = app(Engines(d1=handler), prefill=(), decode=[D1])
    async with proxy(application) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(generate())
        await reader.readuntil(b"data: 1")
        writer.transport.abort()
        left.set()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as other:
            counted = 'kvwire_proxy_requests_total{status="499"} 1.0'
            while True:
                async with other.get("/metrics") as said:
                    if counted in await said.text():
                        break
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost\r\n\r\n",
        generate(b"transfer-encoding: chunked\r\n"),
        generate(b"content-encoding: gzip\r\nconnection: close\r\n"),
    ],
    ids=["version", "header", "two lengths", "no gzip"],
)
async def test_what_is_no_valid_http_leaves_nothing_in_the_log(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client has the answer. Everybody who can connect could fill the log."""
    (answer,) = await answers(app(Engines()), sent)
    assert answer[2:5] == b"400"
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


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


@pytest.mark.parametrize("migrate", [False, True])
@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_leaves_within_a_stream(migrate: bool, reads: bool) -> None:
    """While the next part is read, and while one is written that it does not take."""
    network = Engines(d1=endless(asyncio.Event()))
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


# --- pages in browsers ----------------------------------------------------------------


@pytest.mark.parametrize("path", ["/drain", "/migrate"])
@pytest.mark.parametrize(
    "origin", ["http://localhost:8000", "http://a.example", "null"]
)
async def test_a_page_in_a_browser(path: str, origin: str) -> None:
    """It asks from this host, whoever has written it; a key is what it has not."""
    application = app(Engines(), migrate=True)
    asked = {"engine": D1.url}
    headers = {"origin": origin}
    said = await call(application, "POST", path, json=asked, headers=headers)
    assert said.status_code == 403
    application = app(Engines(), migrate=True, operator_key=b"key")
    headers = {**headers, "authorization": "Bearer " + b"key".hex()}
    said = await call(application, "POST", path, json=asked, headers=headers)
    assert said.status_code == 200
