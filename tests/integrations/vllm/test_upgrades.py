"""Requests that offer another protocol come to engines whole, as those without do."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.support.engines.proxies import ASK, BODY, Engines, proxy

H2C = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n"
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\n"


def request(offer: bytes, *, chunked: bool) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + offer
    if chunked:
        half = len(BODY) // 2
        parts = [b"%x\r\n%s\r\n" % (len(p), p) for p in (BODY[:half], BODY[half:])]
        said = b"".join(parts) + b"0\r\n\r\n"
        return head + b"transfer-encoding: chunked\r\n\r\n" + said
    return head + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("offer", [H2C, WEBSOCKET, b""], ids=["h2c", "ws", "none"])
async def test_an_offer_is_passed_by(
    offer: bytes, *, chunked: bool, at_once: bool
) -> None:
    """Twice on one connection, in one piece and byte by byte."""
    engines = Engines()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(proxy(engines))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        for count in range(1, 3):
            sent = request(offer, chunked=chunked)
            for part in [sent] if at_once else [bytes((b,)) for b in sent]:
                writer.write(part)
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            assert b" 9}" in answer
            heard = [body for _, body in engines.asked if body]  # not of its health
            assert heard == [ASK] * count
