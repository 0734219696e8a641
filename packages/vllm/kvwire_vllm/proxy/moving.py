"""A stream that continues on another engine, after a move or its engine's death.

A move has four steps:

1. *Copy ahead.* The source engine gets its own tokens so far as a prompt, and their KV
   goes to the target. The source has them in its prefix cache.
2. *Stop.* No more of the source's tokens are passed on; it keeps computing.
3. *Go on.* The same again for the tokens added since, and the target computes the rest
   of the answer.
4. *Hand over.* Once the first part of that answer has arrived, the source is stopped.

Until the hand-over nothing is given up: if a step fails, the source's stream is read on
from where it stopped. An engine may also die, or be stopped and abort its requests.
Then the target computes again all tokens that its store lacks. No token is lost or
repeated, because the target's prompt consists of exactly the token ids that the client
has. That is why a chat continues as a completion, whose events are translated back to
chat events for the client.

An answer in one piece stays at its engine. If that dies, the client has nothing of the
answer yet, so the request is retried like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from kvwire.aio import gather_all
from kvwire_vllm.announce import DECODE
from kvwire_vllm.proxy.client import EngineFailed, EngineResponse
from kvwire_vllm.proxy.dispatch import (
    COMPLETIONS,
    FRAMES,
    ClientRequest,
    Dispatcher,
    is_for_two,
)
from kvwire_vllm.proxy.engines import VllmEngine
from kvwire_vllm.proxy.events import EventReader, fields_of, written
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import (
    PROXY_EVENT_BYTES_MAX,
    PROXY_FAILED_ON_MAX,
    PROXY_MOVE_S,
    PROXY_MOVES_MAX,
)

logger: logging.Logger = logging.getLogger("kvwire.vllm")

Event: TypeAlias = dict[str, Any] | bytes
"""The content of a stream's event; its bytes if it is not a JSON object."""

MOVED: Final = "moved"
STAYED: Final = "stayed"

# Fields that have the same effect on a token in the prompt and in the answer. Any other
# field may treat the two differently, so a request with it cannot move.
_EXACT: Final = frozenset(
    (
        "model",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "min_tokens",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "logit_bias",
        "allowed_token_ids",
        "return_token_ids",
        "cache_salt",
        "priority",
        "user",
        "request_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
    )
)
# A chat's fields instead of a prompt, and its newer name for max_tokens.
_OF_CHATS: Final = frozenset(
    (
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "max_completion_tokens",
    )
)
# Fields that have no effect once the answer has begun. Tools that the model must not
# call only appear in the prompt. A chat may say false where a completion has a number.
_DONE: Final = _OF_CHATS | frozenset(
    (
        "truncate_prompt_tokens",
        "truncation_side",
        "request_id",
        "tools",
        "tool_choice",
        "logprobs",
        "top_logprobs",
    )
)
_ENDED: Final = "it has ended"
# vLLM's reason for the end of an answer when the engine is stopped.
_ABORT: Final = "abort"
_PARSED: Final = "its engine parses the answer"
_OF_ANSWER: Final = ("id", "object", "created", "model")
# Fields of an answer's usage that count the prompt's tokens.
_OF_PROMPT: Final = frozenset(("cached_tokens", "created_cache_tokens"))
_QUOTED_CHARS: Final = 500
# Values that change nothing.
_USUAL: Final[Mapping[str, Any]] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_logprobs": 0,
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
# How many tokens a completion has if its request sets no limit.
COMPLETION_TOKENS: Final = 16
# One character in UTF-8 is at most this many tokens.
_HELD_TOKENS_MAX: Final = 4


def immovable_field(path: str, body: Mapping[str, Any]) -> str:
    """Return the field that prevents a stream from moving; "" if it can move."""
    chat = path != COMPLETIONS
    if chat and not _is_text(body.get("messages")):
        return "messages"
    # Without a limit, a chat ends at the limit of its engine's configuration.
    limit = _limit(path, body)
    if type(limit) is not int and not (chat and limit is None):
        return "max_tokens"
    if body.get("seed") is not None and body.get("temperature") != 0:
        return "seed"
    for name, value in body.items():
        unused = value is None or value is False or value in ([], {}, "")
        known = name in _EXACT or (chat and name in _OF_CHATS)
        known = known or (name == "tools" and body.get("tool_choice") == "none")
        if not known and not unused and _USUAL.get(name) != value:
            return name
    return "" if is_for_two(dict(body)) else "prompt"


def why_fixed(asked: ClientRequest) -> str:
    """Return why a request stays at its engine; "" if it can move."""
    if asked.body.get("stream") is not True:
        return "its client gets the answer in one piece"
    field = immovable_field(asked.path, asked.body)
    return field and f"it cannot move with its {field!r}"


