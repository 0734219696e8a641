"""The HTTP side of the proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvwire.integrations.vllm.proxy.dispatch import Answer, Dispatcher, EngineFailed
from kvwire.integrations.vllm.proxy.engines import Engine

# Of an answer's headers; the others are about one hop of it.
_KEPT_HEADERS = ("content-type", "x-request-id")


def make_app(
    prefill: Sequence[Engine],
    decode: Sequence[Engine],
    *,
    order: str,
    route: str,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Starlette:
    """The application.

    Args:
        prefill: The engines that compute prompts.
        decode: The engines that answer.
        order: Both at once, or in sequence.
        route: Which prefill engine gets a request.
        transport: For tests; None for the network.
    """
    client = httpx.AsyncClient(
        # An answer may take minutes to begin: a queue, a long prompt.
        timeout=httpx.Timeout(None, connect=5.0),
        limits=httpx.Limits(max_connections=None),
        transport=transport,
    )
    front = _Front(Dispatcher(client, prefill, decode, order=order, route=route))

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
    """What the routes call."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def generate(self, request: Request) -> Response:
        try:
            body = await request.json()
        except ValueError as exc:
            return _error(400, f"the body is not JSON: {exc}")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        async with AsyncExitStack() as stack:
            try:
                answer = await self._dispatcher.ask(request.url.path, body, stack)
            except EngineFailed as exc:
                return _error(503, str(exc))
            rest = stack.pop_all()
            kept = {h: answer.headers[h] for h in _KEPT_HEADERS if h in answer.headers}
            return StreamingResponse(
                _relay(answer, rest), status_code=answer.status, headers=kept
            )

    async def models(self, _: Request) -> Response:
        try:
            said = await self._dispatcher.get("/v1/models")
        except EngineFailed as exc:
            return _error(503, str(exc))
        return Response(
            said.content, said.status_code, media_type=said.headers.get("content-type")
        )

    async def health(self, _: Request) -> Response:
        return Response()


async def _relay(answer: Answer, rest: AsyncExitStack) -> AsyncIterator[bytes]:
    async with rest:
        async for part in answer.parts:
            yield part


def _error(status: int, message: str) -> Response:
    body: dict[str, Any] = {"error": {"message": message, "code": status}}
    return JSONResponse(body, status_code=status)
