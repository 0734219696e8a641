"""The proxy's client of HTTP, before servers that say what they like."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvwire_vllm.announce import DECODE
from kvwire_vllm.proxy.client import EngineClient, EngineFailed
from kvwire_vllm.proxy.dispatch import ClientRequest, Dispatcher
from kvwire_vllm.proxy.engines import VllmEngine, VllmServer
from kvwire_vllm.proxy.events import EventReader, data_of, fields_of
from kvwire_vllm.proxy.fleet import EngineFleet
from packages.vllm.tests.support.proxies import ASK, saying
from tests.support.certificates import Authority
from tests.support.servers import free_port

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


def at(port: int | bytes) -> VllmEngine:
    server = VllmServer(f"http://127.0.0.1:{int(port)}", ())
    return VllmEngine(server=server, role=DECODE)


async def asked(port: int | bytes, limit: int = 2**20) -> tuple[int, bytes]:
    client = EngineClient()
    try:
        async with client.ask(at(port), "/x", {"a": "b"}) as said:
            return said.status, await said.body(limit)
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (HEAD + b"content-length: 2\r\n\r\nok", (200, b"ok")),
        (
            HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            (200, b"ok"),
        ),
        (HEAD + b"\r\nok", (200, b"ok")),
        # These are the client's.
        (
            HEAD.replace(b"200", b"302") + b"location: /y\r\ncontent-length: 0\r\n\r\n",
            (302, b""),
        ),
        (HEAD + b"content-encoding: gzip\r\n\r\nok", (200, b"ok")),
    ],
)
async def test_what_an_engine_answers(said: bytes, answer: tuple[int, bytes]) -> None:
    async with saying(said) as heard:
        assert await asked(heard[0]) == answer
    head = heard[1].lower()
    assert head.startswith(b"get /x http/1.1\r\n")
    for line in (b"\r\naccept-encoding: identity\r\n", b"\r\na: b\r\n"):
        assert line in head


async def test_names_of_headers_are_in_small_letters() -> None:
    """Whatever the engine, and aiohttp, make of them; of two, both are there."""
    said = b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nVARY: c\r\nvary: d\r\n\r\n"
    client = EngineClient()
    async with saying(said) as heard, client.ask(at(heard[0]), "/x") as answer:
        assert dict(answer.headers) == {"content-type": "a/b", "vary": "c, d"}
    await client.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "Server disconnected$"),
        (HEAD, "Server disconnected$"),
        (b"no HTTP\r\n\r\n", r"its answer is not valid HTTP: [\w ,:/]+\Z"),
        (HEAD + b"a: " + b"b" * 9000, r"HTTP: Got more than \d+ bytes[\w ]+\Z"),
        (HEAD.replace(b"200", b"101") + b"\r\n", "not valid HTTP: status 101"),
        (HEAD.replace(b"200", b"099") + b"\r\n", "not valid HTTP: status 99"),
        (HEAD.replace(b"200", b"600") + b"\r\n", "not valid HTTP: status 600"),
        (HEAD + b"content-length: 9\r\n\r\nok", "."),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "."),
        (HEAD + b"\r\nmore than this", "more than 9 bytes"),
    ],
)
async def test_what_is_no_answer(said: bytes, why: str) -> None:
    async with saying(said) as heard:
        with pytest.raises(EngineFailed, match=why):
            await asked(heard[0], 9)


async def test_nobody_listens() -> None:
    """That is no silence, and the reason has no address."""
    with pytest.raises(EngineFailed) as caught:
        await asked(free_port())
    assert (caught.value.why, caught.value.silent) == ("Connection refused", False)


async def test_an_engine_behind_https_that_nobody_trusts(tmp_path: Path) -> None:
    """Errors of TLS are none of the system."""
    shown = Authority(tmp_path).issue("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.cert_file, shown.key_file)
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context
    )
    async with server:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        engine = VllmEngine(server=VllmServer(url, ()), role=DECODE)
        client = EngineClient()
        await client.probe(engine)
        await client.close()
    assert engine.down == "TLS: CERTIFICATE_VERIFY_FAILED"


async def test_an_answer_that_is_given_up_ends_its_connection() -> None:
    async with saying(HEAD + b"\r\none", silent=True) as heard:
        client = EngineClient()
        async with client.ask(at(heard[0]), "/", body={"a": 1}) as said:
            assert await anext(said.parts) == b"one"
        assert b"\r\nContent-Type: application/json\r\n".lower() in heard[1].lower()
        await client.close()


# --- events of streams, however their lines end and wherever they are cut -------------


ENDS = pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
LINES = [
    b": a comment",
    b"event: x",
    b'data: {"a":',
    b"data:1}",
    b"",
    b"data: [DONE]",
    b"",
]


async def read(content: bytes, size: int) -> list[bytes]:
    """What a reader makes of a stream that comes in parts of this size."""

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(content), size):
            yield content[at : at + size]

    return [event async for event in EventReader(parts())]


@ENDS
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_have_any_end_of_lines(end: bytes, size: int) -> None:
    content = b"".join(line + end for line in (*LINES, b""))
    events = await read(content, size)
    assert b"".join(events) == content
    assert [data for one in events if (data := data_of(one))] == [
        b'{"a":\n1}',
        b"[DONE]",
    ]
    assert [one for one in map(fields_of, events) if one] == [{"a": 1}]


@ENDS
async def test_a_stream_that_is_cut_keeps_what_came(end: bytes) -> None:
    content = b"data: 1" + end + end + b"data: 2"
    assert await read(content, 4) == [content[:-7], b"data: 2"]
    assert await read(b"", 4) == []


# --- where an engine's answer ends: what is cut is not passed on as whole -------------


JSON = b'{"choices":[{"text":"one two"}]}'
HALF = JSON[:20]
EVENT = b'data: {"choices":[{"index":0,"text":" one"}]}\n\n'
DONE = b"data: [DONE]\n\n"
CRLF = (EVENT + DONE).replace(b"\n", b"\r\n")


def whole(body: bytes, kind: str, frame: str, *, version: str = "1.1") -> bytes:
    """An answer with a body; `frame` is its length, or `chunks`, or that is missing."""
    head = f"HTTP/{version} 200 OK\r\ncontent-type: {kind}\r\n"
    if frame == "chunks":
        head += "transfer-encoding: chunked\r\n"
        body = b"%x\r\n%b\r\n" % (len(body), body)
    elif frame:
        head += f"content-length: {frame}\r\n"
    return head.encode() + b"\r\n" + body


def events(body: bytes, frame: str = "", **more: Any) -> bytes:
    return whole(body, "text/event-stream; charset=utf-8", frame, **more)


def in_one(body: bytes, frame: str = "", **more: Any) -> bytes:
    return whole(body, "application/json", frame, **more)


async def passed_on(answer: bytes) -> bytes:
    """What a client gets of an engine that answers so, and closes its connection."""
    client = EngineClient()
    async with saying(answer) as heard, AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        where = VllmServer(f"http://127.0.0.1:{int(heard[0])}", ("d:1",))
        asking = Dispatcher(client, EngineFleet([], [where]))
        request = ClientRequest("/v1/completions", dict(ASK))
        return await (await asking.ask(request, stack)).body(2**20)


LAST = b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (events(EVENT + DONE, "chunks") + LAST, EVENT + DONE),
        (events(EVENT + DONE), EVENT + DONE),
        (events(EVENT + b"data:[DONE]"), EVENT + b"data:[DONE]"),
        (events(EVENT + DONE + b"\r\n"), EVENT + DONE + b"\r\n"),
        (events(CRLF), CRLF),
        (in_one(JSON, "chunks") + LAST, JSON),
        (in_one(JSON, str(len(JSON))), JSON),
        (in_one(JSON), JSON),
        (in_one(JSON, version="1.0"), JSON),
        (events(EVENT + DONE, version="1.0"), EVENT + DONE),
    ],
)
async def test_an_answer_that_is_whole(answer: bytes, body: bytes) -> None:
    assert await passed_on(answer) == body


@pytest.mark.parametrize(
    "answer",
    [
        events(b""),
        events(EVENT),
        events(EVENT, "chunks"),
        events(EVENT, "chunks") + LAST,
        events(EVENT, str(len(EVENT))),
        events(EVENT, "999"),
        events(EVENT, version="1.0"),
        events(EVENT + b"data: [DO"),
        in_one(HALF),
        in_one(HALF, version="1.0"),
        in_one(HALF, "chunks"),
        in_one(HALF, "999"),
        in_one(b""),
    ],
)
async def test_an_answer_that_is_cut(answer: bytes) -> None:
    """However the connection ends; what HTTP knows of it, and what it does not."""
    with pytest.raises(EngineFailed):
        await passed_on(answer)
