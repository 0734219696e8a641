"""The proxy's routes: requests of clients, and orders of its operator."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvwire.aio import end_task, start_task
from kvwire.errors import UsageError
from kvwire.limits import KIB
from kvwire.types import is_loopback
from kvwire_vllm.proxy.admission import Admission, TooMany
from kvwire_vllm.proxy.body import Refused, decoded, read_body
from kvwire_vllm.proxy.client import (
    PROBE_S,
    EngineClient,
    EngineFailed,
    EngineResponse,
    Prober,
    headers_of,
)
from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.dispatch import ClientRequest, Dispatcher
from kvwire_vllm.proxy.engines import VllmEngine
from kvwire_vllm.proxy.events import EVENTS, written
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import (
    PROXY_BODY_BYTES_MAX,
    PROXY_BODY_BYTES_PER_S,
    PROXY_BODY_S,
    PROXY_ORDER_BYTES_MAX,
    PROXY_UNREAD_S,
)
from kvwire_vllm.proxy.moving import STAYED, Moves
from kvwire_vllm.proxy.policy import AT_ONCE
from kvwire_vllm.proxy.stopping import Ending
from kvwire_vllm.proxy.view import ProxyCollector, ProxyState, fleet_view
from kvwire_vllm.proxy.web_pages import why_foreign
from kvwire_vllm.references import UNSIGNED, References

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# Request headers that are passed to engines. The others concern one connection, or are
# meant for the proxy.
_PASSED_HEADERS: Final = (
    "authorization",
    "x-request-id",
    "traceparent",
    "tracestate",
)
# Answer headers that are passed to clients.
_KEPT_HEADERS: Final = (
    "content-type",
    "content-encoding",
    "content-length",
    "x-request-id",
    "retry-after",
    "www-authenticate",
)
_SPLIT: Final = ("/v1/completions", "/v1/chat/completions")
# Answered by any engine that decodes. Engines have other paths, which put them to
# sleep, load adapters or run code.
_OF_ONE_ENGINE: Final = {
    "/v1/models": ("GET", "HEAD"),
    "/version": ("GET", "HEAD"),
    "/tokenize": ("POST",),
    "/detokenize": ("POST",),
}
# Control characters, which aiohttp refuses to send.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# Fields in which engines get references to each other.
_REFERENCES: Final = ("kv_transfer_params", "ec_transfer_params")
_LARGE_BYTES: Final = 64 * KIB
_DRAIN_WAIT_S_MAX: Final = 3600.0
_OTHER_SITES: Final = "start the proxy with --operator-key-file"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """The choices of a proxy's operator; see the options of its command.

    Attributes:
        order: Whether both engines get a request at once, or decode after prefill.
        references: Signs references to prefilled KV with the engines' key.
        admission: Limits the requests at once; by default the usual limits.
        operator_key: The key that operators send; empty for requests of this host only.
        migrate: Whether streams can continue at another engine.
        body_s: The seconds that every body has to arrive.
        body_bytes_per_s: The rate that gives a body more time.
        unread_s: The seconds after which a client that reads nothing is cut.
    """

    order: str = AT_ONCE
    references: References = UNSIGNED
    admission: Admission | None = None
    operator_key: bytes = b""
    migrate: bool = False
    body_s: float = PROXY_BODY_S
    body_bytes_per_s: float = PROXY_BODY_BYTES_PER_S
    unread_s: float = PROXY_UNREAD_S


class ProxyApp:
    """Answers HTTP requests."""

    def __init__(
        self,
        fleet: EngineFleet,
        settings: ProxySettings,
        *,
        discovery: Discovery | None = None,
        client: EngineClient | None = None,
    ) -> None:
        self.ending: Ending = Ending()
        self._fleet = fleet
        self._settings = settings
        self._discovery = discovery
        self._client = client or EngineClient()
        self._dispatcher = Dispatcher(
            self._client, fleet, order=settings.order, references=settings.references
        )
        self._state = ProxyState(
            fleet,
            settings.admission or Admission(),
            self._dispatcher.budget,
            lambda: discovery.ignored if discovery else 0,
        )
        self._moves = Moves(
            self._dispatcher, fleet, self._state.moves, migrate=settings.migrate
        )
        self._registry = CollectorRegistry()
        self._registry.register(ProxyCollector(self._state))
        self._decoding = asyncio.Lock()
        self._read = partial(
            read_body,
            body_s=settings.body_s,
            bytes_per_s=settings.body_bytes_per_s,
        )
        read = ("GET", "HEAD")
        write = ("POST",)
        self._routes: dict[str, tuple[tuple[str, ...], _Handler]] = {
            **dict.fromkeys(_SPLIT, (write, self._generate)),
            **{path: (own, self._pass) for path, own in _OF_ONE_ENGINE.items()},
            "/health": (read, self._health),
            "/metrics": (read, self._metrics),
            "/fleet": (read, self._show),
            "/drain": (write, self._drain),
            "/migrate": (write, self._migrate),
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check and discover engines while the block is open.

        Cancel safety: whatever ends the block, its tasks and connections end with it.
        """
        prober = Prober(self._fleet, self._client)
        running = [prober.run()]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._client.close)
            stack.push_async_callback(self._dispatcher.close)
            if self._discovery is not None:
                self._discovery.wake = prober.wake
                stack.push_async_callback(self._discovery.close)
                running.append(self._discovery.watch())
            for work in running:
                task = start_task(work)
                task.add_done_callback(_log_failure)
                stack.push_async_callback(end_task, task)
            yield

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request.

        Cancel safety: safe, its requests to engines are cancelled.
        """
        status: int = _CLIENT_CLOSED
        try:
            async with AsyncExitStack() as stack:
                try:
                    answer = await self._handler(request)(request, stack)
                except (Refused, TooMany, EngineFailed, UsageError) as exc:
                    answer = _refused(exc)
                status = answer.status
            return answer
        finally:
            if request.path in _SPLIT:
                self._state.answered[status] += 1

    def _handler(self, request: web.BaseRequest) -> _Handler:
        path = request.path
        if path not in self._routes:
            why = f"{path} is not passed to engines; send it to one directly"
            raise Refused(HTTPStatus.NOT_FOUND, why)
        methods, handler = self._routes[path]
        if request.method not in methods:
            why = f"{path} takes {methods[0]}, not {request.method}"
            allow = {"allow": ", ".join(methods)}
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, why, allow)
        return handler

    # --- requests for engines ---------------------------------------------------------

    async def _generate(
        self, request: web.BaseRequest, stack: AsyncExitStack
    ) -> web.StreamResponse:
        # Before the body is read, so that the limits also apply to requests whose body
        # arrives slowly or never.
        take = stack.enter_context(self._state.admission.place())
        content = await self._read(request, PROXY_BODY_BYTES_MAX, take)
        # Otherwise bodies that arrive together would also be decoded together.
        async with self._decoding:
            body = decoded(content, dict[str, Any])
            if len(content) > _LARGE_BYTES:
                await asyncio.sleep(0)
        del content
        _remove_references(body)
        headers = _passed_on(request)
        asked = ClientRequest(request.path, body, headers, self._fleet.clock())
        self._state.requests[asked] = None  # bounded: PROXY_RUNNING_MAX
        stack.callback(self._state.requests.pop, asked)
        async with self.ending.limits():
            answer = await self._moves.ask(asked, stack)
        return await self._relayed(request, answer)

    async def _pass(
        self, request: web.BaseRequest, stack: AsyncExitStack
    ) -> web.StreamResponse:
        """Pass a request unchanged to one engine."""
        take = stack.enter_context(self._state.admission.place())
        content = await self._read(request, PROXY_BODY_BYTES_MAX, take)
        last = EngineFailed(None, self._fleet.why_none())
        tried: set[VllmEngine] = set()
        while (engine := self._fleet.pick_to_answer({}, tried)) is not None:
            try:
                async with self.ending.limits():
                    answer = await stack.enter_async_context(
                        self._client.ask(
                            engine, request.path, _passed_on(request), content or None
                        )
                    )
            except EngineFailed as exc:
                if exc.ours or exc.engine is None:
                    raise
                last = exc
                await self._dispatcher.look_at(exc)
                tried.add(engine)  # bounded: engines
            else:
                return await self._relayed(request, answer)
        raise last

    async def _relayed(
        self, request: web.BaseRequest, answer: EngineResponse
    ) -> web.StreamResponse:
        """Pass an engine's answer to a client, with the headers that it may see."""
        kept = {n: text for n, text in answer.headers.items() if n in _KEPT_HEADERS}
        is_events = kept.get("content-type", "").startswith(EVENTS)
        # Without a length, servers send chunks, which HTTP/1.0 clients do not
        # understand. A stream of events keeps no length, because an error may be
        # appended to it.
        if is_events or not kept.get("content-length", "").isdecimal():
            kept.pop("content-length", None)
        response = web.StreamResponse(status=answer.status, headers=sendable(kept))
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        try:
            async with aclosing(_parts(answer, self.ending, is_events)) as parts:
                async for part in parts:
                    async with asyncio.timeout(self._settings.unread_s):
                        await response.write(part)
            async with asyncio.timeout(self._settings.unread_s):
                await response.write_eof()
        except EngineFailed:
            # The client notices, since the answer is incomplete.
            if request.transport is not None:
                request.transport.close()
        except TimeoutError:
            logger.warning(
                "closed the connection of a client that read nothing for %g s",
                self._settings.unread_s,
            )
            if request.transport is not None:
                request.transport.abort()
        return response

    # --- what it shows ----------------------------------------------------------------

    async def _health(self, *_: object) -> web.StreamResponse:
        if self._fleet.lives():
            return _json({"status": "ok"})
        why = self._fleet.why_none()
        return _json({"status": why}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, *_: object) -> web.StreamResponse:
        headers = sendable({"content-type": CONTENT_TYPE_LATEST})
        return web.Response(body=generate_latest(self._registry), headers=headers)

    async def _show(self, *_: object) -> web.StreamResponse:
        return _json(fleet_view(self._state))

    # --- orders of its operator -------------------------------------------------------

    async def _drain(self, request: web.BaseRequest, _: object) -> web.StreamResponse:
        """Stop sending new requests to an engine, and move its streams if possible.

        Answer when the engine has no requests left, or after ``wait_s``.
        """
        self._check_operator(request)
        wanted = decoded(await self._read(request, PROXY_ORDER_BYTES_MAX), _Drain)
        engine = self._fleet.at(wanted.engine)
        engine.drain(draining=wanted.drain)
        if self._moves.migrate and wanted.drain and wanted.move:
            async with self.ending.limits():
                await self._moves.move(self._at(engine))
        with contextlib.suppress(TimeoutError):
            wait_s = min(wanted.wait_s, _DRAIN_WAIT_S_MAX)
            async with self.ending.limits(), asyncio.timeout(wait_s):
                await engine.idle()
        status = HTTPStatus.ACCEPTED if engine.running else HTTPStatus.OK
        return _json({"engine": engine.url, "running": engine.running}, status)

    async def _migrate(self, request: web.BaseRequest, _: object) -> web.StreamResponse:
        """Move one request, or all requests of an engine, to another engine."""
        self._check_operator(request)
        if not self._moves.migrate:
            why = "the proxy was started without --migrate"
            raise Refused(HTTPStatus.CONFLICT, why)
        wanted = decoded(await self._read(request, PROXY_ORDER_BYTES_MAX), _Migrate)
        to = self._fleet.at(wanted.to) if wanted.to else None
        if not wanted.request:
            moving = self._at(self._fleet.at(wanted.engine))
        elif not (moving := self._moves.named(wanted.request)):
            why = f"no running request that can move has the id {wanted.request!r}"
            raise Refused(HTTPStatus.NOT_FOUND, why)
        async with self.ending.limits():
            moved = await self._moves.move(moving, to)
        stayed = any(STAYED in one for one in moved)
        status = HTTPStatus.CONFLICT if stayed else HTTPStatus.OK
        return _json({"requests": moved}, status)

    def _at(self, engine: VllmEngine) -> list[ClientRequest]:
        return [asked for asked in self._state.requests if asked.decode is engine]

    def _check_operator(self, request: web.BaseRequest) -> None:
        headers = headers_of(request.raw_headers)
        if key := self._settings.operator_key:
            right = b"Bearer " + key.hex().encode()
            shown = headers.get("authorization", "").encode(errors="surrogateescape")
            allowed = hmac.compare_digest(right, shown)
        else:
            allowed = is_loopback(request.remote or "")
            if allowed and (why := why_foreign(headers, _OTHER_SITES)):
                raise Refused(HTTPStatus.FORBIDDEN, why)
        if not allowed:
            why = "send it from this host, or with the operator's key"
            raise Refused(HTTPStatus.FORBIDDEN, why)


