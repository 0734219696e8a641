"""The proxy before engines that are functions: who is asked what, who takes over."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvwire import UsageError
from kvwire.aio import end_task
from kvwire_vllm.proxy import dispatch
from kvwire_vllm.proxy.command import main
from kvwire_vllm.proxy.engines import VllmServer, parse_engine
from kvwire_vllm.references import UNSIGNED
from packages.vllm.tests.support.proxies import (
    ASK,
    EVENTS,
    Engines,
    Handler,
    Said,
    answer,
    app,
    breaks_off,
    broken,
    call,
    fine,
    post,
    refused,
    says,
    streamed,
    waits,
    when,
)
from tests.support.pairs import until


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_both_are_asked_for_one_transfer(path: str) -> None:
    engines = Engines()
    of_decoding = {"stream": True, "stream_options": {}, "n": 1}
    body = {**ASK, "max_completion_tokens": 9, **of_decoding}
    said = await post(app(engines), body, path)
    assert said.json() == {"tokens": 9}
    (prefill,), (decode,) = engines.params("p1"), engines.params("d1")
    assert prefill["transfer_id"] == decode["transfer_id"]
    assert (prefill["do_remote_decode"], decode["do_remote_prefill"]) == (True, True)
    assert (prefill["remote"], decode["remote"]) == (["d1:1", "d1:2"], ["p1:1"])
    # Prefill may have other prompts to compute first.
    assert decode["computed"] is False
    asked = dict(engines.asked)["p1"]
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (1, 1)
    assert not of_decoding.keys() & asked.keys()


async def test_transfers_have_names_of_their_own_and_engines_take_turns() -> None:
    engines = Engines()
    application = app(engines)
    for _ in range(4):
        await post(application)
    ids = {
        params["transfer_id"]
        for host in ("p1", "p2")
        for params in engines.params(host)
    }
    assert len(ids) == 4
    assert sorted(engines.hosts()) == ["d1", "d1", "d2", "d2", "p1", "p1", "p2", "p2"]


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_engines_hear_nothing_of_each_other_from_clients(
    path: str, size: int
) -> None:
    """vLLM takes the fields out of another one too; large ones stay as they came."""
    params = {"do_remote_prefill": True, "remote": ["10.0.0.9:1"], "a": "x" * size}
    fields = {"kv_transfer_params": params, "ec_transfer_params": params}
    body = {**ASK, "n": 2, **fields, "vllm_xargs": {**fields, "mine": 1}}
    engines = Engines()
    assert (await post(app(engines), body, path)).status_code == 200
    ((_, sent),) = engines.asked
    assert sent == {**ASK, "n": 2, "vllm_xargs": {"mine": 1}}


async def test_at_once_decode_is_asked_while_prefill_computes() -> None:
    decode_asked = asyncio.Event()

    async def decode(body: dict[str, Any]) -> Said:
        decode_asked.set()
        return await fine(body)

    engines = Engines(p1=when(decode_asked), d1=decode)
    assert (await post(app(engines))).status_code == 200


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("where", [None, {"transfer_id": "of another connector"}])
async def test_a_prompt_that_prefill_computes_and_does_not_send(
    path: str, where: dict[str, str] | None
) -> None:
    """Decode is not left waiting for it; nobody has failed, so nobody is down."""
    given_up = asyncio.Event()

    async def keeps(_: dict[str, Any]) -> Said:
        return answer(200, {"tokens": 1, "kv_transfer_params": where})

    async def waits_for_kv(body: dict[str, Any]) -> Said:
        if "kv_transfer_params" not in body:
            return await fine(body)
        try:
            return await waits(body)
        finally:
            given_up.set()

    engines = Engines(p1=keeps, d1=waits_for_kv)
    application = app(engines)
    assert (await post(application, path=path)).json() == {"tokens": 9}
    assert engines.hosts()[-1] == "d1"
    assert given_up.is_set()
    for engine in (await call(application, "GET", "/fleet")).json()["engines"]:
        assert (engine["state"], engine["failed"], engine["running"]) == ("up", 0, 0)


# What vLLM says in a stream of a request that it fails.
NO_ANSWER = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
no_answer = says(NO_ANSWER, b"data: [DONE]\n\n")
# The same behind a gateway.
no_crlf_answer = says(b": hello\r\n", NO_ANSWER.replace(b"\n", b"\r\n"))


@pytest.mark.parametrize("fails", [broken, no_answer, no_crlf_answer])
async def test_a_decode_engine_that_fails_for_want_of_kv_is_asked_without(
    fails: Handler,
) -> None:
    """It is as well as ever, and answers alone; nobody is taken for down for it."""

    async def lacks_kv(body: dict[str, Any]) -> Said:
        return await (fails if "kv_transfer_params" in body else fine)(body)

    engines = Engines(d1=lacks_kv)
    application = app(engines)
    assert (await post(application)).json() == {"tokens": 9}
    assert engines.hosts().count("d1") == 2
    for engine in (await call(application, "GET", "/fleet")).json()["engines"]:
        assert (engine["state"], engine["failed"], engine["running"]) == ("up", 0, 0)


async def test_a_stream_that_begins_with_a_failure_is_the_requests_own() -> None:
    """Also without KV: the engine is well, and another one would fail it too."""
    engines = Engines(d1=no_answer)
    said = await post(app(engines))
    assert said.status_code == 500
    assert "Internal server error" in said.json()["error"]["message"]
    assert engines.hosts() == ["p1", "d1", "d1"]


async def test_a_stream_that_begins_with_an_error_of_the_client_is_its_answer() -> None:
    said = b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n'

    answered = await post(app(Engines(d1=says(said))))
    assert (answered.status_code, answered.content) == (200, said)


@pytest.mark.parametrize("failing", [refused, broken])
async def test_another_prefill_engine_takes_over(failing: Handler) -> None:
    given_up = asyncio.Event()

    async def waits_for_kv(body: dict[str, Any]) -> Said:
        if body["kv_transfer_params"]["remote"] == ["p1:1"]:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()
        return await fine(body)

    engines = Engines(p1=failing, d1=waits_for_kv, d2=waits_for_kv)
    assert (await post(app(engines))).json() == {"tokens": 9}
    assert given_up.is_set()
    assert "p2" in engines.hosts()


@pytest.mark.parametrize(
    ("failing", "status", "why"),
    [
        (refused, 503, "no engine has answered: decode: Connection refused"),
        (broken, 500, "no engine has answered: decode: it is dead"),
    ],
)
async def test_no_decode_engine_answers(
    failing: Handler, status: int, why: str
) -> None:
    """An error as OpenAI's clients know them, with what the last engine said."""
    engines = Engines(d1=failing, d2=failing)
    said = await post(app(engines, prefill=()))
    assert said.status_code == status
    assert said.headers.get("retry-after") == ("1" if status == 503 else None)
    error = said.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["message"]) == (status, why)


async def test_engines_hear_who_asks() -> None:
    """Keys of engines that want one, and what traces and logs go by; nothing else."""
    sent = {
        "authorization": "Bearer secret",
        "x-request-id": "7",
        "traceparent": "00-1-2-01",
        "tracestate": "a=b",
    }
    engines = Engines()
    said = await post(app(engines), headers={**sent, "cookie": "mine"})
    assert said.status_code == 200
    for host in ("p1", "d1"):
        heard = engines.headers[host]
        assert {name: heard[name] for name in sent} == sent
        assert "cookie" not in heard


async def test_an_answer_comes_part_by_part() -> None:
    """The client has the first token while the engine makes the second."""
    first_read = asyncio.Event()

    async def tokens() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await first_read.wait()
        yield b"data: [DONE]\n\n"

    async def streams(_: dict[str, Any]) -> Said:
        return 200, EVENTS, tokens()

    read = b""
    async for part in streamed(app(Engines(d1=streams))):
        read += part
        first_read.set()
    assert read == b"data: 1\n\ndata: [DONE]\n\n"


async def test_an_engine_that_dies_while_it_streams() -> None:
    """The client is told in the stream: its status has been sent long before."""
    engines = Engines(d1=breaks_off(EVENTS))
    read = b"".join([part async for part in streamed(app(engines))])
    begun, error, done = (event for event in read.split(b"\n\n") if event)
    assert (begun, done) == (b"data: 1", b"data: [DONE]")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502


async def test_an_engine_that_dies_within_an_answer_that_is_no_stream() -> None:
    """Half an answer must not look like a whole one: the connection is cut."""
    headers = {"content-type": "application/json", "content-length": "99"}
    with pytest.raises(httpx.RemoteProtocolError):
        await post(app(Engines(d1=breaks_off(headers))))


async def test_an_engine_that_breaks_off_before_the_first_token() -> None:
    """Headers came, and no token: nothing of the answer is the client's yet."""

    engines = Engines(d1=breaks_off({}, b""))
    assert (await post(app(engines))).json() == {"tokens": 9}


async def test_a_client_that_goes_away_before_the_first_token() -> None:
    """Nobody works for nobody, and no request is open."""
    stopped: list[str] = []

    async def waits(_: dict[str, Any]) -> Said:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("one")
        raise AssertionError

    network = Engines(p1=waits, d1=waits)
    application = app(network)
    asking = asyncio.ensure_future(post(application))
    await until(lambda: len(network.asked) == 2)
    await end_task(asking)
    assert stopped == ["one"] * 2
    page = (await call(application, "GET", "/metrics")).text
    assert 'kvwire_proxy_requests_total{status="499"} 1.0' in page
    assert "\nkvwire_proxy_running 0.0" in page
    assert not re.findall(r"engine_running\{.*\} [1-9]", page)
    assert not (await call(application, "GET", "/fleet")).json()["requests"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"[" * 100_000),
        (500, b"[" * 100_000),
        (200, b"{"),
        (200, b"[]"),
        (200, b'{"text": "\xff"}'),
        (200, b'{"kv_transfer_params":3}'),
        (200, b'{"kv_transfer_params":{"a":"\\ud800"}}'),
    ],
)
async def test_what_prefill_says_that_nobody_can_read(status: int, body: bytes) -> None:
    engines = Engines(p1=says(body, status=status, headers={}), p2=refused)
    assert (await post(app(engines))).status_code == 200
    # Nothing, or what the proxy itself knows of the transfer.
    last = engines.params("d1")[-1]
    assert last is None or "remote" in last


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\udc00"}',
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b"[" * 100_000,
    ],
    ids=lambda content: content[:20].hex(),
)
async def test_what_engines_could_not_be_sent(content: bytes) -> None:
    engines = Engines()
    said = await call(app(engines), "POST", "/v1/completions", content=content)
    assert said.status_code == 400
    assert "not the expected JSON" in said.json()["error"]["message"]
    assert not engines.asked


async def test_models_are_those_of_any_decode_engine() -> None:
    engines = Engines(d2=refused)
    application = app(engines)
    for _ in range(3):  # whoever's turn it is
        assert (await call(application, "GET", "/v1/models")).status_code == 200
    assert engines.hosts().count("d2") == 1
    assert "p1" not in engines.hosts()
    engines.handlers |= {"d1": refused, "p1": refused, "p2": refused}
    assert (await call(application, "GET", "/v1/models")).status_code == 503


async def test_what_one_engine_answers_is_passed_unchanged() -> None:
    engines = Engines()
    application = app(engines)
    content = b'{ "prompt" : "\\u00e9", "x":1.0}'
    for path in ("/tokenize", "/detokenize"):
        said = await call(application, "POST", path, content=content)
        assert said.status_code == 200
        assert engines.sent.pop() == (path, content)
    for path in ("/v1/models", "/version"):
        assert (await call(application, "GET", path)).status_code == 200
        assert engines.sent.pop() == (path, None)


# --- its parts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "shared"),
    [
        ({"prompt": "text"}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": ["a", "b"]}, False),
        ({"messages": [], "n": 2}, False),
        ({"prompt": "text", "best_of": 3}, False),
        ({"prompt": "text", "n": 1}, True),
        ({"prompt": "text", "n": None}, True),
        ({"prompt": "text", "n": "2"}, False),
        ({"prompt": "text", "n": 2.0}, False),
        ({"prompt": "text", "prompt_logprobs": 0}, False),
        ({"prompt": "text", "prompt_logprobs": None}, True),
        ({"prompt": "text", "echo": True, "logprobs": 0}, False),
        ({"prompt": "text", "echo": True}, True),
        ({"prompt": "text", "logprobs": 2}, True),
    ],
)
def test_what_two_engines_can_share(body: dict[str, Any], shared: bool) -> None:
    assert dispatch.is_for_two(body) is shared


NO_ENGINES = ["http://a", "a=b:1", "http://a=", "http://a=b", "http://a=b:0"]
NO_ENGINES += [f"{url}=b:1" for url in ("http://[::1", "http://", "http://a:99999")]
NO_ENGINES += ["http://a:x=b:1", "http://a?b=b:1", "http://user:word@a=b:1"]
NO_STAGES = [f"http://a=b:1,stages={count}" for count in ("0", "2", "-1", "x", "1,2")]


@pytest.mark.parametrize("text", NO_ENGINES + NO_STAGES)
def test_an_engine_that_is_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_engine(text)
    assert "word" not in str(caught.value)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_engine("http://a:1/=b:2,c:3") == VllmServer(
        "http://a:1", ("b:2", "c:3")
    )
    staged = parse_engine("http://a:1=b:2,c:3,stages=2")
    assert staged == VllmServer("http://a:1", ("b:2", "c:3"), 2)
    for asked in (dispatch.for_prefill, dispatch.for_decode):
        told = asked(ASK, staged, "t", UNSIGNED)["kv_transfer_params"]
        assert (told["remote"], told["stages"]) == (["b:2", "c:3"], 2)
    with pytest.raises(SystemExit):
        main(["--prefill", "nonsense", "--decode", "http://a=b:1"])
    assert "engine 'nonsense'" in capsys.readouterr().err
    for port in ("-1", "99999"):  # a resolver would make another one of it
        with pytest.raises(SystemExit):
            main(["--decode", "http://a=b:1", "--port", port])
        assert f"--port {port}: pass 0 to 65535" in capsys.readouterr().err
