"""A store's verbs at the proxy: ``POST /kv/pin`` for a prompt or a running request.

The store server executes the verbs and checks the client's key (``Authorization``), see
:mod:`kvwire.store.server.orders`. The proxy adds two ways to name blocks: by a running
request, or by a prompt, which an engine tokenizes.

The proxy itself executes a move whose ``to`` is an engine's URL. No engine accepts
blocks from outside into its cache: it loads a prompt's blocks when it gets a request.
So the proxy finds out which leading blocks the store has, and requests one token after
exactly these and one more token from the engine. That token is all that it computes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from kvwire.errors import UsageError, shown
from kvwire.integrations.vllm.proxy.checking import read_block_tokens
from kvwire.integrations.vllm.proxy.client import (
    EngineClient,
    EngineFailed,
    EngineResponse,
)
from kvwire.integrations.vllm.proxy.engines import VllmEngine, VllmServer
from kvwire.integrations.vllm.proxy.exchange import HttpAnswer, Refused, as_json
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.integrations.vllm.proxy.limits import (
    PROXY_COPIES_MAX,
    PROXY_COPY_S,
    PROXY_EVENT_BYTES_MAX,
)
from kvwire.store.limits import STORE_ORDER_BYTES_MAX
from kvwire.store.order import described
from kvwire.store.placement import BlockState, Placement, Placing
from kvwire.wire.control import DECODE_ERRORS

_PROMPT: Final = ("prompt", "messages")
_URLS: Final = ("http://", "https://")
_NO_STORE: Final = (
    "the answer is no store's; --store needs the address that its --metrics names"
)
_BEHIND: Final = "an engine loads leading blocks, and one before it is not in the store"
TOKENIZED: Final = ("model", *_PROMPT, "tools", "chat_template_kwargs")
"""The fields by which an engine tokenizes a prompt as it would for a completion."""
SALT_FIELD: Final = "cache_salt"
"""The field of a request that changes the names of its blocks."""


@dataclass(frozen=True, slots=True)
class StoreBehind:
    """The store to which the engines save.

    Attributes:
        url: The URL of its server's HTTP interface.
        block_tokens: The number of tokens in an engine's block; 0 if the engines are
            asked for it. If an engine reports another number, prompts are refused.
    """

    url: str
    block_tokens: int = 0


class StoreVerbs:
    """Passes verbs on to the engines' store."""

    def __init__(
        self, store: StoreBehind, client: EngineClient, fleet: EngineFleet
    ) -> None:
        self._store = store
        self._client = client
        self._fleet = fleet
        server = VllmServer(store.url.rstrip("/"), ())
        self._server = VllmEngine(server=server, role="store")
        self._loads = asyncio.Semaphore(PROXY_COPIES_MAX)

    async def carry_out(
        self, path: str, order: dict[str, Any], headers: Mapping[str, str]
    ) -> HttpAnswer:
        """Let the store execute a verb, and return its answer.

        Args:
            path: The verb's path.
            order: The order. It may have a prompt or messages, as in a completion,
                instead of hashes.
            headers: The client's headers.

        Raises:
            Refused: The prompt cannot be tokenized.
            EngineFailed: The store, or an engine, cannot be reached.

        Cancel safety: safe, the store may still execute it.
        """
        to = str(order.get("to") or "")
        engine: VllmEngine | None = None
        asked = order
        if to.startswith(_URLS) and path.endswith("/move"):
            engine = self._engine(to, order)
            path = f"{path.removesuffix('move')}locate"
            order = {k: v for k, v in order.items() if k not in ("to", "keep")}
        tokens: list[int] | None = None
        size = 0
        if any(order.get(name) for name in _PROMPT):
            tokens = await self._tokens(order)
            size = await self._block_tokens(engine, order)
            kept = {k: v for k, v in order.items() if k not in TOKENIZED}
            order = kept | {
                "tokens": tokens,
                "block_tokens": size,
                "scheme": "kvwire",
            }
        passed = {name: headers[name] for name in ("authorization",) if name in headers}
        async with self._client.ask(self._server, path, passed, order) as answer:
            content = await answer.body(STORE_ORDER_BYTES_MAX)
        if tokens and path.endswith("/locate") and answer.status == HTTPStatus.OK:
            located = self._located(content)
            if engine is not None:
                more = {k: asked[k] for k in ("model", SALT_FIELD) if asked.get(k)}
                moved = await self._load(engine, tokens, size, located, more)
                return as_json(described(moved))
            self._add_engines(located, tokens, size)
            return as_json(msgspec.structs.asdict(located))
        return HttpAnswer(answer.status, {"content-type": "application/json"}, content)

    def _engine(self, to: str, order: Mapping[str, Any]) -> VllmEngine:
        """Return the target engine of a move."""
        if not any(order.get(name) for name in _PROMPT):
            why = (
                f"to={shown(to)}: an engine loads only the blocks of a prompt: "
                f"name them by prompt, messages or request"
            )
            raise Refused(HTTPStatus.BAD_REQUEST, why)
        try:
            return self._fleet.at(to)
        except UsageError as exc:
            raise Refused(HTTPStatus.BAD_REQUEST, f"to: {exc}") from None

    def _located(self, content: bytes) -> _Located:
        """Read the store's answer to a locate.

        Raises:
            EngineFailed: No store server answers like this.
        """
        try:
            located = msgspec.json.decode(content, type=_Located)
        except DECODE_ERRORS:
            located = _Located(1, [], {}, {}, {})
        named = [located.prefix - 1, *itertools.chain(*located.reasons.values())]
        if max(named) >= len(located.blocks):
            raise EngineFailed(self._server, _NO_STORE)
        return located

    async def _load(
        self,
        engine: VllmEngine,
        tokens: Sequence[int],
        size: int,
        located: _Located,
        more: Mapping[str, Any],
    ) -> Placement:
        """Let an engine load the leading blocks that the store has."""
        placing = Placing(len(located.blocks))
        for at, state in enumerate(located.blocks):
            placing.rule(np.array([at]), BlockState[state.upper()])
        for reason, which in located.reasons.items():
            for at in which:
                placing.rule(np.array([at]), BlockState(placing.states[at]), reason)
        there = located.prefix
        behind = np.arange(there, placing.states.size)
        behind = behind[placing.states[behind] == BlockState.DONE]
        placing.rule(behind, BlockState.DEFERRED, _BEHIND)
        if there:
            # An engine always computes a prompt's last token, and if that is a block's
            # last one, it computes the block. So it gets the next token, or any.
            prompt = [*tokens[: there * size + 1]]
            if len(prompt) == there * size:
                prompt.append(prompt[-1])
            why = await self._asked_for(engine, prompt, more)
            if why:
                placing.rule(slice(there), BlockState.DEFERRED, f"{engine.url}: {why}")
        return placing.end()

    async def _asked_for(
        self, engine: VllmEngine, tokens: Sequence[int], more: Mapping[str, Any]
    ) -> str:
        """Request one token after others from an engine; return why not, or ""."""
        body = {"prompt": list(tokens), "max_tokens": 1, **more}
        try:
            async with (
                asyncio.timeout(PROXY_COPY_S),
                self._loads,
                self._client.ask(engine, "/v1/completions", {}, body) as answer,
            ):
                await answer.body(PROXY_EVENT_BYTES_MAX)
        except TimeoutError:
            return f"it has not answered within {PROXY_COPY_S:g} s"
        except EngineFailed as exc:
            return str(exc)
        return f"it has answered with {answer.status}" if answer.is_error else ""

    async def _block_tokens(
        self, engine: VllmEngine | None, order: Mapping[str, Any]
    ) -> int:
        """Return the size of the engines' blocks, by which the store names them."""
        option = self._store.block_tokens
        engine = engine or self._fleet.pick_to_answer(order, ())
        found = 0
        if engine is not None:
            found = await read_block_tokens(self._client, engine)
        if not (found or option):
            why = (
                "no engine reports the size of its blocks: start the proxy with "
                "--store-block-tokens"
            )
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, why)
        if found and option not in (0, found):
            why = (
                f"the proxy was started with --store-block-tokens {option}, and an "
                f"engine's blocks have {found} tokens: start it without the option"
            )
            raise Refused(HTTPStatus.CONFLICT, why)
        return found or option

    async def _tokens(self, order: Mapping[str, Any]) -> list[int]:
        """Return a prompt's tokens; an engine tokenizes text."""
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

    def _add_engines(self, located: _Located, tokens: list[int], size: int) -> None:
        """Add to a locate's answer the engines that cache the blocks themselves."""
        blocks = len(located.blocks)
        for url, count in self._fleet.holders(tokens).items():
            here = count // size
            located.held[url] = [at < here for at in range(blocks)]


async def _tokenized(answer: EngineResponse) -> list[int]:
    """Return the tokens in an engine's answer."""
    content = await answer.body(STORE_ORDER_BYTES_MAX)
    try:
        found = msgspec.json.decode(content, type=_Tokenized)
    except DECODE_ERRORS:
        found = _Tokenized([])
    if answer.is_error or not found.tokens:
        why = f"{answer.engine.url} cannot tokenize the prompt: status {answer.status}"
        raise Refused(HTTPStatus.BAD_REQUEST, why)
    return found.tokens


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_Count = Annotated[int, Meta(ge=0)]


class _Located(msgspec.Struct):
    """A store's answer to a locate; :func:`kvwire.store.order.described` writes it."""

    prefix: _Count
    blocks: list[Literal["done", "clipped", "deferred", "refused", "missing"]]
    reasons: dict[str, list[_Count]]
    counts: dict[str, int]
    held: dict[str, list[bool]]
