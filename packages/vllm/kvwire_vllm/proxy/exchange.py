"""One HTTP request and its answer, independent of the HTTP server.

::

    server.py    the proxy's own server, on aiohttp
    asgi.py      any ASGI server, for programs that embed the proxy
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import msgspec

# nginx's status for a client that closed its connection; there is no standard one.
CLIENT_CLOSED = 499


class Refused(Exception):
    """Reports a request that gets an error answer because the client is at fault."""

    def __init__(
        self, status: int, why: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(why)
        self.status = int(status)  # the HTTP status
        self.headers = dict(headers or {})  # headers beside those of every error answer
        self.why = why  # a text for the client


@dataclass(slots=True)
class HttpRequest:
    """A request, whose body arrives in parts."""

    method: str  # the HTTP method
    path: str  # without the query
    headers: Mapping[str, str]  # with names in lower case
    client: str  # the client's numeric address; "" if unknown
    # The parts of the body; they raise :exc:`Refused` if it cannot be read to its end.
    parts: AsyncIterator[bytes]
    query: str = ""  # as it was sent, without the question mark


@dataclass(slots=True)
class HttpAnswer:
    """An answer, whole or in parts."""

    status: int = HTTPStatus.OK  # the HTTP status
    headers: Mapping[str, str] = field(default_factory=dict)
    # Its parts end with :exc:`EngineFailed` if the engine breaks off.
    body: bytes | AsyncIterator[bytes] = b""


def as_json(
    body: Any,
    status: int = HTTPStatus.OK,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """Return a JSON answer."""
    kind = {"content-type": "application/json"}
    return HttpAnswer(status, {**kind, **(headers or {})}, msgspec.json.encode(body))


def openai_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "EngineError"
    return {
        "error": {"message": message, "type": kind, "param": None, "code": int(status)}
    }


def parser_text(message: str) -> str:
    """Return aiohttp's text about malformed HTTP in one line, without the bytes.

    Its texts end with the bytes in question, some with an arrow below them.
    """
    lines = (line.strip() for line in message.splitlines())
    words = " ".join(line for line in lines if not line.startswith(_QUOTED))
    return words.partition(": b'")[0].partition(': b"')[0].rstrip(": ")


_QUOTED: Final = ("b'", 'b"', "^")


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
