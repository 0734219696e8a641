"""Answers that could move have every field that the engine's own answers have.

The answers are as vLLM 0.32 writes them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.engines.proxies import (
    CHAT,
    COUNT,
    D1,
    EVENTS,
    Client,
    Decoder,
    Engines,
    Handler,
    Said,
    answer,
    app,
    call,
    moved,
    mover,
)

NAMED = {"id": "cmpl-1", "created": 7, "model": "m"}
ANSWER: dict[str, Any] = {
    "service_tier": None,
    "system_fingerprint": "vllm-0.32",
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
USAGE: dict[str, Any] = {
    "prompt_tokens": 3,
    "total_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 2, "created_cache_tokens": 1},
    "completion_tokens_details": None,
}
OF_PROMPT = {"prompt_logprobs": None, "prompt_token_ids": None}
CHOICE = {
    "index": 0,
    "logprobs": None,
    "finish_reason": "stop",
    "stop_reason": 9,
    "token_ids": None,
    "routed_experts": None,
}
MESSAGE: dict[str, Any] = {
    "role": "assistant",
    "content": "one two",
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "reasoning": None,
}
COMPLETED = {
    **NAMED,
    **ANSWER,
    "object": "text_completion",
    "choices": [{**CHOICE, **OF_PROMPT, "text": "one two"}],
    "usage": USAGE,
}


def chatted(**message: Any) -> dict[str, Any]:
    """A chat's answer in one piece."""
    return {
        **NAMED,
        **ANSWER,
        **OF_PROMPT,
        "object": "chat.completion",
        "choices": [{**CHOICE, "message": MESSAGE | message}],
        "usage": USAGE,
        "prompt_text": None,
    }


def completion(ids: bool) -> list[dict[str, Any]]:
    """The events of a completion."""
    first: dict[str, Any] = {"index": 0, "text": "one", "logprobs": None}
    first |= {"finish_reason": None, "stop_reason": None}
    first |= {"prompt_token_ids": [1, 2, 3] if ids else None}
    first |= {"token_ids": [5] if ids else None}
    last = {**first, "text": " two", "finish_reason": "stop", "stop_reason": 9}
    last |= {"prompt_token_ids": None, "token_ids": [6] if ids else None}
    named = {**NAMED, "object": "text_completion"}
    return [{**named, "choices": [choice]} for choice in (first, last)]


def chat(ids: bool, *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a chat, of which the first one says whose it is."""
    named = {**NAMED, "object": "chat.completion.chunk"}
    who = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    who |= {"logprobs": None, "finish_reason": None}
    first: dict[str, Any] = {**named, "choices": [who], "prompt_text": None}
    events = [first | {"prompt_token_ids": [1, 2, 3] if ids else None}]
    for number, delta in enumerate(deltas):
        last = number + 1 == len(deltas)
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None}
        choice |= {"finish_reason": "stop" if last else None}
        choice |= {"stop_reason": 9} if last else {}
        choice |= {"token_ids": [5 + number] if ids else None}
        events.append({**named, "choices": [choice]})
    return events


def engine(whole: dict[str, Any], *deltas: dict[str, Any]) -> Handler:
    """One that answers in one piece or in events, with token ids if it is asked to."""

    async def answers(body: dict[str, Any]) -> Said:
        ids = bool(body.get("return_token_ids"))
        if not body.get("stream"):
            return answer(200, whole)
        events = chat(ids, *deltas) if deltas else completion(ids)

        async def parts() -> AsyncIterator[bytes]:
            for event in events:
                yield f"data: {json.dumps(event)}\n\n".encode()
            if (body.get("stream_options") or {}).get("include_usage"):
                kept = {k: v for k, v in USAGE.items() if v is not None}
                said = {**NAMED, "object": events[0]["object"], "choices": []}
                said |= {"usage": kept, "system_fingerprint": "vllm-0.32"}
                yield f"data: {json.dumps(said)}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return 200, EVENTS, parts()

    return answers


def front(decode: Handler, migrate: bool) -> Any:
    return app(Engines(d1=decode, d2=decode), prefill=(), migrate=migrate)


CONTENT = ({"content": "one"}, {"content": " two"})
THOUGHTS = ({"reasoning": "so it"}, {"reasoning": " is"}, *CONTENT)
REFUSAL = ({"refusal": "I will"}, {"refusal": " not"})
ADD = {"id": "x", "type": "function"}
CALLS = (
    {"tool_calls": [ADD | {"index": 0, "function": {"name": "add", "arguments": "["}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "]"}}]},
    {"tool_calls": [ADD | {"index": 1, "function": {"name": "add", "arguments": "1"}}]},
)
CALLED = [
    ADD | {"function": {"name": "add", "arguments": "[]"}},
    ADD | {"function": {"name": "add", "arguments": "1"}},
]
TALK = {"model": "m", "messages": CHAT["messages"]}
ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "whole", "deltas"),
    [
        ("completions", ASKED, COMPLETED, ()),
        ("chat/completions", TALK, chatted(), CONTENT),
        ("chat/completions", TALK, chatted(reasoning="so it is"), THOUGHTS),
        (
            *("chat/completions", TALK),
            *(chatted(content=None, tool_calls=CALLED), CALLS),
        ),
        (
            *("chat/completions", TALK),
            *(chatted(content=None, refusal="I will not"), REFUSAL),
        ),
    ],
)
async def test_an_answer_in_one_piece(
    path: str, body: dict[str, Any], whole: dict[str, Any], deltas: Any
) -> None:
    application = front(engine(whole, *deltas), migrate=True)
    said = await call(application, "POST", f"/v1/{path}", json=body)
    assert said.status_code == 200
    assert said.json() == whole


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(("more", "deltas"), [({}, ()), (CHAT, CONTENT)])
async def test_events_have_the_fields_that_they_had(
    more: dict[str, Any], deltas: Any, ids: bool
) -> None:
    read = []
    for migrate in (False, True):
        application = front(engine({}, *deltas), migrate)
        options = {"stream_options": {"include_usage": True}}
        client = Client(application, return_token_ids=ids, **more, **options)
        await client.read()
        assert client.done
        read.append(client.events)
    assert read[0] == read[1]


async def test_no_more_of_a_prompt_is_cached_than_there_is() -> None:
    """The target's prompt has the answer so far in it."""
    first, second = Decoder(3), Decoder()
    second.details = {"prompt_tokens_details": {"cached_tokens": 3 + COUNT}}
    application, _ = mover(d1=first, d2=second)
    client = Client(application)
    await client.read(3)
    assert (await moved(application, client, first, engine=D1.url))[0] == 200
    usage = client.events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, COUNT)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
