"""Where an engine's answer ends: what is cut is not passed on as whole."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvwire_vllm.proxy.client import EngineClient, EngineFailed
from kvwire_vllm.proxy.dispatch import ClientRequest, Dispatcher
from kvwire_vllm.proxy.engines import VllmServer
from kvwire_vllm.proxy.fleet import EngineFleet
from packages.vllm.tests.support.proxies import ASK, saying

JSON = b'{"choices":[{"text":"one two"}]}'
HALF = JSON[:20]
EVENT = b'data: {"choices":[{"index":0,"text":" one"}]}\n\n'
DONE = b"data: [DONE]\n\n"
CRLF = (EVENT + DONE).replace(b"\n", b"\r\n")


def said(body: bytes, kind: str, frame: str, *, version: str = "1.1") -> bytes:
    """An answer with a body; `frame` is its length, or `chunks`, or that is missing."""
    head = f"HTTP/{version} 200 OK\r\ncontent-type: {kind}\r\n"
    if frame == "chunks":
        head += "transfer-encoding: chunked\r\n"
        body = b"%x\r\n%b\r\n" % (len(body), body)
    elif frame:
        head += f"content-length: {frame}\r\n"
    return head.encode() + b"\r\n" + body


def events(body: bytes, frame: str = "", **more: Any) -> bytes:
    return said(body, "text/event-stream; charset=utf-8", frame, **more)


def in_one(body: bytes, frame: str = "", **more: Any) -> bytes:
    return said(body, "application/json", frame, **more)


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
