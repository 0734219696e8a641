"""One HTTP request and its answer, independent of the HTTP server.

::

    server.py    the proxy's own server, on aiohttp
    asgi.py      any ASGI server, for programs that embed the proxy
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

# What nginx notes where a client has closed the connection; there is no standard one.
CLIENT_CLOSED = 499


class Refused(Exception):
    """Report that a request gets an error answer because the client is at fault."""

    def __init__(
        self, status: int, why: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(why)
        self.status = int(status)  # of HTTP
        self.headers = dict(headers or {})  # beside those of any error
        self.why = why  # for the client


@dataclass(slots=True)
class HttpRequest:
    """Hold a request; its body arrives in parts."""

    method: str  # of HTTP, such as `POST`
    path: str  # without a query
    headers: Mapping[str, str]  # their names in small letters
    client: str  # the numeric address of who asks; "" if it is not known
    # The body. It raises :exc:`Refused` where that cannot be read to its end.
    parts: AsyncIterator[bytes]
    query: str = ""  # as it was sent, without its question mark


@dataclass(slots=True)
class HttpAnswer:
    """Hold an answer, whole or in parts."""

    status: int = HTTPStatus.OK  # of HTTP
    headers: Mapping[str, str] = field(default_factory=dict)
    # Its parts end with :exc:`EngineFailed` where the engine has broken off.
    body: bytes | AsyncIterator[bytes] = b""


def as_json(
    said: Any,
    status: int = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """Return a JSON answer."""
    kind = {"content-type": "application/json"}
    return HttpAnswer(status, {**kind, **(headers or {})}, msgspec.json.encode(said))


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
