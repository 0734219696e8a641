"""The handshake on a link, and the moment at which a connection takes over."""

from __future__ import annotations

import asyncio
import logging

import pytest

import kvwire
from kvwire import Address, limits
from kvwire.driver.handshake import report_of
from kvwire.proto.handshake import ClientHandshake, Identity
from kvwire.types import TrustMode
from kvwire.wire.control import (
    BackendOffer,
    HandshakeVerdict,
    TransportChoice,
    TransportOffer,
)
from kvwire.wire.handshake_messages import NONCE_BYTES, ConnectionParameters
from kvwire.wire.header import Flag, FrameType, encode_header

_TERMS = ConnectionParameters(
    chunk_bytes=limits.CHUNK_BYTES,
    eager_bytes=limits.EAGER_BYTES,
    window_bytes=limits.EAGER_WINDOW_BYTES,
    window_messages=limits.EAGER_WINDOW_MESSAGES,
)


def client_handshake() -> ClientHandshake:
    identity = Identity(
        name="by hand",
        incarnation=bytes(16),
        trust=TrustMode.LOOPBACK,
        parameters=_TERMS,
    )
    offer = TransportOffer(
        name="by hand", backends=(BackendOffer("tcp", 1),), profile=()
    )
    return ClientHandshake(identity, bytes(NONCE_BYTES), offer)


def said(handshake: ClientHandshake) -> bytes:
    frames = b"".join(header + body for header, body in handshake.outgoing)
    handshake.outgoing.clear()
    return frames


async def dial(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(address.host, address.port)


async def test_a_message_right_behind_the_handshake_is_received() -> None:
    """The last frame of the handshake and the first of the connection in one read."""
    async with kvwire.open(name="server") as server:
        reader, writer = await dial(await server.listen("127.0.0.1:0"))
        handshake = client_handshake()
        writer.write(said(handshake))
        accept = await reader.readexactly(256)
        handshake.header_received(accept[: limits.HEADER_BYTES])
        handshake.body_received(accept[limits.HEADER_BYTES :])
        confirm_and_offer = said(handshake)
        message = handshake.framing.payload(FrameType.MESSAGE, 5, offset=7)
        writer.write(confirm_and_offer + message + b"hello")

        connection = await anext(server.connections())
        assert await connection.recv(7) == b"hello"

        connection.abort()
        writer.close()


async def test_a_refused_peer_is_not_read_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What follows a frame that broke a rule is dropped, without an error of ours."""
    caplog.set_level(logging.INFO, "kvwire")
    async with kvwire.open(name="server") as server:
        reader, writer = await dial(await server.listen("127.0.0.1:0"))
        writer.write(encode_header(FrameType.PING, Flag.CHECKED, 0, 4) * 3)
        assert await reader.read() == b""
        writer.close()
    levels = {record.levelno for record in caplog.records}
    assert levels == {logging.INFO}, caplog.text
    assert "PING while the handshake waits for HELLO" in caplog.text


def test_a_report_shows_no_control_characters_of_the_peer() -> None:
    """It is printed to terminals, and the client takes it from the server."""
    verdicts = (
        HandshakeVerdict("tcp", True, "fine"),
        HandshakeVerdict("x\n", False, "\x1b[31mred"),
    )
    report = report_of(TransportChoice(name="s", verdicts=verdicts, profile=()))
    assert str(report).isprintable()
    assert str(report).startswith("tcp: taken, fine; ")


# --- peers that are something else ----------------------------------------------------


async def test_a_stranger_that_dials_is_logged_with_its_first_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvwire")
    async with kvwire.open() as server:
        reader, writer = await dial(await server.listen("127.0.0.1:0"))
        writer.write(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
        assert not await reader.read()
        writer.close()
        await writer.wait_closed()
    assert "refused: the peer does not speak kvwire: it begins with b'GET /" in (
        caplog.text
    )
