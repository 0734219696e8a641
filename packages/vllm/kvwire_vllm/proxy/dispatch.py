"""Sends a request to two engines, and retries until an answer begins.

::

    at once   prefill and decode get the request together; decode waits for the KV
    alone     no prefill engine is up, and decode computes the prompt itself; or no
              decode engine is up, and a prefill engine answers

An engine that cannot be reached, or that breaks off before the answer has begun, costs
another try; first the decode request of the failed try is cancelled, so that it does
not wait for KV that will not come. An engine that answers with an error is asked for
its health: if that fails too, another one is tried; if not, the request is at fault,
and the client gets the error. Once the answer has begun, it is passed to the client,
and an engine that dies then cuts it off.

So a failing fleet gets at most twice the work, whatever its size: a request on which
two engines have failed is not retried, since it may be the cause, and of engines that
are down, which may be back, it reaches one. One without room comes last until its
health is checked again. If three still have none, one more is asked, without prefill.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kvwire.aio import end_task, gather_all
from kvwire.spi import DECODE_ERRORS
from kvwire_vllm.announce import DECODE, PREFILL
from kvwire_vllm.metadata import answer as kv_params
from kvwire_vllm.proxy.client import (
    EngineClient,
    EngineFailed,
    EngineResponse,
)
from kvwire_vllm.proxy.engines import VllmEngine, VllmServer
from kvwire_vllm.proxy.events import EVENTS, EventReader, ends, fields_of
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import (
    PROXY_BODY_BYTES_MAX,
    PROXY_EVENT_BYTES_MAX,
    PROXY_FAILED_ON_MAX,
    PROXY_REFUSED_BY_MAX,
)
from kvwire_vllm.references import UNSIGNED, References

logger: logging.Logger = logging.getLogger("kvwire.vllm")

COMPLETIONS: Final = "/v1/completions"
# Decoding options that make no sense for a prefill with one token.
_OF_DECODING: Final = ("stream", "stream_options", "min_tokens", "n", "best_of")
_COPIES: Final = ("n", "best_of")
_END_BYTES: Final = 64
# Headers by which a client can detect the end of an answer.
FRAMES: Final = frozenset(("content-length", "transfer-encoding"))
# Statuses of an engine that has no room, or of a gateway that does not reach it: it has
# not taken the request. Behind a gateway that waits no longer (504) it may have.
_NOT_TAKEN: Final = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
# How much of an engine's error text is quoted.
_QUOTED_CHARS: Final = 500


@dataclass(eq=False, slots=True)
class ClientRequest:
    """A client's request."""

    path: str  # the API's path, such as `/v1/completions`
    body: dict[str, Any]  # as the client sent it
    # The headers for the engines.
    headers: Mapping[str, str] = field(default_factory=dict)
    since: float = 0.0  # arrival, on the fleet's clock
    waits_for: str = "an engine"  # the event it is waiting for
    engines: tuple[str, ...] = ()  # URLs of its engines
    decode: VllmEngine | None = None  # the engine that answers
    # Limits of its engines' configuration, in tokens of an answer; 0 without one. The
    # first one is for requests that set no limit themselves.
    answer_tokens: int = 0
    answer_tokens_max: int = 0


@dataclass(slots=True)
class Tries:
    """The failed tries of one request."""

    engines: set[VllmEngine] = field(default_factory=set)  # that are not asked again
    died: int = 0  # engines that failed once they had the request
    refused: int = 0  # engines that still have no room, or are still down

    def another(self, failed: EngineFailed, *, was_up: bool, was_down: bool) -> bool:
        """Count a failed try; return whether another one may follow.

        Args:
            failed: The failure, after a look at its engine's health.
            was_up: Whether the engine was thought to be well before.
            was_down: Whether it was known to be down before.
        """
        if was_down and not failed.cost_nothing:
            return False
        self.died += failed.reached
        self.refused += not was_up and (was_down or failed.status in _NOT_TAKEN)
        return self.died < PROXY_FAILED_ON_MAX and self.refused < PROXY_REFUSED_BY_MAX


