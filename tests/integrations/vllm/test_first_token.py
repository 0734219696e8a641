"""A stream's first token from prefill, and decode's stream behind it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvwire.integrations.vllm.proxy.app import ProxyApp
from kvwire.integrations.vllm.proxy.moving import waiting_field
from kvwire.integrations.vllm.proxy.policy import AT_ONCE, IN_SEQUENCE
from tests.support.engines.proxies import (
    D1,
    D2,
    EVENTS,
    P1,
    Engines,
    Handler,
    Said,
    answer,
    app,
    broken,
    call,
    fails,
    refused,
    streamed,
)
from tests.support.pairs import turns

PROMPT = [1, 2, 3]
CHAT = {
    "path": "/v1/chat/completions",
    "prompt": None,
    "messages": [{"role": "user", "content": "hello"}],
}
KINDS = pytest.mark.parametrize("kind", [{}, CHAT], ids=["completion", "chat"])
COUNT = 4
# Tokens and their texts; the second one is half a character.
TEXTS = {10: "a", 11: "", 12: "é", 13: " d", 20: "b", 21: "c", 22: "e", 23: "f"}
ANSWER = [10, 11, 12, 13]
OTHER = [20, 21, 22, 23]


class Vllm:
    """An engine in the form of vLLM; the same always follows a token."""

    def __init__(self, tokens: list[int] | None = None, created: int = 1) -> None:
        self.tokens = tokens or ANSWER
        self.created = created
        self.let = asyncio.Event()  # its stream begins then
        self.let.set()
        self.asked: list[dict[str, Any]] = []
        self.together = 1  # tokens in its first event
        self.parsed = "content"  # what its parser makes of a chat's text
        self.cuts = 0  # it dies behind so many tokens
        self.ends = "length"
        self.seeds = True
        self.context: int | None = 40  # tokens of a prompt and its answer
        self.models: Any = None  # its answer about models, if it is another
        self.limits: dict[str, Any] = {}  # of its configuration

    async def __call__(self, body: dict[str, Any]) -> Said:
        if not body:  # /v1/models
            cards = [{"id": "m", "max_model_len": self.context}, {"id": "adapter"}]
            return answer(200, {"data": cards} if self.models is None else self.models)
        self.asked.append(body)
        if not body.get("stream"):
            return answer(200, self.whole(body))
        await self.let.wait()
        if "kv_transfer_params" in body:
            await turns(50)  # prefill's answer is there before its KV
        return 200, EVENTS, self.parts(body)

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        chat = "messages" in body
        first = self.tokens[:1]
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.ends}
        choice |= {"logprobs": self.logprobs(body, first), "stop_reason": None}
        listed = first if body.get("return_token_ids") else None
        if chat:
            message = {"role": "assistant", "content": None, "reasoning": None}
            choice["message"] = message | {self.parsed: TEXTS[first[0]]}
        else:
            choice["text"] = TEXTS[first[0]]
        choice["token_ids"] = listed
        asked = PROMPT if chat else body["prompt"]
        said = {"id": "prefill", "created": 1, "model": "m", "choices": [choice]}
        (said if chat else choice)["prompt_token_ids"] = asked if listed else None
        said["usage"] = {"prompt_tokens": len(asked), "completion_tokens": 1}
        name = body.get("kv_transfer_params", {}).get("transfer_id") or "t"
        where = {"do_remote_prefill": True, "transfer_id": name, "seeds": self.seeds}
        return said | {"kv_transfer_params": where | self.limits}

    def logprobs(self, body: dict[str, Any], tokens: list[int]) -> Any:
        if body.get("logprobs") is None:
            return None
        names = [f"{token}" for token in tokens]
        if "messages" in body:
            each = [logged_in_chat(name) for name in names]
            top = {"top_logprobs": each[:1] * bool(body["top_logprobs"])}
            return {"content": [one | top for one in each]}
        return {
            "text_offset": [2 * place for place, _ in enumerate(tokens)],
            "token_logprobs": [-0.5 for _ in tokens],
            "tokens": names,
            "top_logprobs": [{name: -0.5} for name in names],
        }

    async def parts(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        chat = "messages" in body
        prompt = PROMPT if chat else body["prompt"]
        done = len(prompt) - len(PROMPT)
        tokens = self.tokens[done : done + int(body.get("max_tokens") or 99)]
        if done:
            which = OTHER if prompt[len(PROMPT)] in OTHER else ANSWER
            tokens = which[done:]
        listed = bool(body.get("return_token_ids"))
        named = {"id": "decode", "object": "text", "created": self.created}
        if chat:
            role = {"role": "assistant", "content": ""}
            choice = {"index": 0, "delta": role, "finish_reason": None}
            said: dict[str, Any] = named | {"model": "m", "choices": [choice]}
            said["prompt_token_ids"] = prompt if listed else None
            yield event(said)
        groups = [tokens[: self.together], *([one] for one in tokens[self.together :])]
        for place, group in enumerate(groups):
            if place and place == self.cuts:
                raise aiohttp.ClientError
            text = "".join(TEXTS[token] for token in group)
            choice = {"index": 0, "text": text, "logprobs": self.logprobs(body, group)}
            choice["finish_reason"] = None
            if place == len(groups) - 1:
                choice["finish_reason"] = "length"
            if chat:
                choice["delta"] = {self.parsed: choice.pop("text")}
            else:
                choice["prompt_token_ids"] = prompt if listed and not place else None
            choice["token_ids"] = group if listed else None
            yield event(named | {"model": "m", "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
            yield event(named | {"model": "m", "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def logged_in_chat(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5, "bytes": [*token.encode()]}


def later(then: Handler) -> Handler:
    """An engine that waits for prefill's KV before it says this."""

    async def handler(body: dict[str, Any]) -> Said:
        await turns(50)
        return await then(body)

    return handler


