"""Verbs of a store at the proxy: ``POST /kv/pin`` for a prompt or a running request.

The store server carries them out and checks the client's key (``Authorization``), see
:mod:`kvwire.store.server.orders`. The proxy only knows more ways to name blocks: by
a request that is under way, or by a prompt, which an engine tokenizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kvwire.integrations.vllm.proxy.client import EngineClient, EngineResponse
from kvwire.integrations.vllm.proxy.engines import VllmEngine, VllmServer
from kvwire.integrations.vllm.proxy.exchange import HttpAnswer, Refused, as_json
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.store.limits import STORE_ORDER_BYTES_MAX
from kvwire.wire.control import DECODE_ERRORS

_PROMPT: Final = ("prompt", "messages")
TOKENIZED: Final = ("model", *_PROMPT, "tools", "chat_template_kwargs")
"""The fields by which an engine tokenizes a prompt as it would for a completion."""


@dataclass(frozen=True, slots=True)
class StoreBehind:
    """The store that engines save to.

    Attributes:
        url: The URL of its server's HTTP.
        block_tokens: How many tokens an engine's hash stands for.
        seed: The engines' ``PYTHONHASHSEED``; "" for vLLM's own value.
    """

    url: str
    block_tokens: int = 16
    seed: str = ""


class StoreVerbs:
    """Passes verbs on to the store that engines save to."""

    def __init__(
        self, store: StoreBehind, client: EngineClient, fleet: EngineFleet
    ) -> None:
        self._store = store
        self._client = client
        self._fleet = fleet
        server = VllmServer(store.url.rstrip("/"), ())
        self._server = VllmEngine(server=server, role="store")

    async def carry_out(
        self, path: str, order: dict[str, Any], headers: Mapping[str, str]
    ) -> HttpAnswer:
        """Let the store carry out a verb, and return its answer.

        Args:
            path: The verb's path.
            order: The order. With a prompt or messages in place of hashes, as in a
                completion.
            headers: The client's headers.

        Raises:
            Refused: The prompt cannot be tokenized.
            EngineFailed: The store, or an engine, cannot be reached.

        Cancel safety: safe, the store may go on.
        """
        tokens: list[int] | None = None
        if any(order.get(name) for name in _PROMPT):
            tokens = await self._tokens(order)
            kept = {k: v for k, v in order.items() if k not in TOKENIZED}
            order = kept | {
                "tokens": tokens,
                "block_tokens": self._store.block_tokens,
                "scheme": "vllm",
                "seed": self._store.seed,
            }
        passed = {name: headers[name] for name in ("authorization",) if name in headers}
        async with self._client.ask(self._server, path, passed, order) as answer:
            said = await answer.body(STORE_ORDER_BYTES_MAX)
        if tokens and path.endswith("/locate") and answer.status == HTTPStatus.OK:
            return as_json(self._with_engines(msgspec.json.decode(said), tokens))
        return HttpAnswer(answer.status, {"content-type": "application/json"}, said)

    async def _tokens(self, order: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a prompt; an engine knows those of a text."""
        prompt = order.get("prompt")
        if isinstance(prompt, list) and all(type(one) is int for one in prompt):
            return prompt
        engine = self._fleet.pick_to_answer(order, ())
        if engine is None:
            why = "no engine takes requests, and the prompt is a text"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, why)
        asked = {name: order[name] for name in TOKENIZED if order.get(name)}
        async with self._client.ask(engine, "/tokenize", {}, asked) as answer:
            return await _tokenized(answer)

    def _with_engines(self, told: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        """Add to a locate which engines have the blocks in their own caches."""
        blocks = len(told["blocks"])
        for url, count in self._fleet.holders(tokens).items():
            here = count // self._store.block_tokens
            told["held"][url] = [at < here for at in range(blocks)]
        return told


async def _tokenized(answer: EngineResponse) -> list[int]:
    """Return the tokens that an engine has answered."""
    said = await answer.body(STORE_ORDER_BYTES_MAX)
    try:
        found = msgspec.json.decode(said, type=_Tokenized)
    except DECODE_ERRORS:
        found = _Tokenized([])
    if answer.is_error or not found.tokens:
        why = f"{answer.engine.url} cannot tokenize the prompt: status {answer.status}"
        raise Refused(HTTPStatus.BAD_REQUEST, why)
    return found.tokens


class _Tokenized(msgspec.Struct):
    tokens: list[int]