_Handler: TypeAlias = Callable[
    [web.BaseRequest, AsyncExitStack], Awaitable[web.StreamResponse]
]
# nginx's status for a client that closed its connection; there is no standard one.
_CLIENT_CLOSED: Final = 499


class _Drain(msgspec.Struct):
    engine: str
    drain: bool = True
    wait_s: float = 0.0
    move: bool = True


class _Migrate(msgspec.Struct):
    engine: str = ""
    request: str = ""
    to: str = ""


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log the error of a plug-in by which work has ended that should never end."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("the discovery of engines has failed", exc_info=task.exception())


def _remove_references(body: dict[str, Any]) -> None:
    """Remove references to engines, which only the proxy makes."""
    for name in _REFERENCES:
        body.pop(name, None)
    # vLLM takes them out of this field as well.
    more = body.get("vllm_xargs")
    if isinstance(more, dict):
        body["vllm_xargs"] = {n: v for n, v in more.items() if n not in _REFERENCES}


def _passed_on(request: web.BaseRequest) -> dict[str, str]:
    headers = headers_of(request.raw_headers)
    return {n: value for n, value in headers.items() if n in _PASSED_HEADERS}


async def _parts(
    answer: EngineResponse, ending: Ending, is_events: bool
) -> AsyncGenerator[bytes]:
    """Yield the parts of an answer; an error ends a stream of events as an event."""
    try:
        while True:
            async with ending.limits():
                part = await anext(answer.parts, None)
            if part is None:
                return
            yield part
    except EngineFailed as exc:
        logger.warning("an answer was cut off: %s", exc)
        if not is_events:
            raise
        why = f"the engine broke off: {exc.why}" if exc.engine else exc.why
        error = openai_error(HTTPStatus.BAD_GATEWAY, why)
        # The last part sent may have ended in the middle of an event.
        yield b"\n\n" + written(error) + b"data: [DONE]\n\n"


