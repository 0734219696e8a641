"""The HTTP side of the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec

from kvwire.directory.base import ended
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.integrations.vllm.announce import DECODE
from kvwire.integrations.vllm.proxy.admission import Admission, QueueFull
from kvwire.integrations.vllm.proxy.client import (
    PROBE_S,
    EngineClient,
    EngineFailed,
    EngineResponse,
    Prober,
)
from kvwire.integrations.vllm.proxy.discovery import Discovery
from kvwire.integrations.vllm.proxy.dispatch import ClientRequest, Dispatcher
from kvwire.integrations.vllm.proxy.engines import VllmEngine
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.integrations.vllm.proxy.moving import STAYED, Moves
from kvwire.integrations.vllm.proxy.stopping import Ending
from kvwire.integrations.vllm.proxy.view import ProxyCollector, ProxyState, fleet_view
from kvwire.integrations.vllm.references import UNSIGNED, References
from kvwire.limits import PROXY_BODY_BYTES_MAX
from kvwire.types import in_bytes, is_loopback
from kvwire.wire.control import DECODE_ERRORS

with needed_by("the proxy", extra="vllm"):
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# Of a request's headers; the others are about one hop of it, or the client's own.
_PASSED_HEADERS: Final = ("authorization", "x-request-id", "traceparent", "tracestate")
# Of an answer's, likewise.
_KEPT_HEADERS: Final = ("content-type", "x-request-id")
# A server or a client of HTTP takes them in a header, and another does not send them.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_EVENTS: Final = "text/event-stream"
# What nginx notes where a client has closed the connection; there is no standard one.
_CLIENT_CLOSED: Final = 499
_DRAIN_WAIT_S_MAX: Final = 3600.0


def make_app(  # noqa: PLR0913 - each is an option of the command, or of a test
    fleet: EngineFleet,
    *,
    order: str,
    references: References = UNSIGNED,
    admission: Admission | None = None,
    discovery: Discovery | None = None,
    operator_key: bytes = b"",
    migrate: bool = False,
    client: EngineClient | None = None,
    ending: Ending | None = None,
) -> Starlette:
    """Return the application."""
    client = client or EngineClient()
    dispatcher = Dispatcher(client, fleet, order=order, references=references)
    prober = Prober(fleet, client)
    running = [prober.run]
    if discovery is not None:
        discovery.wake = prober.wake
        running.append(discovery.watch)
    state = ProxyState(
        fleet,
        admission or Admission(),
        dispatcher.budget,
        lambda: discovery.ignored if discovery else 0,
    )
    moves = Moves(dispatcher, fleet, state.moves) if migrate else None
    registry = CollectorRegistry()
    registry.register(ProxyCollector(state))
    ending = ending or Ending()
    front = _Front(dispatcher, state, operator_key, moves, registry, ending)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            stack.push_async_callback(fleet.close)
            if discovery is not None:
                stack.push_async_callback(discovery.close)
            for work in running:
                stack.push_async_callback(ended, _started(work()))
            yield

    return Starlette(
        routes=[
            Route("/v1/completions", front.generate, methods=["POST"]),
            Route("/v1/chat/completions", front.generate, methods=["POST"]),
            Route("/v1/models", front.models),
            Route("/health", front.health),
            Route("/metrics", front.metrics),
            Route("/fleet", front.fleet),
            Route("/drain", front.drain, methods=["POST"]),
            Route("/migrate", front.migrate, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys(
            (HTTPException, EngineFailed, UsageError), _refused
        ),
        lifespan=lifespan,
    )


def _started(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start what goes on for ever; its end is an error of a plug-in."""
    task = asyncio.create_task(work)

    def say_why(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("no engine is found any more", exc_info=task.exception())

    task.add_done_callback(say_why)
    return task


@dataclass(frozen=True, slots=True)
class _Front:
    """Answers the routes of the proxy."""

    dispatcher: Dispatcher
    state: ProxyState
    operator_key: bytes
    moves: Moves | None
    registry: CollectorRegistry
    ending: Ending

    async def generate(self, request: Request) -> Response:
        try:
            response = await self._generated(request)
        except (HTTPException, QueueFull, EngineFailed) as exc:
            response = await _refused(request, exc)
        self.state.answered[response.status_code] += 1
        return response

    async def _generated(self, request: Request) -> Response:
        body = await _read(request, dict[str, Any])
        # Engines hear of each other from us alone.
        body.pop("kv_transfer_params", None)
        headers, since = _passed_on(request), self.state.fleet.clock()
        asked = ClientRequest(request.url.path, body, headers, since)
        return await _unless_gone(request, partial(self._asked, asked), self.ending)

    async def models(self, request: Request) -> Response:
        asked = ClientRequest("/v1/models", {}, _passed_on(request), method="GET")
        ask = partial(self.dispatcher.ask, asked)
        return await _unless_gone(request, ask, self.ending)

    async def health(self, _: Request) -> Response:
        if self.state.fleet.lives(DECODE):
            return JSONResponse({"status": "ok"})
        why = "no decode engine lives"
        return JSONResponse({"status": why}, status_code=HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def fleet(self, _: Request) -> Response:
        return JSONResponse(fleet_view(self.state))

    async def drain(self, request: Request) -> Response:
        """Send an engine no new request, and what it has elsewhere if that can move.

        The answer comes when it has none, or in ``wait_s``.
        """
        self._check_operator(request)
        wanted = await _read(request, _Drain)
        engine = self.state.fleet.drain(wanted.engine, draining=wanted.drain)
        if self.moves is not None and wanted.drain and wanted.move:
            async with self.ending.limits():
                await self.moves.move(self._at(engine))
        with contextlib.suppress(TimeoutError):
            wait_s = min(wanted.wait_s, _DRAIN_WAIT_S_MAX)
            async with self.ending.limits(), asyncio.timeout(wait_s):
                await engine.idle()
        status = HTTPStatus.ACCEPTED if engine.running else HTTPStatus.OK
        said = {"engine": engine.url, "running": engine.running}
        return JSONResponse(said, status_code=status)

    async def migrate(self, request: Request) -> Response:
        """Have a request, or all of an engine, go on at another one."""
        self._check_operator(request)
        if self.moves is None:
            why = "the proxy was started without --migrate"
            raise HTTPException(HTTPStatus.CONFLICT, why)
        wanted = await _read(request, _Migrate)
        to = self.state.fleet.at(wanted.to) if wanted.to else None
        if not wanted.request:
            moving = self._at(self.state.fleet.at(wanted.engine))
        elif not (moving := self.moves.named(wanted.request)):
            why = f"no answer under way that can move has the id {wanted.request!r}"
            raise HTTPException(HTTPStatus.NOT_FOUND, why)
        async with self.ending.limits():
            moved = await self.moves.move(moving, to)
        stayed = any(STAYED in one for one in moved)
        status = HTTPStatus.CONFLICT if stayed else HTTPStatus.OK
        return JSONResponse({"requests": moved}, status_code=status)

    def _at(self, engine: VllmEngine) -> list[ClientRequest]:
        return [asked for asked in self.state.requests if asked.decode is engine]

    def _check_operator(self, request: Request) -> None:
        if self.operator_key:
            right = b"Bearer " + self.operator_key.hex().encode()
            shown = request.headers.get("authorization", "").encode()
            allowed = hmac.compare_digest(right, shown)
        else:
            allowed = request.client is not None and is_loopback(request.client.host)
        if not allowed:
            why = "ask from this host, or with the operator's key"
            raise HTTPException(HTTPStatus.FORBIDDEN, why)

    async def _asked(
        self, asked: ClientRequest, stack: AsyncExitStack
    ) -> EngineResponse:
        """Have a request answered when it is its turn."""
        requests = self.state.requests
        requests[asked] = None  # bounded: PROXY_RUNNING_MAX and PROXY_WAITING_MAX
        stack.callback(requests.pop, asked)
        await stack.enter_async_context(self.state.admission.turn())
        if self.moves is not None:
            return await self.moves.ask(asked, stack)
        return await self.dispatcher.ask(asked, stack)


class _Drain(msgspec.Struct):
    engine: str
    drain: bool = True
    wait_s: float = 0.0
    move: bool = True


class _Migrate(msgspec.Struct):
    engine: str = ""
    request: str = ""
    to: str = ""


T = TypeVar("T")


async def _read(request: Request, kind: type[T]) -> T:
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > PROXY_BODY_BYTES_MAX:
                why = f"the body has more than {in_bytes(PROXY_BODY_BYTES_MAX)}"
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
    except ClientDisconnect:
        raise HTTPException(_CLIENT_CLOSED) from None  # nobody reads it
    try:
        # Takes no NaN and no half of a surrogate pair, which Python's own would read
        # and the engines' requests could not be written with.
        return msgspec.json.decode(content, type=kind)
    except DECODE_ERRORS as exc:
        why = f"the body is not JSON as it is wanted: {exc}"
        raise HTTPException(HTTPStatus.BAD_REQUEST, why) from None


def _passed_on(request: Request) -> dict[str, str]:
    passed = {h: request.headers[h] for h in _PASSED_HEADERS if h in request.headers}
    for name, value in passed.items():
        if _CONTROLS.search(value):
            why = f"the header {name} has a control character"
            raise HTTPException(HTTPStatus.BAD_REQUEST, why)
        # As an answer's: Starlette reads Latin-1, and aiohttp writes UTF-8.
        with contextlib.suppress(UnicodeDecodeError):
            passed[name] = value.encode("latin-1").decode()
    return passed


async def _unless_gone(
    request: Request,
    ask: Callable[[AsyncExitStack], Coroutine[Any, Any, EngineResponse]],
    ending: Ending,
) -> Response:
    """Pass on the answer, unless the client goes away before it begins.

    Starlette looks for that only once the answer is on its way.
    """
    async with AsyncExitStack() as stack:
        asking = asyncio.ensure_future(ask(stack))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            async with ending.limits():
                await asyncio.wait((asking, gone), return_when=asyncio.FIRST_COMPLETED)
            answer = asking.result() if asking.done() else None
        finally:
            for task in (gone, asking):
                await ended(task)
        if answer is None:
            # Nobody reads it.
            return Response(status_code=_CLIENT_CLOSED)
        return _Relayed(answer, stack, ending)


async def _disconnected(request: Request) -> None:
    # The body was read, or is no use, so nothing else is left to be received.
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Relayed(StreamingResponse):
    """Passes an engine's answer on, and ends what that took, however it goes.

    A client may leave before the first part of it is asked for.
    """

    def __init__(
        self, answer: EngineResponse, rest: AsyncExitStack, ending: Ending
    ) -> None:
        # Byte by byte as the engine has sent them: aiohttp reads UTF-8, and Starlette
        # writes Latin-1.
        kept = {
            h: answer.headers[h].encode(errors="surrogateescape").decode("latin-1")
            for h in _KEPT_HEADERS
            if h in answer.headers and not _CONTROLS.search(answer.headers[h])
        }
        parts = _relay(answer, ending)
        super().__init__(parts, status_code=answer.status, headers=kept)
        self._rest = rest.pop_all()
        self._rest.push_async_callback(parts.aclose)

    async def __call__(self, *connection: Any) -> None:
        async with self._rest:
            # One that broke off was logged. The server cuts the connection of an
            # answer without an end, so the client knows.
            with contextlib.suppress(EngineFailed):
                await super().__call__(*connection)


async def _relay(answer: EngineResponse, ending: Ending) -> AsyncGenerator[bytes]:
    try:
        while True:
            async with ending.limits():
                part = await anext(answer.parts, None)
            if part is None:
                return
            yield part
    except EngineFailed as exc:
        logger.warning("an answer broke off: %s", exc)
        if not answer.headers.get("content-type", "").startswith(_EVENTS):
            raise
        why = f"the engine broke off: {exc.why}" if exc.engine else exc.why
        said = _openai_error(HTTPStatus.BAD_GATEWAY, why)
        # What came before may have been half an event.
        yield b"\n\ndata: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n"


async def _refused(_: Request, exc: Exception) -> Response:
    """Say why there is no answer."""
    status, why = int(HTTPStatus.BAD_REQUEST), str(exc)
    headers: Mapping[str, str] | None = None
    match exc:
        case HTTPException():
            status, why, headers = exc.status_code, exc.detail, exc.headers
        case QueueFull():
            status = HTTPStatus.TOO_MANY_REQUESTS
            headers = {"retry-after": str(exc.retry_after_s)}
        case EngineFailed(status=None):
            status = HTTPStatus.SERVICE_UNAVAILABLE
            why = exc.why if exc.ours else f"no decode engine answers: {exc.why}"
            headers = {"retry-after": str(math.ceil(PROBE_S))}
        case EngineFailed(status=int(status)):
            why = f"an engine failed: {exc.why}"
    return JSONResponse(_openai_error(status, why), status, headers)


def _openai_error(status: int, message: str) -> dict[str, Any]:
    kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "EngineError"
    return {
        "error": {"message": message, "type": kind, "param": None, "code": int(status)}
    }