def _limit(path: str, body: Mapping[str, Any]) -> Any:
    """Return an answer's limit of tokens; None if only its engine limits it."""
    if path == COMPLETIONS:
        limit = body.get("max_tokens")
        return COMPLETION_TOKENS if limit is None else limit
    newer = body.get("max_completion_tokens")
    return body.get("max_tokens") if newer is None else newer


def _is_text(messages: Any) -> bool:
    """Return whether a chat has only text; tokens do not identify a picture."""
    if not isinstance(messages, list):
        return False
    contents = [one.get("content") for one in messages if isinstance(one, dict)]
    parts = [part for one in contents if isinstance(one, list) for part in one]
    return len(contents) == len(messages) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in parts
    )


class MovableStream:
    """Passes on an engine's stream of events, and moves it to another engine."""

    def __init__(self, moves: Moves, asked: ClientRequest) -> None:
        self._moves = moves
        self._asked = asked
        self._gives_up = AsyncExitStack()
        self._events: EventReader | None = None
        # Events without text, such as the first bytes of a character.
        self._held: list[Event] = []  # bounded: _HELD_TOKENS_MAX
        self._held_ids: list[int] = []  # bounded: likewise
        self._prompt: list[int] = []
        self._tokens: list[int] = []
        self._before = 0
        self._lost_at = -1
        self._first: dict[str, Any] = {}
        # A parser for thoughts or tools has a state that does not follow from the
        # tokens. Such a parser shows in the answer, which then has more than content,
        # or begins without content.
        self._chat = asked.path != COMPLETIONS
        self._plain = not self._chat
        self._parsed = False
        self._over = False
        self._moving = False
        self._order: tuple[VllmEngine, asyncio.Future[str]] | None = None
        # The answer's id, as the client sees it; "" before the answer has begun.
        self.id: str = ""

    async def begin(self, stack: AsyncExitStack) -> EngineResponse:
        """Get the request answered; see :meth:`Dispatcher.ask`.

        Cancel safety: safe, like that method.
        """
        await stack.enter_async_context(self._gives_up)
        stack.callback(self._end)
        asked = self._asked
        body = asked.body
        asked.body = body | {"return_token_ids": True}
        answer = await self._moves.dispatcher.ask(asked, self._gives_up)
        asked.body = body
        if answer.status != HTTPStatus.OK:
            return answer
        self._events = EventReader(answer.parts)
        # The length of the client's answer is not known yet.
        answer.headers = {
            name: value for name, value in answer.headers.items() if name not in FRAMES
        }
        answer.parts = parts = _written(self._relayed())
        stack.push_async_callback(parts.aclose)
        return answer

    async def move(self, to: VllmEngine | None) -> str:
        """Move to another engine; return why it stays, or "" if it moved.

        Cancel safety: the stream has moved or stays.
        """
        here = self._asked.decode
        if self._moving or here is None or not self._prompt:
            return "it is moving already" if self._moving else "it has no token yet"
        if not self._can_move:
            return _PARSED
        if to is None:
            to = self._moves.fleet.pick(DECODE, {here}, here.model)
        if to is None or to is here or to.model != here.model or not to.takes(DECODE):
            return "no other engine accepts it"
        self._moving = True
        try:
            await self._copy_ahead(here, to)
            if self._over:
                return _ENDED
            moved: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._order = to, moved
            # It moves between two events, but the client may not be reading any.
            async with asyncio.timeout(2 * PROXY_MOVE_S):
                return await moved
        except TimeoutError:
            return "its tokens are not being passed on"
        finally:
            self._moving = False
            self._order = None

    @property
    def _can_move(self) -> bool:
        return bool(self._prompt) and self._plain and not self._parsed

    # --- the client's task ------------------------------------------------------------

    async def _relayed(self) -> AsyncGenerator[Event]:
        assert self._events is not None
        while True:
            event = None
            try:
                event = await anext(self._events, None)
                if event is None:
                    break
                passed = self._take(event)
            except EngineFailed as exc:
                if not self._over and await self._recovered(exc):
                    continue
                if event is None or not isinstance(exc, _Aborted):
                    raise
                # No other engine continues it, so the client gets this engine's last
                # event.
                self._over = True
                passed = self._take(event)
            for one in passed:
                yield one
            if passed and self._order is not None and not self._over:
                await self._carry_out(*self._order)
        for one in self._held:
            yield one

    def _take(self, event: bytes) -> list[Event]:
        """Handle an event; return the events for the client, including held ones."""
        chunk = fields_of(event)
        if chunk is None or (self._over and "error" in chunk):
            return self._release(event)
        if "error" in chunk:
            why = f"it reports {chunk['error']}"[:_QUOTED_CHARS]
            raise EngineFailed(self._asked.decode, why)
        with _reading(self._asked.decode):
            return self._take_chunk(chunk)

    def _take_chunk(self, chunk: dict[str, Any]) -> list[Event]:
        choices = chunk.get("choices", ())
        if not self._over and any(c.get("finish_reason") == _ABORT for c in choices):
            raise _Aborted(self._asked.decode, "it was stopped")
        complete = not choices
        for choice in choices:
            self._take_ids(chunk, choice)
            self._over = self._over or choice.get("finish_reason") is not None
            complete = self._translate(choice) or complete or self._over
        if usage := chunk.get("usage"):
            self._count(usage)
        self._first = self._first or {k: chunk[k] for k in _OF_ANSWER if k in chunk}
        self.id = self._first.get("id", "")
        chunk |= self._first
        if complete or len(self._held_ids) >= _HELD_TOKENS_MAX:
            return self._release(chunk)
        self._held.append(chunk)
        return []

    def _take_ids(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        """Record the tokens' ids, and pass them on only if the client requested them.

        Otherwise the fields are empty, as its engine writes them.
        """
        shown = self._asked.body.get("return_token_ids")
        self._held_ids += choice.get("token_ids") or []
        if not shown and "token_ids" in choice:
            choice["token_ids"] = None
        # In a chat, the ids are beside the choices.
        holder = chunk if "delta" in choice else choice
        if prompt := holder.get("prompt_token_ids"):
            if self._prompt or not shown:
                holder["prompt_token_ids"] = None
            self._prompt = self._prompt or list(prompt)

    def _count(self, usage: dict[str, Any]) -> None:
        """Correct the usage: a single engine would have reported these numbers."""
        usage["prompt_tokens"] -= self._before
        usage["completion_tokens"] += self._before
        details = usage.get("prompt_tokens_details") or {}
        for name in _OF_PROMPT & details.keys():
            count = details[name]
            details[name] = count and min(count, usage["prompt_tokens"])

    def _translate(self, choice: dict[str, Any]) -> bool:
        """Convert a choice to the client's kind; return whether it has any content."""
        if not self._chat:
            return bool(choice.get("text"))
        if "text" in choice:
            choice["delta"] = {"content": choice.pop("text")}
            choice.pop("prompt_token_ids", None)
        named = {name for name, value in choice["delta"].items() if value}
        self._plain = self._plain or "content" in named
        self._parsed = self._parsed or not named <= {"role", "content"}
        return bool(named)

    def _release(self, last: Event) -> list[Event]:
        """Return the held events followed by `last`."""
        out = [*self._held, last]
        self._tokens += self._held_ids  # bounded: max_tokens
        self._held = []
        self._held_ids = []
        return out

    async def _carry_out(self, to: VllmEngine, moved: asyncio.Future[str]) -> None:
        if moved.done():
            return
        why = await self._switch(to, self._asked.decode)
        self._moves.counts[STAYED if why else MOVED] += 1
        if not moved.done():
            moved.set_result(why)

    async def _recovered(self, error: EngineFailed) -> bool:
        """Continue elsewhere after the engine's death; return whether that worked."""
        here = self._asked.decode
        if here is None or error.ours or not self._can_move:
            return False
        logger.warning("%s cut off its answer: %s", here.url, error.why)
        here.failed += 1
        error.engine = here
        await self._moves.dispatcher.look_at(error)
        # If two engines die at the same token, that token may be the cause.
        at = self._lost_at
        self._lost_at = len(self._tokens)
        if at == self._lost_at:
            return False
        tried = {here}
        fleet = self._moves.fleet
        while to := fleet.pick_to_answer(tried, here.model):
            if len(tried) > PROXY_FAILED_ON_MAX:
                return False
            self._moves.dispatcher.retries += 1
            if not await self._switch(to, None):
                self._moves.counts["recovered"] += 1
                return True
            tried.add(to)  # bounded: engines
        return False

    async def _switch(self, to: VllmEngine, source: VllmEngine | None) -> str:
        """Continue on another engine with this one's KV; return why not, or ""."""
        asked = self._remainder()
        async with AsyncExitStack() as attempt:
            try:
                # Without KV everything is computed again, so there is no limit.
                async with asyncio.timeout(PROXY_MOVE_S if source else None):
                    asked.body["max_tokens"] = await self._left(to)
                    if not asked.body["max_tokens"]:
                        return _ENDED
                    answer = await self._moves.dispatcher.ask_once(
                        source, to, asked, attempt
                    )
                if answer.is_error:
                    return f"{answer.engine.url} answers {answer.status}"
            except (EngineFailed, TimeoutError) as exc:
                return str(exc) or f"no token within {PROXY_MOVE_S:g} s"
            await self._gives_up.aclose()
            self._gives_up.push_async_callback(attempt.pop_all().aclose)
        self._events = EventReader(answer.parts)
        self._held = []
        self._held_ids = []
        self._before = len(self._tokens)
        self._asked.decode = to
        self._asked.engines = (to.url,)
        return ""

    # --- the operator's task ----------------------------------------------------------

    async def _copy_ahead(self, here: VllmEngine, to: VllmEngine) -> None:
        """Copy the tokens so far to the target's prefix cache; failures are ignored."""
        asked = self._remainder()
        for name in ("stream", "stream_options", "min_tokens"):
            asked.body.pop(name, None)
        asked.body["max_tokens"] = 1
        with contextlib.suppress(EngineFailed, TimeoutError):
            async with asyncio.timeout(PROXY_MOVE_S), AsyncExitStack() as attempt:
                response = await self._moves.dispatcher.ask_once(
                    here, to, asked, attempt
                )
                await response.body(PROXY_EVENT_BYTES_MAX)

    async def _left(self, to: VllmEngine) -> int:
        """Return how many tokens the rest of the answer may have at an engine.

        A chat without a limit continues as a completion, which needs one: vLLM takes
        null for 16.
        """
        asked = self._asked
        limit: int | None = _limit(asked.path, asked.body)
        if limit is None:
            context = await self._moves.dispatcher.context_of(to, asked.headers)
            limit = context - len(self._prompt)
            limit = min(limit, asked.answer_tokens or limit)
        limit = min(limit, asked.answer_tokens_max or limit)
        return max(0, limit - len(self._tokens))

    def _remainder(self) -> ClientRequest:
        """Return the request for the part that the client lacks, without its limit."""
        asked = self._asked
        done = len(self._tokens)
        body = {key: value for key, value in asked.body.items() if key not in _DONE}
        body["prompt"] = [*self._prompt, *self._tokens]
        if type(body.get("min_tokens")) is int:
            body["min_tokens"] = max(0, body["min_tokens"] - done)
        # The seed's random numbers so far are used up; the same ones must not come
        # again.
        if type(body.get("seed")) is int:
            body["seed"] += done
        body["return_token_ids"] = True
        return ClientRequest(COMPLETIONS, body, asked.headers, asked.since)

    def _end(self) -> None:
        self._over = True
        if self._order is not None and not self._order[1].done():
            self._order[1].set_result(_ENDED)


class _Aborted(EngineFailed):
    """Reports an engine that ends its answers because it is shutting down."""


@contextlib.contextmanager
def _reading(engine: VllmEngine | None) -> Iterator[None]:
    """Raise EngineFailed for an event that lacks an expected field."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as exc:
        why = f"its answer is malformed: {type(exc).__name__}: {exc}"
        raise EngineFailed(engine, why) from None


async def _written(events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, bytes):
                yield event
            else:
                yield written(event)


@dataclass(frozen=True, slots=True)
class Moves:
    """The proxy's streams that can move."""

    dispatcher: Dispatcher
    fleet: EngineFleet
    counts: Counter[str]  # results by kind
    migrate: bool = True  # whether streams can move
    # bounded: PROXY_RUNNING_MAX
    streams: dict[ClientRequest, MovableStream] = field(default_factory=dict)

    async def ask(self, asked: ClientRequest, stack: AsyncExitStack) -> EngineResponse:
        """Get a request answered by a stream that can move; see `Dispatcher.ask`.

        Cancel safety: safe, like that method.
        """
        if why_fixed(asked) or not self.migrate:
            return await self.dispatcher.ask(asked, stack)
        stream = MovableStream(self, asked)
        self.streams[asked] = stream  # bounded: PROXY_RUNNING_MAX
        stack.callback(self.streams.pop, asked)
        return await stream.begin(stack)

    async def move(
        self, asked: list[ClientRequest], to: VllmEngine | None = None
    ) -> list[dict[str, str]]:
        """Move requests; return each id with its new engine or the reason to stay.

        Cancel safety: each stream has moved or stays.
        """
        turns = asyncio.Semaphore(PROXY_MOVES_MAX)

        async def one(asked: ClientRequest) -> dict[str, str]:
            stream = self.streams.get(asked)
            if stream is None:
                name = asked.headers.get("x-request-id", "")
                return {"request": name, STAYED: why_fixed(asked)}
            async with turns:
                why = await stream.move(to)
            where = {STAYED: why} if why else {MOVED: asked.engines[-1]}
            return {"request": stream.id, **where}

        return await gather_all(*map(one, asked))

    def named(self, name: str) -> list[ClientRequest]:
        """Return the requests with this id in their answers."""
        return [asked for asked, one in self.streams.items() if one.id == name]
