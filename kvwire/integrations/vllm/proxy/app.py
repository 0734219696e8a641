"""The HTTP side of the proxy."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kvwire.extras import needed_by
from kvwire.integrations.vllm.proxy.dispatch import (
    ClientRequest,
    Dispatcher,
    EngineFailed,
    EngineResponse,
)
from kvwire.integrations.vllm.proxy.engines import VllmServer
from kvwire.integrations.vllm.references import UNSIGNED, References
from kvwire.wire.decode_errors import DECODE_ERRORS

with needed_by("the proxy", extra="vllm"):
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# Of a request's headers; the others are about one hop of it, or the client's own.
_PASSED_HEADERS: Final = ("authorization", "x-request-id", "traceparent", "tracestate")
# Of an answer's, likewise.
_KEPT_HEADERS: Final = ("content-type", "x-request-id")
_EVENTS: Final = "text/event-stream"
# What nginx notes where a client has closed the connection; there is no standard one.
_CLIENT_CLOSED: Final = 499


def make_app(
    prefill: Sequence[VllmServer],
    decode: Sequence[VllmServer],
    *,
    order: str,
    route: str,
    references: References = UNSIGNED,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Starlette:
    """Return the application.

    Args:
        prefill: The engines that compute prompts.
        decode: The engines that answer.
        order: Both at once, or in sequence.
        route: Which prefill engine gets a request.
        references: Signs what the engines are told of each other.
        transport: For tests; None for the network.
    """
    client = httpx.AsyncClient(
        # An answer may take minutes to begin: a queue, a long prompt.
        timeout=httpx.Timeout(None, connect=5.0),
        limits=httpx.Limits(max_connections=None),
        # Parts of an answer are passed on as they come.
        headers={"accept-encoding": "identity"},
        transport=transport,
    )
    front = _Front(
        Dispatcher(
            client, prefill, decode, order=order, route=route, references=references
        )
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(
        routes=[
            Route("/v1/completions", front.generate, methods=["POST"]),
            Route("/v1/chat/completions", front.generate, methods=["POST"]),
            Route("/v1/models", front.models),
            Route("/health", front.health),
        ],
        lifespan=lifespan,
    )


class _Front:
    """Answers the routes of the proxy."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def generate(self, request: Request) -> Response:
        try:
            # Takes no NaN and no half of a surrogate pair, which Python's own would
            # read and the engines' requests could not be written with.
            body = msgspec.json.decode(await request.body())
        except DECODE_ERRORS as exc:
            return _error(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {exc}")
        if not isinstance(body, dict):
            return _error(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
        # Engines hear of each other from us alone.
        body.pop("kv_transfer_params", None)
        asked = ClientRequest(request.url.path, body, _passed_on(request))
        async with AsyncExitStack() as stack:
            asking = asyncio.ensure_future(self._dispatcher.ask(asked, stack))
            try:
                answer = await _unless_gone(request, asking)
            except EngineFailed as exc:
                return _failed(exc)
            if answer is None:
                # Nobody reads it.
                return Response(status_code=_CLIENT_CLOSED)
            rest = stack.pop_all()
            kept = {h: answer.headers[h] for h in _KEPT_HEADERS if h in answer.headers}
            return StreamingResponse(
                _relay(answer, rest), status_code=answer.status, headers=kept
            )

    async def models(self, request: Request) -> Response:
        try:
            said = await self._dispatcher.get("/v1/models", _passed_on(request))
        except EngineFailed as exc:
            return _failed(exc)
        return Response(
            said.content, said.status_code, media_type=said.headers.get("content-type")
        )

    async def health(self, _: Request) -> Response:
        return Response()


def _passed_on(request: Request) -> dict[str, str]:
    return {h: request.headers[h] for h in _PASSED_HEADERS if h in request.headers}


async def _unless_gone(
    request: Request, asking: asyncio.Task[EngineResponse]
) -> EngineResponse | None:
    """Return the answer, or None if the client goes away before it begins.

    Starlette looks for that only once the answer is on its way.
    """
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((asking, gone), return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    finally:
        for task in (asking, gone):
            task.cancel()
        await asyncio.wait((asking, gone))


async def _disconnected(request: Request) -> None:
    # The body was read, so nothing else is left to be received.
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _relay(answer: EngineResponse, rest: AsyncExitStack) -> AsyncIterator[bytes]:
    async with rest:
        try:
            async for part in answer.parts:
                yield part
        except httpx.HTTPError as exc:
            logger.warning("an engine broke off its answer: %r", exc)
            if not answer.headers.get("content-type", "").startswith(_EVENTS):
                raise  # the connection is cut, so the client knows
            said = _openai_error(HTTPStatus.BAD_GATEWAY, f"the engine broke off: {exc}")
            # What came before may have been half an event.
            yield b"\n\ndata: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n"


def _failed(error: EngineFailed) -> Response:
    if error.status is None:
        why = f"no decode engine answers: {error.why}"
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, why)
    return _error(error.status, f"the decode engine failed: {error.why}")


def _error(status: int, message: str) -> Response:
    return JSONResponse(_openai_error(status, message), status_code=status)


def _openai_error(status: int, message: str) -> dict[str, Any]:
    kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "EngineError"
    return {
        "error": {"message": message, "type": kind, "param": None, "code": int(status)}
    }
