"""A request's body: how it is read, with which limits, and how it is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from kvwire.spi import DECODE_ERRORS
from kvwire.types import in_bytes
from kvwire_vllm.proxy.client import parser_text
from kvwire_vllm.proxy.limits import (
    PROXY_BODY_BYTES_PER_S,
    PROXY_BODY_S,
    PROXY_BODY_VALUES_MAX,
)

# How many of the PROXY_BODY_VALUES_MAX values each object or list counts as.
_CONTAINER_VALUES: Final = 8
_LENGTH_DIGITS: Final = 18


T = TypeVar("T")


class Refused(Exception):
    """Reports a request that gets an error answer because the client is at fault."""

    def __init__(
        self, status: int, why: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(why)
        self.status = int(status)  # the HTTP status
        self.headers = dict(headers or {})  # headers beside those of every error answer


async def read_body(
    request: web.BaseRequest,
    bytes_max: int,
    take: Callable[[int], None] | None = None,
    *,
    body_s: float = PROXY_BODY_S,
    bytes_per_s: float = PROXY_BODY_BYTES_PER_S,
) -> bytes:
    """Read a request's body; refuse one that is too slow, too large or compressed.

    Args:
        request: The request.
        bytes_max: The most bytes of the body.
        take: Reserves memory for a part of it.
        body_s: The seconds that every body has to arrive.
        bytes_per_s: The rate that gives a body more time.

    Raises:
        Refused: The body cannot be used.

    Cancel safety: safe, but the part already read is lost.
    """
    too_large = Refused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has more than {in_bytes(bytes_max)}",
    )
    _check_head(request, bytes_max, too_large)
    if request.headers.get("expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    content = bytearray()
    values = 0
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(body_s) as wait:
            async for part in request.content.iter_any():
                content += part
                if len(content) > bytes_max:
                    raise too_large
                if take is not None:
                    take(len(part))
                values += part.count(b",")
                values += _CONTAINER_VALUES * (part.count(b"[") + part.count(b"{"))
                if values > PROXY_BODY_VALUES_MAX:
                    why = f"the body has more than {PROXY_BODY_VALUES_MAX} values"
                    raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
                here_s = len(content) / bytes_per_s
                wait.reschedule(began + body_s + here_s)
    except TimeoutError:
        in_s = asyncio.get_running_loop().time() - began
        why = f"only {in_bytes(len(content))} of the body arrived within {in_s:.0f} s"
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, why) from None
    except web.RequestPayloadError as exc:
        why = f"the body is incomplete: {parser_text(str(exc))}"
        raise Refused(HTTPStatus.BAD_REQUEST, why) from None
    return bytes(content)


def _check_head(request: web.BaseRequest, bytes_max: int, too_large: Refused) -> None:
    """Refuse a body before it arrives."""
    for name in ("content-encoding", "transfer-encoding"):
        coding = request.headers.get(name, "identity")
        if coding.lower() not in ("identity", "chunked"):
            why = f"{name} {coding}: send the body uncompressed"
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > _LENGTH_DIGITS or int(length) > bytes_max):
        raise too_large


def decoded(content: bytes, kind: type[T]) -> T:
    """Decode a body of JSON.

    NaN and lone surrogates are refused: Python's own decoder accepts them, but they
    cannot be encoded again for an engine.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except DECODE_ERRORS as exc:
        why = f"the body is not the expected JSON: {exc}"
        raise Refused(HTTPStatus.BAD_REQUEST, why) from None
