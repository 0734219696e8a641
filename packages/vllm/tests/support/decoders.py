"""Engines that decode token by token as they are let, and a client of their streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp

from kvwire_vllm.proxy.app import ProxyApp
from kvwire_vllm.proxy.engines import VllmServer
from packages.vllm.tests.support.proxies import (
    D1,
    D2,
    EVENTS,
    Engines,
    Handler,
    Said,
    answer,
    app,
    operate,
    streamed,
)
from tests.support.pairs import turns

COUNT = 30
PROMPT = [1, 2, 3]
CHAT = {
    "path": "/v1/chat/completions",
    "prompt": None,
    "messages": [{"role": "user", "content": "hello"}],
}


def next_token(tokens: list[int]) -> int:
    """What all engines make of tokens: of their sum, so none may lack or be twice."""
    return sum(tokens) % 9973 + len(tokens)


def whole() -> list[int]:
    tokens = list(PROMPT)
    for _ in range(COUNT):
        tokens.append(next_token(tokens))
    return tokens[3:]


class Decoder:
    """An engine that decodes token after token, as it is let."""

    def __init__(self, steps: int = 1000, *, dies: bool = False) -> None:
        # How many tokens it may make; it dies behind them if `dies`.
        self.steps = asyncio.Semaphore(steps)
        self.dies = dies
        self.stuck = asyncio.Event()  # it has made all that it may
        self.silent = -1  # the place of a token that has no text of its own
        self.details: dict[str, Any] = {}  # what else it says of an answer's usage
        self.thinks = False  # its parser says what of an answer is thought
        self.line_end = b"\n"  # of its events

    async def __call__(self, body: dict[str, Any]) -> Said:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode") or not body.get("stream"):
            # Also of /v1/models: an answer without a limit ends with the context.
            models = [{"max_model_len": len(PROMPT) + COUNT}]
            return answer(200, {"choices": [{"text": "x"}], "data": models})
        return 200, EVENTS, self.lines(body)

    async def lines(self, body: dict[str, Any]) -> AsyncGenerator[bytes]:
        async with aclosing(self.parts(body)) as parts:
            async for part in parts:
                yield part.replace(b"\n", self.line_end)

    async def step(self) -> None:
        """Make a token now and then, until this is cancelled."""
        while True:
            self.steps.release()
            await turns(20)

    async def parts(self, body: dict[str, Any]) -> AsyncGenerator[bytes]:
        """As a completion, or as a chat: of that, the first event says whose it is."""
        chat = "messages" in body
        prompt = tokens = PROMPT if chat else list(body["prompt"])
        named = {"id": f"cmpl-{id(self)}", "created": 1, "object": "completion"}
        if chat:
            named["object"] = "chat"
            who = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            said = named | {"choices": [who], "prompt_token_ids": prompt}
            yield f"data: {json.dumps(said)}\n\n".encode()
        count = body.get("max_tokens") or COUNT
        for i in range(count):
            if self.dies and self.steps.locked():
                raise aiohttp.ClientError("reset")
            if self.steps.locked():
                self.stuck.set()
            await self.steps.acquire()
            token = next_token(tokens)
            tokens = [*tokens, token]
            choice: dict[str, Any] = {"index": 0, "text": f" {token}"}
            if len(tokens) - 4 == self.silent:
                choice["text"] = ""
            if body.get("return_token_ids"):
                choice["token_ids"] = [token]
                if not i and not chat:
                    choice["prompt_token_ids"] = prompt
            if chat:
                field = "reasoning" if self.thinks else "content"
                choice["delta"] = {field: choice.pop("text")}
            if i + 1 == count:
                choice["finish_reason"] = "length"
            said = named | {"choices": [choice]}
            # An event in two parts, as a socket may give it.
            event = f"data: {json.dumps(said)}\n\n".encode()
            yield event[:9]
            yield event[9:]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        usage |= self.details
        said = {"id": "cmpl", "choices": [], "usage": usage}
        yield f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode()


class StoppedDecoder(Decoder):
    """One that is stopped behind so many tokens, and aborts its requests."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, dies=True)

    async def parts(self, body: dict[str, Any]) -> AsyncGenerator[bytes]:
        try:
            async for part in super().parts(body):
                yield part
        except aiohttp.ClientError:
            text = {"delta": {"content": ""}} if "messages" in body else {"text": ""}
            said = {"id": "cmpl", "choices": [{"finish_reason": "abort", **text}]}
            yield f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n".encode()


class Client:
    def __init__(self, application: ProxyApp, **more: Any) -> None:
        self.parts = streamed(application, **{"max_tokens": COUNT} | more)
        self.events: list[dict[str, Any]] = []
        self.done = False

    async def read(self, events: int = 1000) -> None:
        async for part in self.parts:
            for event in part.decode().strip().split("\n\n"):
                said = event.removeprefix("data: ")
                if said == "[DONE]":
                    self.done = True
                elif said:
                    self.events.append(json.loads(said))
            events -= 1
            if not events:
                return

    @property
    def id(self) -> str:
        return str(self.events[0]["id"])

    def right(self) -> None:
        assert self.done
        assert len({(one["id"], one.get("object")) for one in self.events}) == 1
        choices = [c for one in self.events for c in one["choices"]]
        chat = self.events[0].get("object") == "chat"
        texts = [c["delta"]["content"] if chat else c["text"] for c in choices]
        assert "".join(texts).split() == list(map(str, whole()))
        for one in (*choices, *self.events):
            assert not one.get("token_ids")
            assert not one.get("prompt_token_ids")
        usage = self.events[-1]["usage"]
        assert usage == {"prompt_tokens": 3, "completion_tokens": COUNT}


async def moved(
    application: ProxyApp,
    client: Client,
    source: Decoder,
    path: str = "/migrate",
    **asked: Any,
) -> tuple[int, Any]:
    """Ask that a stream moves while its engine goes on, and read it to its end."""
    moving = asyncio.ensure_future(operate(application, path, **asked))
    stepping = asyncio.ensure_future(source.step())
    await client.read()
    stepping.cancel()
    return await moving


def mover(
    decode: Sequence[VllmServer] = (D1, D2), **decoders: Handler
) -> tuple[ProxyApp, Engines]:
    """A proxy whose requests may move between decode engines."""
    network = Engines(**decoders)
    return app(network, prefill=(), decode=decode, migrate=True), network