def event(said: dict[str, Any]) -> bytes:
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def made(**options: Any) -> tuple[ProxyApp, Vllm, Vllm, Engines]:
    """A proxy, its prefill and decode engine, and what they are asked."""
    prefill, decode = Vllm(), Vllm()
    network = Engines(p1=prefill, d1=decode, d2=Vllm())
    servers = options.pop("decoders", [D1])
    return (
        app(network, prefill=[P1], decode=servers, **options),
        prefill,
        decode,
        network,
    )


async def read(application: ProxyApp, **more: Any) -> bytes:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": COUNT}
    asked |= {"temperature": 0} | more
    return b"".join([part async for part in streamed(application, **asked)])


async def ways(application: ProxyApp) -> dict[str, int]:
    page = (await call(application, "GET", "/metrics")).text
    found = re.findall(r'_(?:first_tokens|moves)_total\{\w+="(.*)"\} (\d+)', page)
    return {way: int(count) for way, count in found}


def text_of(content: bytes) -> str:
    events = content.decode().split("\n\n")
    said = [json.loads(one[6:]) for one in events if one.startswith("data: {")]
    assert len({(one["id"], one["created"]) for one in said}) == 1, said
    choices = [choice for one in said for choice in one["choices"]]
    assert events[-2] == "data: [DONE]"
    assert choices[-1]["finish_reason"] == "length"
    return "".join(
        one["text"] if "text" in one else one["delta"]["content"] for one in choices
    )


@KINDS
@pytest.mark.parametrize("order", [AT_ONCE, IN_SEQUENCE])
@pytest.mark.parametrize("created", [1, 2])
async def test_it_is_sent_before_decode_has_one(
    kind: dict[str, Any], order: str, created: int
) -> None:
    """All that the client gets is what decode alone says, but for the answer's name."""
    application, _, decode, _ = made(order=order)
    alone = await read(application, **kind)
    decode.created = created
    decode.let.clear()
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": COUNT}
    asked |= {"temperature": 0} | kind
    parts = streamed(application, **asked)
    found = b""
    while b'"a"' not in found:
        found += await anext(parts)
    assert not decode.let.is_set()
    decode.let.set()
    found += b"".join([part async for part in parts])
    assert found == alone.replace(b'"id":"decode"', b'"id":"prefill"')
    assert await ways(application) == {"first of its kind": 1, "prefill": 1}


@KINDS
async def test_decode_has_another_one(kind: dict[str, Any]) -> None:
    """It goes on behind the one that the client has."""
    application, prefill, decode, _ = made()
    await read(application, **kind)
    decode.tokens = OTHER
    usage = {"stream_options": {"include_usage": True}}
    found = await read(application, **kind, **usage)
    assert text_of(found) == "aé d"
    assert b'"completion_tokens":4' in found
    assert b'"prompt_tokens":3' in found
    rest = decode.asked[-1]
    assert rest["prompt"] == [*PROMPT, 10]
    assert rest["max_tokens"] == COUNT - 1
    assert "kv_transfer_params" not in rest
    assert len(prefill.asked) == 2
    found_ways = await ways(application)
    assert found_ways["prefill"] == found_ways["regained"] == 1


