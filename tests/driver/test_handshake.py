"""The handshake on a link, and the moment at which a connection takes over."""

from __future__ import annotations

import logging

import pytest

import kvwire
from kvwire.driver.handshake import HandshakeDriver, report_of
from kvwire.wire.control import HandshakeVerdict
from kvwire.wire.header import Flag, FrameType, encode_header
from tests.fault.stranger import Stranger, dial
from tests.support import inside
from tests.support.core_pair.handshakes import receive
from tests.support.pairs import until


async def test_a_message_right_behind_the_handshake_is_received() -> None:
    """The last frame of the handshake and the first of the connection in one read."""
    async with (
        kvwire.open(name="server") as server,
        dial(await server.listen("127.0.0.1:0"), shake=False) as stranger,
    ):
        await stranger.say(*outgoing(stranger))
        accept = await stranger.hear()
        receive(stranger.handshake, (accept.raw_header, accept.body))
        message = stranger.payload(FrameType.MESSAGE, b"hello", offset=7)
        await stranger.say(*outgoing(stranger), message)
        connection = await anext(server.connections())
        assert await connection.recv(7) == b"hello"
        connection.abort()


def outgoing(stranger: Stranger) -> list[bytes]:
    """Take what its handshake has to say."""
    frames = [header + body for header, body in stranger.handshake.outgoing]
    stranger.handshake.outgoing.clear()
    return frames


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            3 * encode_header(FrameType.PING, Flag.CHECKED, 0, 4),
            "PING while the handshake waits for HELLO",
        ),
        (
            b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
            "refused: the peer does not speak kvwire: its first bytes are b'GET /",
        ),
    ],
)
async def test_a_refused_peer_is_not_read_any_more(
    caplog: pytest.LogCaptureFixture, data: bytes, said: str
) -> None:
    """What follows what broke a rule is dropped, without an error of ours."""
    caplog.set_level(logging.INFO, "kvwire")
    async with (
        kvwire.open(name="server") as server,
        dial(await server.listen("127.0.0.1:0"), shake=False) as stranger,
    ):
        await stranger.say(data)
        await stranger.expect_gone()
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert said in caplog.text


async def test_a_loop_that_ends_in_a_handshake_leaves_no_exception_to_be_logged() -> (
    None
):
    """``asyncio.run`` cancels whoever waits for it before the link ends."""
    async with kvwire.open(name="server") as server:
        address = await server.listen("127.0.0.1:0")
        async with dial(address, shake=False):
            await until(lambda: inside.drivers(server))
            for task in inside.accepting(server):
                task.cancel()
            (opening,) = inside.drivers(server)
        await opening.ended
    assert isinstance(opening, HandshakeDriver)
    assert not opening.done._log_traceback


def test_a_report_shows_no_control_characters_of_the_peer() -> None:
    """It is printed to terminals, and the client takes it from the server."""
    verdicts = (
        HandshakeVerdict("tcp", True, "fine"),
        HandshakeVerdict("x\n", False, "\x1b[31mred"),
    )
    report = report_of(verdicts)
    assert str(report).isprintable()
    assert str(report).startswith("tcp: taken, fine; ")
