"""Sends a request to two engines, and retries until an answer begins.

::

    at once       prefill and decode get the request together; decode waits for the KV
    in sequence   decode gets the request once prefill has answered
    alone         no prefill engine is up, and decode computes the prompt itself; or no
                  decode engine is up, and a prefill engine answers

If a prefill engine fails before the answer has begun, the request is retried. First the
decode request of the failed try is cancelled, so that it does not wait for KV that will
not come. The same holds for a decode engine that cannot be reached, or that answers
with a failure. Once the answer has begun, it is passed to the client, and an engine
that dies then cuts it off. A 4xx answer of either engine is passed to the client too:
the request is at fault, and another engine would give the same answer.

Retries are paid from a budget that all requests share. When it is spent, the next try
uses a single healthy engine, and engines that are down are no longer tried. A request
on which two previously healthy engines have failed is not retried, since it may be the
cause.
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

from kvwire.aio import end_task
from kvwire.wire.control import DECODE_ERRORS
from kvwire_vllm.announce import DECODE, PREFILL
from kvwire_vllm.metadata import answer as kv_params
from kvwire_vllm.proxy.admission import RetryBudget
from kvwire_vllm.proxy.client import (
    SLOW_S,
    EngineClient,
    EngineFailed,
    EngineResponse,
)
from kvwire_vllm.proxy.engines import VllmEngine, VllmServer
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import (
    PROXY_BODY_BYTES_MAX,
    PROXY_EVENT_BYTES_MAX,
    PROXY_FAILED_ON_MAX,
    PROXY_HEALTH_BYTES_MAX,
)
from kvwire_vllm.proxy.policy import IN_SEQUENCE
from kvwire_vllm.references import UNSIGNED, References

logger: logging.Logger = logging.getLogger("kvwire.vllm")

COMPLETIONS: Final = "/v1/completions"
# Decoding options that make no sense for a prefill with one token.
_OF_DECODING: Final = ("stream", "stream_options", "min_tokens", "n", "best_of")
_COPIES: Final = ("n", "best_of")
EVENTS: Final = "text/event-stream"
# The last event of a stream; white space may follow it.
_DONE: Final = b"[DONE]"
_DATA: Final = b"data: "
_ERROR: Final = b'data: {"error"'
_END_BYTES: Final = 64
# Headers by which a client can detect the end of an answer.
FRAMES: Final = frozenset(("content-length", "transfer-encoding"))
# How decode names the location of a prompt's KV if prefill does not report it.
_NOT_SENT: Final[dict[str, Any]] = {}
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
    method: str = "POST"  # the HTTP method
    # The body of a request that is passed unchanged to one engine; None for any other.
    content: bytes | None = None
    query: str = ""  # the URL's query, with its question mark
    # The raw bytes of large fields, which are passed to engines unchanged.
    large: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    waits_for: str = "its turn"  # the event it is waiting for
    engines: tuple[str, ...] = ()  # URLs of its engines
    decode: VllmEngine | None = None  # the engine that answers
    # Limits of its engines' configuration, in tokens of an answer; 0 without one. The
    # first one is for requests that set no limit themselves.
    answer_tokens: int = 0
    answer_tokens_max: int = 0

    def sent(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body for an engine, with large fields as the client sent them."""
        kept = {
            name: raw
            for name, raw in self.large.items()
            if name in body and body[name] is self.body.get(name)
        }
        return body | kept