@pytest.mark.parametrize("failing", [broken, refused])
@KINDS
async def test_decode_fails_behind_it(kind: dict[str, Any], failing: Any) -> None:
    """Another one goes on, from the tokens; or the same, if it says 500."""
    application, _, _, network = made(decoders=[D1, D2])
    for _ in range(2):  # how each begins its streams
        await read(application, **kind)
    network.handlers["d1"] = later(failing)
    network.asked.clear()
    assert text_of(await read(application, **kind)) == "aé d"
    hosts = [host for host, _ in network.asked]
    assert sorted(hosts[:2]) == ["d1", "p1"]
    assert hosts[2:] == (["d1", "d2"] if failing is broken else ["d2"])
    assert network.asked[-1][1]["prompt"] == [*PROMPT, 10]


async def test_decode_dies_later() -> None:
    """As in any stream: an error is its last event."""
    application, _, decode, _ = made()
    await read(application)
    decode.cuts = 2
    found = await read(application)
    assert b'"text":"a"' in found
    assert b'"code":502' in found


@KINDS
async def test_an_event_with_several_tokens(kind: dict[str, Any]) -> None:
    application, _, decode, _ = made()
    await read(application, **kind)
    decode.together = 3
    found = await read(application, **kind, return_token_ids=True)
    assert text_of(found) == "aé d"
    assert re.findall(rb'"token_ids":(\[\S*?\])', found)[-3:] == [
        b"[10]",
        b"[11,12]",
        b"[13]",
    ]


async def test_tokens_and_probabilities_are_those_of_the_engine() -> None:
    application, _, decode, _ = made()
    await read(application)
    wanted = {"logprobs": 1, "return_token_ids": True}
    alone = b"".join([part async for part in decode.parts(asked(**wanted))])
    found = await read(application, **wanted)
    assert found == alone.replace(b'"id":"decode"', b'"id":"prefill"')
    decode.tokens = OTHER
    found = await read(application, **wanted)
    assert text_of(found) == "aé d"
    # Places of a text's tokens go on too: the first one is called "10".
    offsets = re.findall(rb'"text_offset":\[(\d+)\]', found)
    assert offsets[:2] == [b"0", b"2"]


@pytest.mark.parametrize("top", [0, 1])
async def test_probabilities_of_a_chat(top: int) -> None:
    """They stay those of a chat if the rest comes from a completion."""
    application, _, decode, _ = made()
    await read(application, **CHAT)
    wanted = {"logprobs": True, "top_logprobs": top}
    body = asked(messages=CHAT["messages"], **wanted)
    del body["prompt"]
    alone = b"".join([part async for part in decode.parts(body)])
    found = await read(application, **CHAT, **wanted)
    assert found == alone.replace(b'"id":"decode"', b'"id":"prefill"')
    decode.tokens = OTHER
    found = await read(application, **CHAT, **wanted)
    assert text_of(found) == "aé d"
    assert decode.asked[-1]["logprobs"] == top
    assert "top_logprobs" not in decode.asked[-1]
    logged = re.findall(rb'"logprobs":(\{.*?\]\})[,}]', found)
    assert logged == re.findall(rb'"logprobs":(\{.*?\]\})[,}]', alone)
    assert len(logged) == COUNT


async def test_a_completion_without_a_limit() -> None:
    """It has sixteen tokens, of which the rest has one less."""
    application, _, decode, _ = made()
    await read(application)
    decode.tokens = OTHER
    assert text_of(await read(application, max_tokens=None)) == "aé d"
    assert decode.asked[-1]["max_tokens"] == 15


@pytest.mark.parametrize(
    ("limits", "rest"),
    [
        ({}, 40 - 3 - 1),
        ({"answer_tokens": 20}, 19),
        ({"answer_tokens": 9, "answer_tokens_max": 9}, 8),
        ({"answer_tokens": 64}, 40 - 3 - 1),
        ({"answer_tokens": "many", "answer_tokens_max": -1}, 40 - 3 - 1),
    ],
)
async def test_a_chat_without_a_limit(limits: dict[str, Any], rest: int) -> None:
    """Its rest is a completion, for which vLLM takes null for 16."""
    application, prefill, decode, network = made()
    prefill.limits = limits
    await read(application, **CHAT)
    decode.tokens = OTHER
    for _ in range(2):
        assert text_of(await read(application, **CHAT, max_tokens=None)) == "aé d"
        assert decode.asked[-1]["max_tokens"] == rest
    asked_for = [url for _, url, _ in network.sent if url.endswith("/v1/models")]
    assert asked_for == ["http://d1/v1/models"]


