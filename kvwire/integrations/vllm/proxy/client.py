"""How the proxy asks its engines: HTTP/1.1 with kept connections, and nothing more."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kvwire.extras import needed_by

with needed_by("the proxy", extra="vllm"):
    import aiohttp

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
