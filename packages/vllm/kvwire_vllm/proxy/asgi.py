"""The proxy as an ASGI application, for use behind any ASGI server.

The proxy's own server, server.py, does not use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol, TypeAlias

from kvwire.aio import end_task
from kvwire_vllm.proxy.client import EngineFailed
from kvwire_vllm.proxy.exchange import (
    CLIENT_CLOSED,
    HttpAnswer,
    HttpRequest,
    Refused,
    headers_of,
)

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Application(Protocol):
    """An application with HTTP routes, and background work while the server runs."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Run the background work while the block is open."""

    def answered(self, asked: HttpRequest) -> AbstractAsyncContextManager[HttpAnswer]:
        """Answer a request; its resources are released when the block ends."""


async def serve(app: Application, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle one request, or the start and stop of the server.

    Cancel safety: safe, the request ends.
    """
    if scope["type"] == "lifespan":
        await _live(app, receive, send)
    elif scope["type"] == "http":
        await _Exchange(app, scope, receive, send).run()
    else:
        await send({"type": "websocket.close"})


async def _live(app: Application, receive: Receive, send: Send) -> None:
    await receive()
    async with app.running():
        await send({"type": "lifespan.startup.complete"})
        await receive()
    await send({"type": "lifespan.shutdown.complete"})


class _Exchange:
    """Answers one request; stops early if its client disconnects."""

    def __init__(
        self, app: Application, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers = headers_of(scope["headers"])
        client = scope.get("client") or ("",)
        where = scope["method"], scope["path"]
        query = scope.get("query_string", b"").decode("latin-1")
        self._asked = HttpRequest(*where, headers, client[0], self._parts(), query)
        self._app = app
        self._receive = receive
        self._send = send
        # HTTP/1.0 clients do not understand chunks, which servers would send.
        self._whole = scope.get("http_version") == "1.0"
        self._read = asyncio.Event()
        if scope["method"] != "POST":
            self._read.set()
        self._begun = False

    async def run(self) -> None:
        """Answer the request."""
        answering = asyncio.ensure_future(self._answer())
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, answering):
                await end_task(task)
        if not answering.cancelled():
            answering.result()
        elif not self._begun:
            await self._start(HttpAnswer(CLIENT_CLOSED))
            await self._part(b"", more=False)

    async def _answer(self) -> None:
        async with self._app.answered(self._asked) as answer:
            body = answer.body
            if self._whole and not isinstance(body, bytes):
                body = b"".join([part async for part in body])
            await self._start(HttpAnswer(answer.status, answer.headers, body))
            if isinstance(body, bytes):
                await self._part(body, more=False)
                return
            # Servers then close the connection, which shows that the answer is
            # incomplete.
            with suppress(EngineFailed):
                async for part in body:
                    await self._part(part, more=True)
                await self._part(b"", more=False)

    async def _start(self, answer: HttpAnswer) -> None:
        self._begun = True
        headers = {**answer.headers}
        if isinstance(answer.body, bytes):
            headers["content-length"] = str(len(answer.body))
        sent = [
            (name.encode(), value.encode(errors="surrogateescape"))
            for name, value in headers.items()
        ]
        start = {"type": "http.response.start", "status": answer.status}
        await self._send({**start, "headers": sent})

    async def _part(self, body: bytes, *, more: bool) -> None:
        part = {"type": "http.response.body", "body": body}
        await self._send({**part, "more_body": more})

    async def _parts(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Refused(CLIENT_CLOSED)
            if not message.get("more_body"):
                self._read.set()
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    async def _gone(self) -> None:
        # Until the body is complete, received messages are parts of it.
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
