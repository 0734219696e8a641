"""The proxy's HTTP client for engines, whose errors name no address to clients."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from kvwire_vllm.proxy.engines import VllmEngine
from kvwire_vllm.proxy.limits import PROXY_HEALTH_BYTES_MAX

SLOW_S: Final = 1.0
SILENT_S: Final = 10.0
# The time limit for connecting. There is none for the answer, which may take minutes to
# begin (a queue, a long prompt).
_CONNECT_S: Final = 5.0
# uvicorn, which serves vLLM, closes an idle connection after 5 s. A request that is
# sent at that moment would fail.
_KEPT_OPEN_S: Final = 2.0
# Statuses that can be passed on: neither a protocol switch nor an unknown number.
_STATUSES: Final = range(200, 600)
# Errors of this process or machine, for which no engine is at fault.
_OURS: Final = (errno.EMFILE, errno.ENFILE)
# How much of a library's error text is quoted.
_QUOTED_CHARS: Final = 200
# aiohttp's texts about malformed HTTP end with the bytes in question, some with an
# arrow below them.
_QUOTED: Final = ("b'", 'b"', "^")
_NO_HEADERS: Final[Mapping[str, str]] = {}


class EngineFailed(Exception):
    """Reports an engine that could not be reached or gave no usable answer."""

    def __init__(
        self,
        engine: VllmEngine | None,
        why: str,
        status: int | None = None,
        *,
        silent: bool = False,
        reached: bool = True,
        ours: bool = False,
    ) -> None:
        super().__init__(f"{engine.url}: {why}" if engine else why)
        # The engine; None if there was none to send the request to.
        self.engine = engine
        self.why = why  # for the client, so without the engine's address
        self.status = status  # the answer's status; None without an answer
        self.silent = silent  # whether it may be running but does not answer
        # Whether it got the request, which may have caused the failure.
        self.reached = reached
        # Whether this process failed, for example for lack of descriptors.
        self.ours = ours
        self.retry_after = ""  # its Retry-After header

    @property
    def cost_nothing(self) -> bool:
        """Whether the engine had no work by it, and the client no wait."""
        return not (self.reached or self.silent or self.status is not None)


@dataclass(slots=True)
class EngineResponse:
    """An engine's response, whose body arrives in parts."""

    engine: VllmEngine
    status: int  # the HTTP status
    headers: Mapping[str, str]  # with names in lower case
    # The parts of the body; they end with :exc:`EngineFailed` if the engine breaks off.
    parts: AsyncIterator[bytes]

    async def body(self, size_max: int) -> bytes:
        """Return the rest of the body.

        Cancel safety: safe, but the part already read is lost.
        """
        read = bytearray()
        async for part in self.parts:
            read += part
            if len(read) > size_max:
                raise EngineFailed(
                    self.engine, f"its answer has more than {size_max} bytes"
                )
        return bytes(read)

    @property
    def is_error(self) -> bool:
        """Whether the status is 400 or above."""
        return self.status >= HTTPStatus.BAD_REQUEST

    @property
    def is_failure(self) -> bool:
        """Whether the engine has failed the request; it may have died of it, or before.

        501 is not a failure: the model, or this version of vLLM, lacks the feature.
        """
        of_engine = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return of_engine and self.status != HTTPStatus.NOT_IMPLEMENTED


