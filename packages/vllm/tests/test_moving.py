"""Streams that go on at another engine: moved, drained, or left by one that died."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

from kvwire.limits import MIB
from kvwire_vllm.proxy.app import ProxyApp, ProxySettings
from kvwire_vllm.proxy.client import EngineClient
from kvwire_vllm.proxy.engines import VllmServer
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.moving import immovable_field
from packages.vllm.tests.support.decoders import (
    CHAT,
    COUNT,
    Client,
    Decoder,
    StoppedDecoder,
    moved,
    mover,
    whole,
)
from packages.vllm.tests.support.proxies import (
    ASK,
    D1,
    D2,
    EVENTS,
    P1,
    Engines,
    Said,
    app,
    call,
    operate,
    refused,
    saying,
    says,
    streamed,
    when,
)
from tests.support.pairs import turns, until

KINDS = pytest.mark.parametrize(
    "kind",
    [{}, CHAT, CHAT | {"max_tokens": None}],
    ids=["completion", "chat", "without a limit"],
)


async def test_an_event_without_an_end_is_not_kept() -> None:
    endless = says(*[b"x" * MIB] * 17)
    application, _ = mover(d1=endless, d2=endless)
    read = b"".join([part async for part in streamed(application, max_tokens=COUNT)])
    assert b"an event has more than 16777216 bytes" in read


@KINDS
@pytest.mark.parametrize("path", ["/migrate", "/drain"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_moves(line_end: bytes, path: str, kind: dict[str, Any]) -> None:
    """The other engine is asked for the rest, as a completion, with the first's KV."""
    first, second = Decoder(3), Decoder()
    first.line_end = second.line_end = line_end
    application, network = mover(d1=first, d2=second)
    client = Client(application, **kind)
    await client.read(3 + bool(kind))
    asked = {"engine": D1.url, "wait_s": 5}
    status, said = await moved(application, client, first, path, **asked)
    client.right()
    assert status == 200
    if path == "/migrate":
        assert said == {"requests": [{"request": client.id, "moved": D2.url}]}
    else:
        assert said == {"engine": D1.url, "running": 0}
    ahead, rest = (p for p in network.asked if p[0] == "d2" and p[1])
    assert ahead[1]["max_tokens"] == 1
    made = len(rest[1]["prompt"]) - 3
    assert 3 <= made < COUNT
    assert rest[1]["prompt"] == [1, 2, 3, *whole()[:made]]
    assert rest[1]["max_tokens"] == COUNT - made
    assert "messages" not in rest[1]
    source = rest[1]["kv_transfer_params"]
    assert source["remote"] == list(D1.remote)
    page = await call(application, "GET", "/metrics")
    assert 'kvwire_proxy_moves_total{outcome="moved"} 1.0' in page.text


@KINDS
@pytest.mark.parametrize(
    "said",
    [
        {"choices": 3},
        {"choices": [None]},
        {"choices": [{"text": "", "token_ids": 3}]},
        {"choices": [], "usage": {"prompt_tokens": None}},
    ],
    ids=str,
)
async def test_an_engine_whose_answer_is_none_is_gone_on_for(
    said: dict[str, Any], kind: dict[str, Any]
) -> None:
    first = Decoder()

    async def lies(body: dict[str, Any]) -> Said:
        async def parts() -> AsyncIterator[bytes]:
            read = b""
            async with aclosing(first.parts(body)) as made:
                while read.count(b"\n\n") < 3:
                    read += await anext(made)
            yield read
            yield f"data: {json.dumps(said)}\n\n".encode()

        return 200, EVENTS, parts()

    application, _ = mover(d1=lies, d2=Decoder())
    client = Client(application, **kind)
    await client.read()
    client.right()
    assert client.done
    await turns(10)  # what was given up is closed turn by turn


