"""The proxy's routes: requests of clients, and orders of its operator."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvwire.aio import end_task, start_task
from kvwire.errors import UsageError
from kvwire.observe.listening import ClientMistakes
from kvwire.spi import DECODE_ERRORS
from kvwire.types import is_loopback
from kvwire_vllm.proxy.client import (
    EngineClient,
    EngineFailed,
    EngineResponse,
    headers_of,
)
from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.dispatch import ClientRequest, Dispatcher, Tries
from kvwire_vllm.proxy.engines import VllmEngine
from kvwire_vllm.proxy.events import EVENTS, written
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import PROXY_BODY_BYTES_MAX, PROXY_RUNNING_MAX
from kvwire_vllm.proxy.moving import STAYED, Moves
from kvwire_vllm.proxy.prober import PROBE_S, Prober
from kvwire_vllm.proxy.view import ProxyCollector, ProxyState, TooMany, fleet_view
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
_ASKED_OF_ONE: Final = ("/v1/models", "/version")
_SENT_TO_ONE: Final = ("/tokenize", "/detokenize")
# Fields in which engines get references to each other.
_REFERENCES: Final = ("kv_transfer_params", "ec_transfer_params")
_DRAIN_WAIT_S_MAX: Final = 3600.0
_WHO_OPERATES: Final = (
    "a program on this host sends this, or one with the key of --operator-key-file"
)

T = TypeVar("T")

_server_logger: Final = logging.getLogger("kvwire.vllm.http")
_server_logger.addFilter(ClientMistakes(HttpProcessingError, web.RequestPayloadError))

SERVED: Final[Mapping[str, Any]] = {
    "handler_cancellation": True,  # of requests whose client has gone
    "access_log": None,
    "logger": _server_logger,
}
"""How aiohttp has to serve the application."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """The choices of a proxy's operator; see the options of its command.

    Attributes:
        references: Signs references to prefilled KV with the engines' key.
        running_max: The most requests at once.
        operator_key: The key that operators send; empty for requests of this host only.
        migrate: Whether streams can continue at another engine.
    """

    references: References = UNSIGNED
    running_max: int = PROXY_RUNNING_MAX
    operator_key: bytes = b""
    migrate: bool = False


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
        self._fleet = fleet
        self._settings = settings
        self._discovery = discovery
        self._client = client or EngineClient()
        self._dispatcher = Dispatcher(
            self._client, fleet, references=settings.references
        )
        self._state = ProxyState(
            fleet,
            self._dispatcher,
            settings.running_max,
            discovery,
        )
        self._moves = Moves(
            self._dispatcher, fleet, self._state.moves, migrate=settings.migrate
        )
        self._registry = CollectorRegistry()
        self._registry.register(ProxyCollector(self._state))

    def application(self) -> web.Application:
        """Make aiohttp's application; add :meth:`checking` to its ``cleanup_ctx``."""
        made = web.Application(
            middlewares=[self._answered], client_max_size=PROXY_BODY_BYTES_MAX
        )
        routes = [
            *(web.post(path, self._generate) for path in _SPLIT),
            *(web.get(path, self._pass) for path in _ASKED_OF_ONE),
            *(web.post(path, self._pass) for path in _SENT_TO_ONE),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get("/fleet", self._show),
            web.post("/drain", self._drain),
            web.post("/migrate", self._migrate),
        ]
        made.add_routes(routes)
        return made

    async def checking(self, _: web.Application) -> AsyncIterator[None]:
        """Check and discover engines until the application is cleaned up.

        Cancel safety: whatever ends it, its tasks and connections end with it.
        """
        running = [Prober(self._fleet, self._client).run()]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._client.close)
            if self._discovery is not None:
                stack.push_async_callback(self._discovery.close)
                running.append(self._discovery.watch())
            for work in running:
                task = start_task(work)
                task.add_done_callback(_log_failure)
                stack.push_async_callback(end_task, task)
            yield

    @web.middleware
    async def _answered(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Count answers, and give every error the form of OpenAI's."""
        status = _CLIENT_CLOSED
        try:
            try:
                answer = await handler(request)
            except _REFUSED as exc:
                answer = _refused(exc, request)
            status = answer.status
            return answer
        except ConnectionError:
            # The client has gone. aiohttp would log the error; it drops an answer.
            return web.Response(status=status)
        except Exception:
            status = int(HTTPStatus.INTERNAL_SERVER_ERROR)  # aiohttp logs and sends it
            raise
        finally:
            if request.path in _SPLIT:
                self._state.answered[status] += 1

    # --- requests for engines ---------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        async with AsyncExitStack() as stack:
            # Before the body is read: one may arrive slowly or never.
            stack.enter_context(self._state.place())
            body = await _body(request, dict[str, Any])
            _remove_references(body)
            headers = _passed_on(request)
            asked = ClientRequest(request.path, body, headers, self._fleet.clock())
            self._state.requests[asked] = None  # bounded: PROXY_RUNNING_MAX
            stack.callback(self._state.requests.pop, asked)
            return await _relayed(request, await self._moves.ask(asked, stack))

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        """Pass a request unchanged to one engine."""
        last = EngineFailed(None, self._fleet.why_none())
        tries = Tries()
        with self._state.place():
            content = await request.read() or None
            while (engine := self._fleet.pick_to_answer(tries.engines)) is not None:
                headers = _passed_on(request)
                was_up = engine.is_up
                was_down = bool(engine.down)
                try:
                    async with self._client.ask(
                        engine, request.path, headers, content
                    ) as answer:
                        return await _relayed(request, answer)
                except EngineFailed as exc:
                    if exc.ours or exc.engine is None:
                        raise
                    last = exc
                    await self._dispatcher.look_at(exc)
                    tries.engines.add(engine)  # bounded: engines
                    if not tries.another(exc, was_up=was_up, was_down=was_down):
                        break
        raise last

    # --- what it shows ----------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.StreamResponse:
        if self._fleet.lives():
            return _json({"status": "ok"})
        why = self._fleet.why_none()
        return _json({"status": why}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        headers = {"content-type": CONTENT_TYPE_LATEST}
        return web.Response(body=generate_latest(self._registry), headers=headers)

    async def _show(self, _: web.Request) -> web.StreamResponse:
        return _json(fleet_view(self._state))

    # --- orders of its operator -------------------------------------------------------

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        """Stop sending new requests to an engine, and move its streams if possible.

        Answer when the engine has no requests left, or after ``wait_s``.
        """
        self._check_operator(request)
        wanted = await _body(request, _Drain)
        engine = self._fleet.at(wanted.engine)
        engine.drain(draining=wanted.drain)
        if self._moves.migrate and wanted.drain and wanted.move:
            await self._moves.move(self._at(engine))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wanted.wait_s, _DRAIN_WAIT_S_MAX)):
                await engine.idle()
        status = HTTPStatus.ACCEPTED if engine.running else HTTPStatus.OK
        return _json({"engine": engine.url, "running": engine.running}, status)

    async def _migrate(self, request: web.Request) -> web.StreamResponse:
        """Move one request, or all requests of an engine, to another engine."""
        self._check_operator(request)
        if not self._moves.migrate:
            raise web.HTTPConflict(text="the proxy was started without --migrate")
        wanted = await _body(request, _Migrate)
        to = self._fleet.at(wanted.to) if wanted.to else None
        if not wanted.request:
            moving = self._at(self._fleet.at(wanted.engine))
        elif not (moving := self._moves.named(wanted.request)):
            raise UsageError(
                f"no running request that can move has the id {wanted.request!r}"
            )
        moved = await self._moves.move(moving, to)
        stayed = any(STAYED in one for one in moved)
        status = HTTPStatus.CONFLICT if stayed else HTTPStatus.OK
        return _json({"requests": moved}, status)

    def _at(self, engine: VllmEngine) -> list[ClientRequest]:
        return [asked for asked in self._state.requests if asked.decode is engine]

    def _check_operator(self, request: web.Request) -> None:
        headers = headers_of(request.raw_headers)
        if key := self._settings.operator_key:
            right = b"Bearer " + key.hex().encode()
            shown = headers.get("authorization", "").encode(errors="surrogateescape")
            allowed = hmac.compare_digest(right, shown)
        else:
            # Browsers name the page that makes them send a POST.
            allowed = is_loopback(request.remote or "") and "origin" not in headers
        if not allowed:
            raise web.HTTPForbidden(text=_WHO_OPERATES)


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


async def _body(request: web.Request, kind: type[T]) -> T:
    """Read and decode a body of JSON.

    NaN and lone surrogates are refused: Python's own decoder accepts them, but they
    cannot be encoded again for an engine.
    """
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except DECODE_ERRORS as exc:
        raise UsageError(f"the body is not the expected JSON: {exc}") from None


def _remove_references(body: dict[str, Any]) -> None:
    """Remove references to engines, which only the proxy makes."""
    for name in _REFERENCES:
        body.pop(name, None)
    # vLLM takes them out of this field as well.
    more = body.get("vllm_xargs")
    if isinstance(more, dict):
        body["vllm_xargs"] = {n: v for n, v in more.items() if n not in _REFERENCES}


def _passed_on(request: web.Request) -> dict[str, str]:
    headers = headers_of(request.raw_headers)
    return {n: value for n, value in headers.items() if n in _PASSED_HEADERS}


async def _relayed(request: web.Request, answer: EngineResponse) -> web.StreamResponse:
    """Pass an engine's answer to a client, with the headers that it may see."""
    kept = {
        name: text
        for name, text in answer.headers.items()
        # aiohttp sends no control characters.
        if name in _KEPT_HEADERS and text.isprintable()
    }
    is_events = kept.get("content-type", "").startswith(EVENTS)
    # Without a length, servers send chunks, which HTTP/1.0 clients do not understand. A
    # stream of events keeps no length, because an error may be appended to it.
    if is_events or not kept.get("content-length", "").isdecimal():
        kept.pop("content-length", None)
    response = web.StreamResponse(status=answer.status, headers=kept)
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    try:
        async for part in answer.parts:
            await response.write(part)
    except EngineFailed as exc:
        logger.warning("an answer was cut off: %s", exc)
        if not is_events:
            # The client notices, since the answer is incomplete.
            if request.transport is not None:
                request.transport.close()
            return response
        why = f"the engine broke off: {exc.why}" if exc.engine else exc.why
        error = written(openai_error(HTTPStatus.BAD_GATEWAY, why))
        # The last part sent may have ended in the middle of an event.
        await response.write(b"\n\n" + error + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


# --- answers of the proxy itself ------------------------------------------------------


def openai_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "EngineError"
    return {
        "error": {"message": message, "type": kind, "param": None, "code": int(status)}
    }


def _json(
    body: Any, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> web.Response:
    kind = {"content-type": "application/json"} | dict(headers or {})
    content = msgspec.json.encode(body)
    return web.Response(body=content, status=int(status), headers=kind)


# What a handler raises instead of answering.
_REFUSED: Final = (
    web.HTTPException,
    web.RequestPayloadError,
    EngineFailed,
    TooMany,
    UsageError,
)
# Seconds, after which engines have been checked again.
_SOON: Final = str(math.ceil(PROBE_S))


def _refused(exc: Exception, request: web.Request) -> web.Response:
    """Return the error answer for an exception."""
    status = int(HTTPStatus.BAD_REQUEST)
    why = str(exc)
    headers: dict[str, str] = {}
    match exc:
        case web.HTTPException():
            status = exc.status
            why = exc.text or exc.reason
            if "allow" in exc.headers:
                headers["allow"] = exc.headers["allow"]
            if isinstance(exc, web.HTTPNotFound):
                why = f"{request.path} is not passed to engines; send it to one"
        case TooMany():
            status = HTTPStatus.TOO_MANY_REQUESTS
            headers["retry-after"] = _SOON
        case EngineFailed():
            status = exc.status or HTTPStatus.SERVICE_UNAVAILABLE
            why = exc.why
            if exc.status is None:
                headers["retry-after"] = _SOON
            elif exc.retry_after.isdecimal():
                headers["retry-after"] = exc.retry_after
    return _json(openai_error(status, why), status, headers)