async def test_an_engine_that_limits_every_answer() -> None:
    application, prefill, decode, _ = made()
    prefill.limits = {"answer_tokens": 3, "answer_tokens_max": 3}
    await read(application)
    decode.tokens = OTHER
    await read(application)
    assert decode.asked[-1]["max_tokens"] == 3 - 1


@pytest.mark.parametrize("models", [None, ["m"], {}, {"data": ["m"]}, {"data": 1}])
async def test_an_engine_that_does_not_say_its_context(models: Any) -> None:
    """A chat without a limit ends rather than after as many tokens as it happens."""
    application, prefill, decode, _ = made()
    prefill.context = decode.context = None
    prefill.models = decode.models = models
    await read(application, **CHAT)
    decode.tokens = OTHER
    assert b'"code":502' in await read(application, **CHAT, max_tokens=None)


async def test_a_completion_has_no_limit_of_chats() -> None:
    """vLLM ignores it there."""
    application, *_ = made()
    await read(application)
    await read(application, max_completion_tokens=1)
    assert "one token" not in await ways(application)


async def test_tools_that_must_not_be_called() -> None:
    """They are a part of the prompt, which the rest has as tokens."""
    application, _, decode, _ = made()
    await read(application, **CHAT)
    decode.tokens = OTHER
    tools = {"tools": [{"type": "function"}], "tool_choice": "none"}
    assert text_of(await read(application, **CHAT, **tools)) == "aé d"
    assert not {"tools", "tool_choice"} & decode.asked[-1].keys()