async def test_a_chat_that_is_parsed_stays() -> None:
    """What a parser has seen of an answer is not in its tokens."""
    first = Decoder(3)
    first.thinks = True
    application, _ = mover(d1=first)
    client = Client(application, **CHAT)
    await client.read(3)
    status, said = await operate(application, "/migrate", request=client.id)
    assert (status, said["requests"][0]["stayed"]) == (
        409,
        "its engine parses the answer",
    )
    await client.parts.aclose()


async def test_a_target_that_fails_changes_nothing() -> None:
    """The first engine's stream is read on from where it was left."""
    first = Decoder(3)
    application, _ = mover(d1=first, d2=refused)
    client = Client(application)
    await client.read(3)
    status, said = await moved(application, client, first, request=client.id)
    client.right()
    assert status == 409
    assert "Connection refused" in said["requests"][0]["stayed"]


@KINDS
@pytest.mark.parametrize("silent", [-1, 2])
async def test_an_engine_that_dies_is_gone_on_for(
    silent: int, kind: dict[str, Any]
) -> None:
    """A token without text, such as half a character, is made once more."""
    first, second = Decoder(3, dies=True), Decoder()
    first.silent = silent
    application, network = mover(d1=first, d2=second)
    client = Client(application, **kind)
    await client.read()
    client.right()
    asked = [body for host, body in network.asked if host == "d2" and body]
    seen = 3 if silent < 0 else 2
    assert [one["prompt"] for one in asked] == [[1, 2, 3, *whole()[:seen]]]
    assert "kv_transfer_params" not in asked[0]


@KINDS
async def test_an_engine_that_is_stopped_is_gone_on_for(kind: dict[str, Any]) -> None:
    """It aborts its requests; their clients do not notice."""
    first, second = StoppedDecoder(3), Decoder()
    application, network = mover(d1=first, d2=second)
    client = Client(application, **kind)
    await client.read()
    client.right()
    asked = [body for host, body in network.asked if host == "d2" and body]
    assert [one["prompt"] for one in asked] == [[1, 2, 3, *whole()[:3]]]
    page = await call(application, "GET", "/metrics")
    assert 'kvwire_proxy_moves_total{outcome="recovered"} 1.0' in page.text


async def test_the_last_engine_that_is_stopped_says_so_to_its_client() -> None:
    application, _ = mover(d1=StoppedDecoder(3), d2=refused)
    client = Client(application)
    await client.read()
    assert client.done
    (choice,) = client.events[-1]["choices"]
    assert choice["finish_reason"] == "abort"


async def test_a_source_that_dies_while_it_moves() -> None:
    """Its KV does not come; the target computes it."""
    first, second = Decoder(4, dies=True), Decoder()

    async def gone(body: dict[str, Any]) -> Said:
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            raise aiohttp.ClientError("reset")
        return await first(body)

    application, _ = mover(d1=gone, d2=second)
    client = Client(application)
    await client.read(3)
    moving = asyncio.ensure_future(operate(application, "/migrate", engine=D1.url))
    await client.read()
    client.right()
    status, said = await moving
    assert "stayed" in said["requests"][0] if status == 409 else status == 200


async def test_nobody_else_takes_it() -> None:
    """As without moves, the client hears that its engine broke off."""
    application, _ = mover(d1=Decoder(3, dies=True), d2=refused)
    client = Client(application)
    await client.read()
    assert client.done
    assert "broke off" in client.events[-1]["error"]["message"]


async def test_a_client_that_leaves_while_it_moves() -> None:
    copied = asyncio.Event()
    application, network = mover(d1=Decoder(3), d2=when(copied))
    client = Client(application)
    async with aclosing(client.parts):
        await client.read(3)
        asking = operate(application, "/migrate", request=client.id)
        moving = asyncio.ensure_future(asking)
        await until(lambda: "d2" in network.hosts())
    copied.set()
    assert (await moving)[1]["requests"][0]["stayed"] == "it has ended"