class Dispatcher:
    """Sends requests to engines."""

    def __init__(
        self,
        client: EngineClient,
        fleet: EngineFleet,
        *,
        references: References = UNSIGNED,
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._references = references
        self.retries: int = 0  # tries beyond requests' first ones

    async def ask(self, asked: ClientRequest, stack: AsyncExitStack) -> EngineResponse:
        """Get a request answered; return once the first part of the answer is here.

        Cancel safety: safe; the requests to both engines are cancelled.
        """
        tries = Tries()
        tried = tries.engines
        last = EngineFailed(None, self._fleet.why_none())
        # Reasons by role, since clients must not learn engines' addresses.
        whys: dict[str, None] = {}
        while (decode := self._fleet.pick_to_answer(tried)) is not None:
            prefill = self._pick_prefill(asked.body, decode, tries)
            if tries.died and (dead := await self._dead(prefill, decode)):
                tried |= dead  # bounded: engines, and so is the next
                continue
            asked.engines = (decode.url,)
            asked.decode = decode
            self.retries += bool(tried)
            was_down = bool(decode.down)
            well = {one for one in (prefill, decode) if one and one.is_up}
            try:
                async with AsyncExitStack() as attempt:
                    answer = await self.ask_once(prefill, decode, asked, attempt)
                    asked.waits_for = "the end of the answer"
                    stack.push_async_exit(attempt.pop_all())
                    return answer
            except EngineFailed as exc:
                logger.warning("%s", exc)
                if exc.ours:
                    raise
                last = exc
            failing = last.engine = last.engine or decode
            failing.failed += 1
            tried.add(failing)  # bounded: engines
            whys[f"{failing.role}: {last.why}"] = None
            await self.look_at(last)
            if _is_answer(last) and not failing.down:
                raise last
            if last.status in _NOT_TAKEN:
                failing.slow = True  # others come first until it is probed again
            if not tries.another(last, was_up=failing in well, was_down=was_down):
                break
        if tries.died == PROXY_FAILED_ON_MAX:
            last.status = last.status or HTTPStatus.BAD_GATEWAY
        if whys:
            last.why = f"no engine has answered: {'; '.join(whys)}"
        raise last

    async def look_at(self, failed: EngineFailed) -> None:
        """Find out whether the engine of a failed request is down.

        Cancel safety: safe, it only asks.
        """
        engine = failed.engine
        assert engine is not None
        if failed.reached or failed.status is not None:
            await self._client.probe(engine)
        else:
            engine.lost(failed.why, left=True)

    async def context_of(self, engine: VllmEngine, headers: Mapping[str, str]) -> int:
        """Return the most tokens of a prompt and its answer at an engine.

        Raises:
            EngineFailed: It does not say.

        Cancel safety: safe, it only asks.
        """
        async with self._client.ask(engine, "/v1/models", headers) as response:
            content = await response.body(PROXY_EVENT_BYTES_MAX)
        context = 0
        # An adapter's entry has no length, and a foreign engine's may be anything.
        malformed = (*DECODE_ERRORS, AttributeError, KeyError, TypeError)
        with contextlib.suppress(*malformed):
            entries = msgspec.json.decode(content)["data"]
            known = [_count(one.get("max_model_len")) for one in entries]
            context = max(known, default=0)
        if not context:
            raise EngineFailed(engine, "/v1/models has no max_model_len")
        return context

    def _pick_prefill(
        self, body: Mapping[str, Any], decode: VllmEngine, tries: Tries
    ) -> VllmEngine | None:
        """Return the engine that computes the prompt; None if `decode` computes it."""
        if tries.refused == PROXY_REFUSED_BY_MAX - 1:
            return None
        if not decode.does(DECODE) or not is_for_two(body):
            return None
        return self._fleet.pick(PREFILL, {decode, *tries.engines}, decode.model)

    async def _dead(self, *engines: VllmEngine | None) -> set[VllmEngine]:
        """Return the engines that have died already, so not of the next request."""
        known = [engine for engine in engines if engine is not None and engine.is_up]
        await gather_all(*map(self._client.probe, known))
        return {engine for engine in known if engine.down}

    # --- one try ----------------------------------------------------------------------

    async def ask_once(
        self,
        source: VllmEngine | None,
        to: VllmEngine,
        asked: ClientRequest,
        attempt: AsyncExitStack,
    ) -> EngineResponse:
        """Let one engine answer, with the prompt's KV from `source` if there is one.

        Cancel safety: safe, as :meth:`ask`.
        """
        if source is None:
            return await self._answer(to, asked, asked.body, attempt)
        name = secrets.token_hex(16)
        body = for_prefill(asked.body, to.server, name, self._references)
        computed = asyncio.ensure_future(self._compute(source, asked, body, name))
        # Its answer comes at about the same time as decode's, and is not cancelled
        # then.
        attempt.push_async_callback(end_task, computed)
        body = for_decode(asked.body, source.server, name, self._references)
        asked.engines = (source.url, to.url)
        found = await self._fetched(to, asked, body, computed, attempt)
        return found or await self._answer(to, asked, asked.body, attempt)

    async def _fetched(
        self,
        engine: VllmEngine,
        asked: ClientRequest,
        body: dict[str, Any],
        computed: asyncio.Future[_Computed],
        attempt: AsyncExitStack,
    ) -> EngineResponse | None:
        """Return the answer of an engine that fetches KV; see :func:`_first_of`.

        Return None also if the engine reports a failure: unless vLLM is configured to
        recompute, it fails a request whose KV was lost, although the engine may be
        healthy.
        """
        waiting = await attempt.enter_async_context(AsyncExitStack())
        answer = asyncio.ensure_future(self._answer(engine, asked, body, waiting))
        # Cancelled before its connection is closed.
        attempt.push_async_callback(end_task, answer)
        try:
            found = await _first_of(answer, computed)
        except EngineFailed as exc:
            lost = HTTPStatus.INTERNAL_SERVER_ERROR
            if exc.engine is not engine or exc.status != lost:
                raise
            logger.warning("%s; sending the request without KV", exc)
            self.retries += 1
            found = None
        if found is None or found.engine is not engine:
            await end_task(answer)
            await waiting.aclose()
        return found

    async def _compute(
        self, engine: VllmEngine, asked: ClientRequest, body: dict[str, Any], name: str
    ) -> _Computed:
        """Let an engine compute a prompt, and send its KV."""
        with engine.at_work():
            async with self._client.ask(
                engine, asked.path, asked.headers, body
            ) as response:
                content = await response.body(PROXY_EVENT_BYTES_MAX)
        if response.is_failure:
            failed = _failure(response, content)
            await self.look_at(failed)
            if engine.down or not _is_answer(failed):
                raise failed
            # Decode finds out whether the request is at fault.
            logger.warning("%s; sending the request without KV", failed)
            engine.failed += 1
            self.retries += 1
            return _Computed()
        if response.is_error:
            response.parts = _Chained(content)  # this releases its connection
            return _Computed(refusal=response)
        params = None
        with contextlib.suppress(*DECODE_ERRORS, AttributeError):
            params = msgspec.json.decode(content).get("kv_transfer_params")
        if not isinstance(params, dict):
            return _Computed()
        asked.answer_tokens = _count(params.get("answer_tokens"))
        asked.answer_tokens_max = _count(params.get("answer_tokens_max"))
        # Decode would wait in vain for a prompt of another connector.
        return _Computed(sends=params.get("transfer_id") == name)

    async def _answer(
        self,
        engine: VllmEngine,
        asked: ClientRequest,
        body: dict[str, Any],
        attempt: AsyncExitStack,
    ) -> EngineResponse:
        asked.waits_for = "the first token"
        attempt.enter_context(engine.at_work())
        response = await attempt.enter_async_context(
            self._client.ask(engine, asked.path, asked.headers, body)
        )
        if response.is_failure:
            raise _failure(response, await response.body(PROXY_EVENT_BYTES_MAX))
        # Headers are sent before the first token, so they are not an answer yet.
        await _begun(response)
        return response


@dataclass(frozen=True, slots=True)
class _Computed:
    """Prefill's answer."""

    sends: bool = False  # whether it sends the prompt's KV
    refusal: EngineResponse | None = None  # its answer to a request that is at fault


@dataclass(slots=True)
class _Chained(AsyncIterator[bytes]):
    first: bytes | None
    rest: AsyncIterator[bytes] | None = None

    async def __anext__(self) -> bytes:
        first = self.first
        self.first = None
        if first is not None:
            return first
        if self.rest is None:
            raise StopAsyncIteration
        return await anext(self.rest)


@dataclass(slots=True)
class _Stream(AsyncIterator[bytes]):
    """Reads a stream of events, which is complete if its last event marks the end."""

    engine: VllmEngine
    parts: AsyncIterator[bytes]
    last: bytes = b""

    async def __anext__(self) -> bytes:
        try:
            part = await anext(self.parts)
        except StopAsyncIteration:
            if ends(self.last):
                raise
            raise EngineFailed(self.engine, "its stream is incomplete") from None
        self.last = (self.last + part)[-_END_BYTES:]
        return part


async def _begun(response: EngineResponse) -> None:
    """Wait for the first part of an answer; raise if the answer is truncated.

    HTTP marks the end of an answer by a length or by chunks. An answer with neither
    looks complete even if its engine has died, so its content must show the end.
    """
    kind = response.headers.get("content-type", "")
    if response.is_error:
        first = await anext(response.parts, b"")
    elif kind.startswith(EVENTS):
        reader = EventReader(response.parts)
        first = await anext(reader, b"")
        if failed := _failed_at_once(response, first):
            raise failed
        parts = _Chained(first + reader.rest(), response.parts)
        response.parts = _Stream(response.engine, parts)
        return
    elif FRAMES & response.headers.keys():
        first = await anext(response.parts, b"")
    else:
        first = await response.body(PROXY_BODY_BYTES_MAX)
        try:
            msgspec.json.decode(first)
        except DECODE_ERRORS:
            raise EngineFailed(response.engine, "its answer is incomplete") from None
    response.parts = _Chained(first, response.parts)


async def _first_of(
    answer: asyncio.Future[EngineResponse],
    computed: asyncio.Future[_Computed],
) -> EngineResponse | None:
    """Return decode's answer, or prefill's if prefill fails or refuses first.

    Decode waits until prefill has answered, however busy prefill is. Return None if
    prefill reports that it sends no KV, since decode would wait in vain.
    """
    await asyncio.wait((answer, computed), return_when=asyncio.FIRST_COMPLETED)
    if computed.done() and (not answer.done() or answer.exception() is not None):
        # If both have failed, decode may have failed only because it got no KV.
        prompt = computed.result()
        if prompt.refusal is not None:
            return prompt.refusal
        if not prompt.sends:
            return None
        await asyncio.wait((answer,))
    return answer.result()


def _failure(response: EngineResponse, content: bytes) -> EngineFailed:
    """Return the error for an answer with a status of 500 or above."""
    reached = response.status not in _NOT_TAKEN
    failed = EngineFailed(
        response.engine, _quoted(content), response.status, reached=reached
    )
    failed.retry_after = response.headers.get("retry-after", "")
    return failed


def _is_answer(failed: EngineFailed) -> bool:
    """Return whether an engine that is well has answered a request with an error."""
    return failed.status is not None and failed.status not in _NOT_TAKEN


def _failed_at_once(response: EngineResponse, event: bytes) -> EngineFailed | None:
    """Return the error if a stream begins with an error event."""
    fields = fields_of(event)
    if fields is None or "error" not in fields:
        return None
    with contextlib.suppress(TypeError, KeyError, ValueError):
        status = HTTPStatus(fields["error"]["code"])
        failed = dataclasses.replace(response, status=status)
        if failed.is_failure:
            return _failure(failed, msgspec.json.encode(fields))
    return None


def _quoted(body: bytes) -> str:
    """Return an engine's error text: OpenAI's ``error.message``, or the body."""
    text = body.decode(errors="replace")
    # It could not be encoded again for the client either.
    with contextlib.suppress(*DECODE_ERRORS, TypeError, KeyError):
        text = str(msgspec.json.decode(body)["error"]["message"])
    return text[:_QUOTED_CHARS] or "no text"


def _count(value: Any) -> int:
    """Return a number of tokens; 0 if an engine's answer has none there."""
    return value if type(value) is int and value > 0 else 0


# --- the requests to the two engines ------------------------------------------------


def is_for_two(body: Mapping[str, Any]) -> bool:
    """Return whether two engines can share a request.

    One transfer serves one sequence. A request for the probabilities of the prompt's
    own tokens needs the whole prompt computed, so KV from another engine does not help
    it.
    """
    # An engine may accept "2" or 2.0 as well.
    if any(body.get(key) not in (None, 1) for key in _COPIES):
        return False
    if body.get("prompt_logprobs") is not None:
        return False
    if body.get("echo") and body.get("logprobs") is not None:
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt:
        return isinstance(prompt[0], int) or len(prompt) == 1
    return True


def for_prefill(
    body: dict[str, Any], decode: VllmServer, transfer_id: str, references: References
) -> dict[str, Any]:
    """Return the prefill engine's request: the prompt, and one token to generate."""
    asked = {key: value for key, value in body.items() if key not in _OF_DECODING}
    # Otherwise the first token could end the answer.
    if body.get("min_tokens"):
        asked["min_tokens"] = 1
    asked["max_tokens"] = 1
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    params = kv_params(transfer_id, decode.remote, decode.stages, computed=False)
    params |= {"do_remote_decode": True, "do_remote_prefill": False}
    return asked | {"kv_transfer_params": references.signed(params)}


def for_decode(
    body: dict[str, Any], prefill: VllmServer, transfer_id: str, references: References
) -> dict[str, Any]:
    """Return the decode engine's request: the client's, with a reference to the KV."""
    # The KV is not computed yet; the prompt may wait behind many others.
    params = kv_params(transfer_id, prefill.remote, prefill.stages, computed=False)
    params = references.signed(params)
    return body | {"kv_transfer_params": params}