def asked(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": COUNT, "stream": True} | more


async def test_a_stop_string_keeps_text_back() -> None:
    """The client gets as much of the token as vLLM sends."""
    application, prefill, decode, _ = made()
    await read(application)
    prefill.tokens = decode.tokens = [13, 11, 12, 13]
    alone = await read(application, stop=["xy"])
    assert b'"text":" "' in alone
    assert await ways(application) == {"first of its kind": 1, "prefill": 1}
    # The client has a part of the token, and gets the other with what follows.
    decode.tokens = OTHER
    assert text_of(await read(application, stop=["xy"])).startswith(" d")


@pytest.mark.parametrize("stop", ["ab", ["x", "abc"]])
async def test_a_token_that_may_begin_a_stop_string(stop: Any) -> None:
    application, *_ = made()
    await read(application)
    assert text_of(await read(application, stop=stop)) == "aé d"
    assert await ways(application) == {"first of its kind": 1, "stop": 1}


async def test_a_token_that_ends_the_answer() -> None:
    application, prefill, *_ = made()
    await read(application)
    prefill.ends = "stop"
    assert text_of(await read(application)) == "aé d"
    assert await ways(application) == {"first of its kind": 1, "ended": 1}


async def test_an_engine_that_parses_its_answers() -> None:
    """What a parser makes of one token says nothing of what it makes of more."""
    application, prefill, decode, _ = made()
    prefill.parsed = decode.parsed = "reasoning"
    for _ in range(2):
        found = await read(application, **CHAT)
        assert found.count(b'"reasoning":"') == COUNT
    assert await ways(application) == {"first of its kind": 1, "parsed": 1}


async def test_a_parser_that_shows_too_late() -> None:
    """Nothing can go on behind that, so the client gets an error and no other text."""
    application, _, decode, _ = made()
    await read(application, **CHAT)
    decode.parsed = "reasoning"
    found = await read(application, **CHAT)
    assert b"its stream begins in a different form than earlier" in found
    assert b'"reasoning":"' not in found
    found = await read(application, **CHAT)
    assert found.count(b'"reasoning":"') == COUNT
    assert (await ways(application))["parsed"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_is_prefills_whole_answer(stream: bool) -> None:
    application, prefill, decode, _ = made()
    body = {"prompt": PROMPT, "max_tokens": 1, "stream": stream}
    said = await call(application, "POST", "/v1/completions", json=body)
    assert said.status_code == 200
    assert not decode.asked
    assert prefill.asked == [body]
    assert await ways(application) == {"one token": 1}


@pytest.mark.parametrize(
    ("sampling", "seed"),
    [({"temperature": 0}, None), ({"temperature": 1, "seed": 7}, 7), ({}, "random")],
)
async def test_both_engines_have_one_seed(sampling: dict[str, Any], seed: Any) -> None:
    """Without one they would sample different tokens."""
    application, prefill, decode, _ = made()
    await read(application)
    await read(application)
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": COUNT, **sampling}
    for _ in range(2):
        parts = streamed(application, **body)
        assert [part async for part in parts]
    assert (await ways(application))["prefill"] == 3
    seeds = [[one.get("seed") for one in e.asked[2:]] for e in (prefill, decode)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == (2 if seed == "random" else 1)
    assert seed in ("random", *seeds[0])
    decode.tokens = OTHER
    parts = streamed(application, **body)
    assert [part async for part in parts]
    # The first number is used, and those that follow are others.
    assert decode.asked[-1].get("seed") == {7: 8}.get(seed)


async def test_an_engine_that_takes_no_seeds() -> None:
    """Both may sample another token, so decode begins."""
    application, prefill, decode, _ = made()
    await read(application)
    prefill.seeds = False
    for _ in range(2):
        await read(application, temperature=1)
    assert await ways(application) == {
        "first of its kind": 1,
        "no seed": 1,
        "prefill": 1,
    }
    assert "seed" not in decode.asked[-1]


async def test_decode_sends_it_if_the_operator_wants_that() -> None:
    application, prefill, *_ = made(first_token="decode")
    for _ in range(2):
        assert text_of(await read(application)) == "aé d"
    assert await ways(application) == {"off": 2}
    assert not prefill.asked[-1].get("return_token_ids")


@KINDS
async def test_a_stream_that_can_move_as_well(kind: dict[str, Any]) -> None:
    application, _, decode, network = made(migrate=True, decoders=[D1, D2])
    for _ in range(2):
        alone = await read(application, **kind)
    found = await read(application, **kind)
    assert text_of(found) == "aé d"
    assert found.count(b"data:") == alone.count(b"data:")
    decode.cuts = 2
    for _ in range(2):
        assert text_of(await read(application, **kind)) == "aé d"
    assert network.asked[-1][1]["prompt"][:4] == [*PROMPT, 10]
    found_ways = await ways(application)
    assert found_ways["prefill"] == 3
    assert found_ways["recovered"] >= 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("n", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("bad_words", ["x"]),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"choice": ["x"]}),
        ("prompt_logprobs", 1),
        ("max_tokens", "4"),
        ("unheard_of", 1),
    ],
)
async def test_fields_with_which_decode_begins(field: str, value: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": COUNT, "stream": True}
    assert not waiting_field("/v1/completions", body)
    body[field] = value
    assert waiting_field("/v1/completions", body) == field
    application, *_ = made()
    await call(application, "POST", "/v1/completions", json=body)
    way = "another field" if field == "unheard_of" else field
    assert await ways(application) == {way: 1}


@pytest.mark.parametrize(
    "odd",
    [{"stream_options": "x"}, {"stop": 5}, {"logprobs": "x"}, {"seed": "x"}],
    ids=str,
)
async def test_odd_values_are_the_engines_business(odd: dict[str, Any]) -> None:
    """It refuses them; a proxy that passes them on breaks at none."""
    application, prefill, _, network = made()
    await read(application)
    body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "stream": True}
    network.handlers["p1"] = network.handlers["d1"] = fails(400, "an odd value")
    said = await call(application, "POST", "/v1/completions", json=body | odd)
    assert said.status_code == 400
    network.handlers |= {"p1": prefill, "d1": Vllm()}
    assert b"[DONE]" in await read(application)


async def test_an_answer_in_one_piece() -> None:
    application, *_ = made()
    body = {"prompt": PROMPT, "max_tokens": COUNT}
    said = await call(application, "POST", "/v1/completions", json=body)
    assert said.json()["choices"][0]["text"] == "a"
    assert await ways(application) == {"not streamed": 1}


def test_fields_of_chats_with_which_decode_begins() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    path = "/v1/chat/completions"
    assert not waiting_field(path, chat | {"stop": "x", "seed": 1, "max_tokens": None})
    plain = {"tools": [1], "tool_choice": "none", "response_format": {"type": "text"}}
    assert not waiting_field(path, chat | plain | {"top_logprobs": 0})
    odd = {"logprobs": True, "top_logprobs": "2"}
    for more in ({"tools": [1]}, odd, {"logprobs": 1}, {"top_logprobs": 2}):
        assert waiting_field(path, chat | more) == next(iter(more))