async def test_a_stream_moves_to_none_but_decode_engines_that_take_requests() -> None:
    first = Decoder(3)
    fleet = EngineFleet([P1], [D1, D2])
    application = app(Engines(d1=first), fleet=fleet, migrate=True)
    client = Client(application)
    await client.read(3)
    fleet.at(D2.url).drain()
    for engine in (P1, D1, D2):
        asked = {"request": client.id, "to": engine.url}
        status, said = await operate(application, "/migrate", **asked)
        assert status == 409
        assert said["requests"][0]["stayed"] == "no other engine accepts it"
    await client.parts.aclose()


async def test_what_cannot_be_moved_is_said() -> None:
    first = Decoder(3)
    application, _ = mover(d1=first)
    unmoved = streamed(application, max_tokens=COUNT, seed=7)
    await anext(unmoved)
    status, said = await operate(application, "/migrate", engine=D1.url)
    assert (status, said["requests"][0]["stayed"]) == (
        409,
        "it cannot move with its 'seed'",
    )
    assert (await operate(application, "/migrate", request="cmpl-9"))[0] == 400
    assert (await operate(application, "/migrate", engine="http://nobody"))[0] == 400
    await unmoved.aclose()


async def test_a_proxy_that_moves_nothing() -> None:
    status, said = await operate(app(Engines()), "/migrate", engine=D1.url)
    assert status == 409
    assert "--migrate" in said["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("temperature", 0.7, ""),
        ("repetition_penalty", 1.2, ""),
        ("n", 1, ""),
        ("presence_penalty", 0, ""),
        ("stop", [], ""),
        ("logprobs", None, ""),
        ("presence_penalty", 0.5, "presence_penalty"),
        ("logprobs", 0, "logprobs"),
        ("seed", 0, "seed"),
        ("n", 2, "n"),
        ("stop", ["x"], "stop"),
        ("response_format", {"type": "json_object"}, "response_format"),
        ("a_field_of_tomorrow", 0, "a_field_of_tomorrow"),
        ("max_tokens", None, ""),
        ("max_tokens", "4", "max_tokens"),
        ("response_format", {"type": "text"}, ""),
        ("prompt", [[1], [2]], "prompt"),
    ],
)
def test_what_keeps_a_request(field: str, value: Any, kept: str) -> None:
    assert (
        immovable_field("/v1/completions", {**ASK, "stream": True, field: value})
        == kept
    )


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("max_tokens", None, ""),
        ("max_completion_tokens", 7, ""),
        ("chat_template_kwargs", {"thinking": False}, ""),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], ""),
        ("messages", [{"role": "user", "content": [{"type": "image"}]}], "messages"),
        ("messages", ["hello"], "messages"),
        ("messages", None, "messages"),
        ("tools", [{"type": "function"}], "tools"),
        ("echo", True, "echo"),
        ("max_tokens", "many", "max_tokens"),
    ],
)
def test_what_keeps_a_chat(field: str, value: Any, kept: str) -> None:
    asked = {"model": "m", "messages": CHAT["messages"], "stream": True}
    assert immovable_field("/v1/chat/completions", {**asked, field: value}) == kept


@pytest.mark.parametrize("ends", [True, False])
async def test_what_an_engine_says_of_its_answer_over_http(*, ends: bool) -> None:
    """Names of headers come in capitals; the client's answer has one type."""
    choice = {"index": 0, "text": "hi", "finish_reason": "length" if ends else None}
    event = f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n"
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Request-Id: r\r\n\r\n"
    )
    said = head + event.encode() + b"data: [DONE]\n\n" * ends
    async with saying(said) as heard:
        there = VllmServer(f"http://127.0.0.1:{int(heard[0])}", ())
        fleet = EngineFleet([], [there])
        engines = EngineClient()
        application = ProxyApp(fleet, ProxySettings(migrate=True), client=engines)
        answered = await call(
            application, "POST", "/v1/completions", json=ASK | {"stream": True}
        )
        await engines.close()
    assert answered.headers["content-type"] == "text/event-stream"
    assert answered.headers["x-request-id"] == "r"
    assert ("broke off" in answered.text) is not ends
    assert answered.status_code == 200
    assert answered.text.endswith("data: [DONE]\n\n")