class Dispatcher:
    """Sends requests to engines."""

    def __init__(
        self,
        client: EngineClient,
        fleet: EngineFleet,
        *,
        order: str,
        references: References = UNSIGNED,
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._order = order
        self._references = references
        # Pays for retries.
        self.budget: RetryBudget = RetryBudget(fleet.clock)

    async def ask(self, asked: ClientRequest, stack: AsyncExitStack) -> EngineResponse:
        """Get a request answered; return once the first part of the answer is here.

        Cancel safety: safe; the requests to both engines are cancelled.
        """
        self.budget.deposit()
        tried: set[VllmEngine] = set()
        failed_on = 0
        alone = False
        last = EngineFailed(None, "no engine takes requests")
        # Reasons by role, since clients must not learn engines' addresses.
        whys: dict[str, None] = {}
        while (decode := self._fleet.pick_to_answer(asked.body, tried)) is not None:
            now = self._fleet.clock()
            # If no engine was reached, another try costs no engine any work.
            if tried and (last.reached or decode.is_down(now)):
                alone = not self.budget.spend()
                if alone and decode.is_down(now):
                    break
            prefill = None
            if not alone:
                prefill = await self._pick_prefill(asked, decode, tried, last)
            asked.engines = (decode.url,)
            asked.decode = decode
            well = {one for one in (prefill, decode) if one and one.is_up(now)}
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
            failing = decode if last.engine is None else last.engine
            tried.add(failing)  # bounded: engines, and so is the next
            whys[f"{failing.role}: {last.why}"] = None
            failing.failed += 1
            if last.down:
                self._fleet.down(failing)
                failed_on += last.reached and failing in well
            if failed_on == PROXY_FAILED_ON_MAX:
                last.status = last.status or HTTPStatus.BAD_GATEWAY
                break
        if whys:
            last.why = f"no engine has answered: {'; '.join(whys)}"
        raise last

    async def _pick_prefill(
        self,
        asked: ClientRequest,
        decode: VllmEngine,
        tried: set[VllmEngine],
        last: EngineFailed,
    ) -> VllmEngine | None:
        """Return the engine that computes the prompt; None if `decode` computes it."""
        if asked.content is not None or not decode.does(DECODE):
            return None
        if not is_for_two(asked.body):
            return None
        out = {decode, *tried}
        while engine := self._fleet.pick(PREFILL, asked.body, out, decode.model):
            if not await self._broke_with(last, engine):
                return engine
            out.add(engine)  # bounded: engines
        return None

    async def _broke_with(self, last: EngineFailed, engine: VllmEngine) -> bool:
        """Return whether an engine had already failed before it got this request.

        Otherwise the request would be suspected of breaking an engine that was already
        broken.
        """
        if last.engine is None or last.status is None or last.engine.role != PREFILL:
            return False
        try:
            async with (
                asyncio.timeout(SLOW_S),
                self._client.ask(engine, "/health") as response,
            ):
                await response.body(PROXY_HEALTH_BYTES_MAX)
        except (EngineFailed, TimeoutError):
            return False  # ask_once will notice and report it
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._fleet.down(engine)
            return True
        return False

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
        # In sequence, prefill reports where the KV is once it has computed it.
        in_sequence = self._order == IN_SEQUENCE
        name = "" if in_sequence else secrets.token_hex(16)
        named = name, self._references
        body = for_prefill(asked.body, to.server, *named)
        computed = asyncio.ensure_future(self._compute(source, asked, body))
        # Its answer comes at about the same time as decode's, and is not cancelled
        # then.
        attempt.push_async_callback(end_task, computed)
        body = for_decode(asked.body, source.server, *named)
        asked.engines = (source.url, to.url)
        params: Any = None
        if in_sequence:
            asked.waits_for = "the prompt's KV"
            prompt = await computed
            if prompt.response.is_error:
                return prompt.response
            params = prompt.params or _NOT_SENT
            # Prefill itself knows which of its ranks has the KV, and where.
            body["kv_transfer_params"] = params
        found = None
        if params != _NOT_SENT:
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
            self.budget.spend()  # paid like any other try on a single engine
            found = None
        if found is None or found.engine is not engine:
            await end_task(answer)
            await waiting.aclose()
        return found

    async def _compute(
        self, engine: VllmEngine, asked: ClientRequest, body: dict[str, Any]
    ) -> _Computed:
        """Let an engine compute a prompt; return its answer, and where the KV is."""
        with engine.at_work():
            async with self._client.ask(
                engine, asked.path, asked.headers, asked.sent(body)
            ) as response:
                content = await response.body(PROXY_EVENT_BYTES_MAX)
        if response.is_failure:
            raise _failure(response, content)
        response.parts = _Chained(content)  # this releases its connection
        # Python's decoder would accept half of a surrogate pair, which cannot be
        # encoded again for decode.
        with contextlib.suppress(*DECODE_ERRORS, AttributeError):
            fields = msgspec.json.decode(content)
            params = fields.get("kv_transfer_params")
            if response.is_error or not isinstance(params, dict):
                return _Computed(response, _NOT_SENT)
            asked.answer_tokens = _count(params.get("answer_tokens"))
            asked.answer_tokens_max = _count(params.get("answer_tokens_max"))
            named = body["kv_transfer_params"]["transfer_id"]
            # Decode would wait in vain for a prompt of another connector, unless it has
            # that connector too and gets the request after prefill's answer.
            if named and params.get("transfer_id") != named:
                params = _NOT_SENT
            return _Computed(response, params)
        return _Computed(response, None)

    async def _answer(
        self,
        engine: VllmEngine,
        asked: ClientRequest,
        body: dict[str, Any],
        attempt: AsyncExitStack,
    ) -> EngineResponse:
        asked.waits_for = "the first token"
        attempt.enter_context(engine.at_work())
        path = asked.path + asked.query
        sent = asked.sent(body) if asked.content is None else asked.content
        response = await attempt.enter_async_context(
            self._client.ask(engine, path, asked.headers, sent, asked.method)
        )
        if response.is_failure:
            raise _failure(response, await response.body(PROXY_EVENT_BYTES_MAX))
        # Headers are sent before the first token, so they are not an answer yet.
        first = await _begun(response, passed=asked.content is not None)
        response.parts = _Chained(first, response.parts)
        return response


@dataclass(frozen=True, slots=True)
class _Computed:
    """Prefill's answer."""

    response: EngineResponse
    params: dict[str, Any] | None  # where the KV is; None if it cannot be parsed


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


async def _begun(response: EngineResponse, *, passed: bool) -> bytes:
    """Return the first part of an answer; raise if the answer is truncated.

    HTTP marks the end of an answer by a length or by chunks. An answer with neither
    looks complete even if its engine has died, so its content must show the end. For
    requests that are passed unchanged, only JSON answers are checked.
    """
    kind = response.headers.get("content-type", "")
    if response.is_error or (passed and not kind.startswith("application/json")):
        return await anext(response.parts, b"")
    if kind.startswith(EVENTS):
        response.parts = _Stream(response.engine, response.parts)
        first = await anext(response.parts, b"")
        if failed := _failed_at_once(response, first):
            raise failed
        return first
    if not FRAMES & response.headers.keys():
        content = await response.body(PROXY_BODY_BYTES_MAX)
        try:
            msgspec.json.decode(content)
        except DECODE_ERRORS:
            raise EngineFailed(response.engine, "its answer is incomplete") from None
        return content
    return await anext(response.parts, b"")


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
            if self.last.rstrip().endswith(_DONE):
                raise
            raise EngineFailed(self.engine, "its stream is incomplete") from None
        self.last = (self.last + part)[-_END_BYTES:]
        return part


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
        if prompt.response.is_error:
            return prompt.response
        if prompt.params == _NOT_SENT:
            return None
        await asyncio.wait((answer,))
    return answer.result()


def _failure(response: EngineResponse, content: bytes) -> EngineFailed:
    """Return the error for an answer with a status of 500 or above.

    If the engine has no room, or is about to exit, the request is not to blame.
    """
    reached = response.status != HTTPStatus.SERVICE_UNAVAILABLE
    failed = EngineFailed(
        response.engine, _quoted(content), response.status, reached=reached
    )
    failed.retry_after = response.headers.get("retry-after", "")
    return failed


def _failed_at_once(response: EngineResponse, event: bytes) -> EngineFailed | None:
    """Return the error if a stream begins with an error event."""
    if not event.startswith(_ERROR):
        return None
    content = event.removeprefix(_DATA).partition(b"\n")[0]
    with contextlib.suppress(*DECODE_ERRORS, TypeError, KeyError, ValueError):
        status = HTTPStatus(msgspec.json.decode(content)["error"]["code"])
        failed = dataclasses.replace(response, status=status)
        return _failure(failed, content) if failed.is_failure else None
    return None


def _quoted(body: bytes) -> str:
    """Return an engine's error text: OpenAI's ``error.message``, or the body."""
    text = body.decode(errors="replace")
    # It could not be encoded again for the client either.
    with contextlib.suppress(*DECODE_ERRORS, TypeError, KeyError):
        text = str(msgspec.json.decode(body)["error"]["message"])
    return text[:_QUOTED_CHARS] or "no text"


# --- the requests to the two engines ------------------------------------------------


def limit_of(path: str, body: Mapping[str, Any]) -> Any:
    """Return a request's token limit; None if it sets none."""
    newer = None if path == COMPLETIONS else body.get("max_completion_tokens")
    return body.get("max_tokens") if newer is None else newer


def _count(value: Any) -> int:
    """Return a number of tokens; 0 if an engine's answer has none there."""
    return value if type(value) is int and value > 0 else 0


def is_for_two(body: dict[str, Any]) -> bool:
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


def without_decoding(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for the same prompt and one token."""
    asked = {key: value for key, value in body.items() if key not in _OF_DECODING}
    # Otherwise the first token could end the answer.
    if body.get("min_tokens"):
        asked["min_tokens"] = 1
    asked["max_tokens"] = 1
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    return asked


def for_prefill(
    body: dict[str, Any], decode: VllmServer, transfer_id: str, references: References
) -> dict[str, Any]:
    """Return the prefill engine's request: the prompt, and one token to generate."""
    asked = without_decoding(body)
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