# --- answers of the proxy itself ------------------------------------------------------


def openai_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "EngineError"
    return {
        "error": {"message": message, "type": kind, "param": None, "code": int(status)}
    }


def error_answer(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an error answer in OpenAI's form."""
    return _json(openai_error(status, message), status, headers)


def sendable(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers that aiohttp can send, with the server's name.

    Otherwise aiohttp sends its version and Python's.
    """
    texts = {
        name: value.encode(errors="surrogateescape").decode(errors="replace")
        for name, value in headers.items()
        if not _CONTROLS.search(value)
    }
    return {"server": "kvwire"} | texts


def _json(
    body: Any, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> web.Response:
    kind = {"content-type": "application/json"} | dict(headers or {})
    content = msgspec.json.encode(body)
    return web.Response(body=content, status=int(status), headers=sendable(kind))


def _refused(exc: Exception) -> web.Response:
    """Return the error answer for an exception."""
    status = int(HTTPStatus.BAD_REQUEST)
    why = exc.why if isinstance(exc, EngineFailed) else str(exc)
    headers: dict[str, str] = {}
    match exc:
        case Refused():
            status = exc.status
            headers |= exc.headers
        case TooMany():
            status = HTTPStatus.TOO_MANY_REQUESTS
            headers["retry-after"] = _SOON
        case EngineFailed(status=None):
            status = HTTPStatus.SERVICE_UNAVAILABLE
            headers["retry-after"] = _SOON
        case EngineFailed(status=int(status)):
            if exc.retry_after.isdecimal():
                headers["retry-after"] = exc.retry_after
    return error_answer(status, why, headers)


# Seconds, after which engines have been checked again.
_SOON: Final = str(math.ceil(PROBE_S))
