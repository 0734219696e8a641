"""The proxy before engines that are functions, and clients of it.

An engine is a function of a request's body. :class:`Engines` answers for all of them,
and notes what each was asked; :func:`app` is a proxy before them, in memory, and
:func:`proxy` serves one at a port.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import aiohttp
import httpx
from aiohttp import web
from aiohttp.typedefs import Handler as Handling

from kvwire_vllm.proxy.app import SERVED, ProxyApp, ProxySettings
from kvwire_vllm.proxy.client import EngineClient
from kvwire_vllm.proxy.engines import VllmServer
from kvwire_vllm.proxy.fleet import EngineFleet

P1 = VllmServer("http://p1", ("p1:1",))
P2 = VllmServer("http://p2", ("p2:1",))
D1 = VllmServer("http://d1", ("d1:1", "d1:2"))
D2 = VllmServer("http://d2", ("d2:1",))
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 9}
BODY = json.dumps(ASK).encode()
PATH = "/v1/completions"
# A status, headers and the parts of a body.
Said = tuple[int, Mapping[str, str], AsyncIterator[bytes]]
Handler = Callable[[dict[str, Any]], Awaitable[Said]]


class Engines(EngineClient):
    """Answers for every engine, and notes what each was asked.

    What prefill has not computed, decode waits for.
    """

    def __init__(self, **handlers: Handler) -> None:
        super().__init__()
        self.handlers = handlers
        # Engines whose health fails as well; of all others it is fine.
        self.dead: tuple[Handler, ...] = DEAD
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[tuple[str, Any]] = []
        self.headers: dict[str, Mapping[str, str]] = {}
        self._computed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    @asynccontextmanager
    async def exchange(
        self,
        url: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | bytes | None,
    ) -> AsyncIterator[Said]:
        host = urlsplit(url).hostname or ""
        fields = dict(body) if isinstance(body, Mapping) else {}
        handler = self.handlers.get(host, fine)
        if url.endswith("/health"):
            dead = handler in self.dead or getattr(handler, "dead", False)
            handler = handler if dead else fine
        else:
            self.asked.append((host, fields))
            self.sent.append((urlsplit(url).path, body))
            self.headers[host] = headers
        said = await handler(fields)
        params = fields.get("kv_transfer_params") or {}
        computed = self._computed[params.get("transfer_id", "")]
        if params.get("do_remote_decode") and said[0] == 200:
            computed.set()
        if params.get("do_remote_prefill") and said[0] == 200:
            await computed.wait()
        yield said

    def hosts(self) -> list[str]:
        return [host for host, _ in self.asked]

    def params(self, host: str) -> list[Any]:
        return [body.get("kv_transfer_params") for h, body in self.asked if h == host]


def answer(status: int, body: Any) -> Said:
    """As it comes from a socket: part by part."""

    async def parts() -> AsyncIterator[bytes]:
        for part in json.dumps(body).encode().split(b":"):
            yield part + b":" * (not part.endswith(b"}"))

    return status, {"content-type": "application/json"}, parts()


def says(
    *content: bytes, status: int = 200, headers: Mapping[str, str] = EVENTS
) -> Handler:
    """An engine that answers with these parts, whatever it is asked."""

    async def parts() -> AsyncIterator[bytes]:
        for one in content:
            yield one

    async def handler(_: dict[str, Any]) -> Said:
        return status, headers, parts()

    return handler


def fails(status: int, message: str = "") -> Handler:
    """An engine that answers with an error."""

    async def handler(_: dict[str, Any]) -> Said:
        return answer(status, {"error": {"message": message}} if message else {})

    return handler


async def fine(body: dict[str, Any]) -> Said:
    said = {"tokens": body.get("max_tokens")}
    asked = body.get("kv_transfer_params") or {}
    if asked.get("do_remote_decode"):
        where = {"do_remote_prefill": True, "transfer_id": asked["transfer_id"]}
        said["kv_transfer_params"] = where
    return answer(200, said)


async def waits(_: dict[str, Any]) -> Said:
    await asyncio.Event().wait()
    raise AssertionError


def when(event: asyncio.Event, then: Handler = fine) -> Handler:
    """An engine that answers when an event is set."""

    async def handler(body: dict[str, Any]) -> Said:
        await event.wait()
        return await then(body)

    return handler


async def refused(_: dict[str, Any]) -> Said:
    error = ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    raise aiohttp.ClientConnectorError(Mock(), error)


async def dies(_: dict[str, Any]) -> Said:
    raise aiohttp.ServerDisconnectedError


async def gone(_: dict[str, Any]) -> Said:
    raise TimeoutError


broken = fails(500, "it is dead")
DEAD = (refused, broken, dies, gone)


def breaks_off(headers: dict[str, str], first: bytes = b"data: 1\n\n") -> Handler:
    """An engine that dies after the first part of its answer."""

    async def parts() -> AsyncIterator[bytes]:
        if first:
            yield first
        raise aiohttp.ClientError("reset")

    async def handler(_: dict[str, Any]) -> Said:
        return 200, headers, parts()

    return handler


async def streamed(
    application: ProxyApp, *, path: str = PATH, **more: Any
) -> AsyncGenerator[bytes]:
    """The parts of an answer as they come."""
    body = {**ASK, "stream": True, **more}
    async with (
        user_of(application) as user,
        user.stream("POST", path, json=body) as said,
    ):
        async for part in said.aiter_raw():
            yield part


# --- proxies --------------------------------------------------------------------------


def app(
    engines: Engines,
    *,
    prefill: Sequence[VllmServer] = (P1, P2),
    decode: Sequence[VllmServer] = (D1, D2),
    fleet: EngineFleet | None = None,
    **options: Any,
) -> ProxyApp:
    """A proxy before these engines, or before a fleet."""
    before = fleet or EngineFleet(prefill, decode)
    names = {field.name for field in dataclasses.fields(ProxySettings)}
    chosen = {name: options.pop(name) for name in names & options.keys()}
    return ProxyApp(before, ProxySettings(**chosen), client=engines, **options)


@asynccontextmanager
async def proxy(serves: ProxyApp, remote: str = "", **more: Any) -> AsyncIterator[int]:
    """The port of a proxy, whose clients seem to be at `remote` if that is given."""
    application = serves.application()

    @web.middleware
    async def elsewhere(request: web.Request, handler: Handling) -> web.StreamResponse:
        return await handler(request.clone(remote=remote))

    if remote:
        application.middlewares.insert(0, elsewhere)
    runner = web.AppRunner(application, **SERVED, **more)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def user_of(
    application: ProxyApp, remote: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a proxy, at another address if that is given."""
    async with (
        proxy(application, remote) as port,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", verify=False, timeout=60
        ) as user,
    ):
        yield user


# --- its clients ----------------------------------------------------------------------


async def post(
    application: ProxyApp,
    body: Any = None,
    path: str = "completions",
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    asked = ASK if body is None else body
    return await call(application, "POST", f"/v1/{path}", json=asked, headers=headers)


async def call(
    application: ProxyApp, method: str, path: str, remote: str = "", **more: Any
) -> httpx.Response:
    async with user_of(application, remote) as user:
        return await user.request(method, path, **more)


async def operate(application: ProxyApp, path: str, **asked: Any) -> tuple[int, Any]:
    """What an operator is answered: the status, and a document."""
    said = await call(application, "POST", path, json=asked)
    return said.status_code, said.json()


@asynccontextmanager
async def saying(said: bytes, *, silent: bool = False) -> AsyncIterator[list[bytes]]:
    """One that says this at its port, and then no more; its requests, port first."""
    heard: list[bytes] = []

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(said)
        if silent:
            with suppress(ConnectionError):
                await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        heard.append(b"%d" % server.sockets[0].getsockname()[1])
        yield heard