class EngineClient:
    """Sends requests to engines, all on the loop of the first request."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def ask(
        self,
        engine: VllmEngine,
        path: str,
        headers: Mapping[str, str] = _NO_HEADERS,
        body: Mapping[str, Any] | bytes | None = None,
    ) -> AsyncIterator[EngineResponse]:
        """Send a GET, or a POST if there is a body; yield the response.

        A body of bytes is sent unchanged.

        Cancel safety: safe, the connection to the engine is closed.
        """
        async with AsyncExitStack() as stack:
            async with _answering(engine):
                sent = self.exchange(engine.url + path, headers, body)
                status, answered, parts = await stack.enter_async_context(sent)
            if status not in _STATUSES:
                raise EngineFailed(
                    engine, f"its answer is not valid HTTP: status {status}"
                )
            yield EngineResponse(engine, status, answered, _Answered(engine, parts))

    async def probe(self, engine: VllmEngine, within_s: float = SLOW_S) -> None:
        """Ask for an engine's health, and record it.

        Cancel safety: safe, the request is cancelled.
        """
        try:
            async with (
                asyncio.timeout(within_s),
                self.ask(engine, "/health") as response,
            ):
                await response.body(PROXY_HEALTH_BYTES_MAX)
        except TimeoutError:
            engine.slow = True
            if within_s >= SILENT_S:
                engine.lost(f"it has not answered for {within_s:g} s")
                engine.give_up()
        except EngineFailed as exc:
            if exc.ours:
                return
            engine.lost(exc.why, left=not exc.reached)
            if exc.silent:
                engine.give_up()
        else:
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                engine.lost(f"its /health has status {response.status}")
            else:
                engine.healthy()

    async def close(self) -> None:
        """Close all connections.

        Cancel safety: call it again.
        """
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def exchange(
        self,
        url: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | bytes | None,
    ) -> AsyncIterator[tuple[int, Mapping[str, str], AsyncIterator[bytes]]]:
        """Send one request; yield the answer's status, headers and parts.

        Cancel safety: safe, the connection is closed.
        """
        if self._session is None:
            self._session = self._new_session()
        content = b"" if body is None else body
        if not isinstance(content, bytes):
            content = msgspec.json.encode(content)
        if content:
            headers = {**headers, "content-type": "application/json"}
        # A generator, since the transport would copy bytes again and again.
        data = io.BytesIO(content) if content else None
        del content, body  # it is large, and the answer may take long
        sending = self._session.request(
            "GET" if data is None else "POST",
            URL(url),
            data=data,
            headers=headers,
            allow_redirects=False,
            skip_auto_headers=("content-type",),
        )
        del data
        response = await sending
        # If the answer was read to its end, its connection is already back in the pool.
        with closing(response):
            yield (
                response.status,
                headers_of(response.raw_headers),
                response.content.iter_any(),
            )

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_OPEN_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            # Uncompressed, since parts of an answer are passed on as they come.
            headers={"accept-encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


@asynccontextmanager
async def _answering(engine: VllmEngine) -> AsyncIterator[None]:
    """Convert all errors to :exc:`EngineFailed`; raise it if the prober gives up."""
    try:
        async with asyncio.timeout(None) as wait:
            with engine.waited_for(wait):
                yield
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        if wait.expired():
            raise EngineFailed(engine, "it does not answer", silent=True) from None
        raise _failure(engine, exc) from None


@dataclass(slots=True)
class _Answered(AsyncIterator[bytes]):
    """Iterates over a body; a reader may stop midway without closing anything."""

    engine: VllmEngine
    parts: AsyncIterator[bytes]

    async def __anext__(self) -> bytes:
        async with _answering(self.engine):
            return await anext(self.parts)


def _failure(engine: VllmEngine, error: Exception) -> EngineFailed:
    """Return the error without an engine's address, which clients must not see."""
    if isinstance(error, TimeoutError):
        why = f"no connection within {_CONNECT_S:g} s"
        return EngineFailed(engine, why, silent=True, reached=False)
    if isinstance(error, aiohttp.ClientConnectorError):
        code = error.os_error.errno or 0
        why = os.strerror(code) if code > 0 else "its host name does not resolve"
        if isinstance(error.os_error, ssl.SSLError):  # SSL has its own numbers
            why = f"TLS: {error.os_error.reason}"
            code = 0
        ours = code in _OURS
        return EngineFailed(engine, why, reached=False, ours=ours)
    if isinstance(error, aiohttp.ClientResponseError):
        text = _parser_text(error.message)[:_QUOTED_CHARS]
        why = f"its answer is not valid HTTP: {text}"
        return EngineFailed(engine, why)
    if isinstance(error, aiohttp.ClientPayloadError):
        return EngineFailed(engine, "its answer is incomplete")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        # aiohttp's text may contain the whole buffer of a broken answer.
        return EngineFailed(engine, "Server disconnected")
    why = str(error)[:_QUOTED_CHARS] or type(error).__name__
    return EngineFailed(engine, why)


def _parser_text(message: str) -> str:
    """Return aiohttp's text about malformed HTTP in one line, without the bytes."""
    lines = (line.strip() for line in message.splitlines())
    words = " ".join(line for line in lines if not line.startswith(_QUOTED))
    return words.partition(": b'")[0].partition(': b"')[0].rstrip(": ")


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Decode headers; the values of a repeated header are joined with a comma."""
    headers: dict[str, str] = {}
    for label, value in raw:
        name = label.decode("latin-1").lower()
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers
