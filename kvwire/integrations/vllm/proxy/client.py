"""How the proxy asks its engines: HTTP/1.1 with kept connections, and nothing more.

Whether engines live is asked twice a second::

    it answers            ready; it gets requests
    it answers 5xx        it has failed, as vLLM says when its engine has died
    nobody listens        down at once; what it has goes on, as in a graceful stop
    silent for 1 s        slow: others are taken first. An API server that is busy with
                          long prompts is silent for a second or two
    silent for 10 s       given up: what waits for it is tried elsewhere
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvwire.directory.base import ended
from kvwire.extras import needed_by
from kvwire.limits import PROXY_METRICS_BYTES_MAX

with needed_by("the proxy", extra="vllm"):
    import aiohttp

if TYPE_CHECKING:
    from kvwire.integrations.vllm.proxy.engines import VllmEngine
    from kvwire.integrations.vllm.proxy.fleet import EngineFleet

PROBE_S: Final = 0.5
# So many questions a second at most; a fleet of more than 100 engines is asked less
# often.
_PROBES_PER_S: Final = 200
SLOW_S: Final = 1.0
SILENT_S: Final = 10.0
# An answer may take minutes to begin (a queue, a long prompt), a connection may not.
_CONNECT_S: Final = 5.0
# uvicorn, which vLLM serves with, closes an idle connection after 5 s. A request that
# is sent at that moment would fail.
_KEPT_OPEN_S: Final = 2.0
# Of a library's words, in ours.
_QUOTED_CHARS: Final = 200
_NO_HEADERS: Final[Mapping[str, str]] = {}


class Unanswered(Exception):
    """Reports that an engine gave no answer, or broke it off."""

    def __init__(self, why: str, *, silent: bool = False) -> None:
        super().__init__(why)
        # It may be there and says nothing; else it is known to be gone.
        self.silent: bool = silent


@dataclass(slots=True)
class EngineResponse:
    """Holds an engine's response, whose body comes part by part."""

    status: int  # of HTTP
    headers: Mapping[str, str]  # likewise
    # The body; it ends with :exc:`Unanswered` if the engine breaks off.
    parts: AsyncIterator[bytes]

    async def body(self, size_max: int | None = None) -> bytes:
        """Return what is left of the body.

        Cancel safety: safe, what was read is lost.
        """
        read = bytearray()
        async for part in self.parts:
            read += part
            if size_max is not None and len(read) > size_max:
                raise Unanswered(f"it says more than {size_max} bytes")
        return bytes(read)

    @property
    def is_error(self) -> bool:
        """Tell whether its status is one of an error."""
        return self.status >= HTTPStatus.BAD_REQUEST


class EngineClient:
    """Asks engines. Its connections belong to the loop of its first request."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def ask(
        self,
        url: str,
        headers: Mapping[str, str] = _NO_HEADERS,
        body: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[EngineResponse]:
        """Send a GET, or a POST if there is a body; the response while this is open.

        Cancel safety: safe, the engine is told by the end of the connection.
        """
        if self._session is None:
            self._session = _session()
        method, data, sent = "GET", None, headers
        if body is not None:
            method, data = "POST", msgspec.json.encode(body)
            sent = {**headers, "content-type": "application/json"}
        try:
            said = await self._session.request(
                method, url, data=data, headers=sent, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise _unanswered(exc) from None
        try:
            yield EngineResponse(said.status, said.headers, _Parts(said.content))
        finally:
            # One that was read to its end has given its connection back already.
            said.close()

    async def close(self) -> None:
        """Close all connections.

        Cancel safety: call it again.
        """
        if self._session is not None:
            await self._session.close()


class _Parts:
    """Iterates a body as it comes."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            part = await self._content.readany()
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise _unanswered(exc) from None
        if not part:
            raise StopAsyncIteration
        return part


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_OPEN_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        # Parts of an answer are passed on as they come.
        headers={"accept-encoding": "identity"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _unanswered(error: Exception) -> Unanswered:
    """Say why without an address, which is no business of clients."""
    if isinstance(error, TimeoutError):
        return Unanswered(f"no connection within {_CONNECT_S:g} s", silent=True)
    if isinstance(error, aiohttp.ClientConnectorError):
        code = error.os_error.errno or 0
        return Unanswered(os.strerror(code) if code > 0 else "nobody has this name")
    if isinstance(error, aiohttp.ClientResponseError):
        return Unanswered(f"what it says is no HTTP: {error.message[:_QUOTED_CHARS]}")
    # What is no URL will never be answered, and its engine is not known to have died.
    text = str(error)[:_QUOTED_CHARS] or type(error).__name__
    return Unanswered(text, silent=isinstance(error, ValueError))


class Prober:
    """Asks the engines of a fleet for their health."""

    def __init__(self, fleet: EngineFleet, client: EngineClient) -> None:
        self._fleet = fleet
        self._client = client
        # One for each engine, with when it was asked. bounded: MEMBERS_MAX
        self._asked: dict[VllmEngine, tuple[float, asyncio.Task[None]]] = {}
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Ask at once: there may be a new engine."""
        self._woken.set()

    async def run(self) -> None:
        """Ask again and again until this is cancelled.

        Cancel safety: safe, no question is left.
        """
        try:
            while True:
                self._sweep()
                pause_s = max(PROBE_S, len(self._asked) / _PROBES_PER_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), pause_s)
                self._woken.clear()
        finally:
            for _, task in self._asked.values():
                await ended(task)

    def _sweep(self) -> None:
        now = self._fleet.clock()
        engines = self._fleet.engines
        for engine in self._asked.keys() - set(engines):
            self._asked.pop(engine)[1].cancel()
        for engine in engines:
            began, task = self._asked.get(engine, (now, None))
            if task is None or (task.done() and now - began >= PROBE_S):
                self._asked[engine] = now, asyncio.create_task(self._ask(engine))
            elif not task.done() and now - began > SLOW_S:
                engine.slow = True

    async def _ask(self, engine: VllmEngine) -> None:
        try:
            async with (
                asyncio.timeout(SILENT_S),
                self._client.ask(f"{engine.url}/health") as said,
            ):
                await said.body(PROXY_METRICS_BYTES_MAX)
        except (Unanswered, TimeoutError) as exc:
            if isinstance(exc, Unanswered) and not exc.silent:
                engine.refusing = True
                return
            engine.slow = True
            engine.give_up()
            return
        engine.slow = engine.refusing = False
        if said.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._fleet.down(engine)
        else:
            engine.ready = True
