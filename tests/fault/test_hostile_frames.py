"""Bad input through a live endpoint: refused by rule, and the process lives.

The core's own tests break each rule in memory. Here bytes come through a socket, the
connection that broke a rule ends with the rule's number, and another connection of the
same communicator goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvwire import Connection, ConnectionClosed, ConnectionLost, IntegrityError, limits
from kvwire.wire.control import Ping
from kvwire.wire.header import FrameType
from tests.fault.stranger import Stranger, answering, dial, expect_ended_by
from tests.support import inside
from tests.support.pairs import Pair

Speech = Callable[[Stranger], bytes]


async def expect_rule(
    pair: Pair, stranger: Stranger, there: Connection, rule: str
) -> None:
    """That connection has ended because of the rule; the pair has noticed nothing."""
    await stranger.expect_gone()
    await expect_ended_by(rule, there)
    assert len(inside.buffers(pair.far)) == 0
    await expect_fine(pair)


async def expect_fine(pair: Pair) -> None:
    await asyncio.gather(pair.left.send(1, b"there"), pair.right.send(1, b"back"))
    assert await pair.right.recv(1) == b"there"
    assert await pair.left.recv(1) == b"back"


# --- frames of every wrong kind -------------------------------------------------------


def _twice(speech: Speech) -> Speech:
    """The same bytes again: a replay."""

    def again(stranger: Stranger) -> bytes:
        return 2 * speech(stranger)

    return again


def ping(stranger: Stranger) -> bytes:
    return stranger.control(FrameType.PING, Ping(1))


def damaged(stranger: Stranger) -> bytes:
    """A header of which one bit is wrong; tests/wire turns every other one."""
    header = bytearray(ping(stranger)[: limits.HEADER_BYTES])
    header[10] ^= 1
    return bytes(header)


def message(stranger: Stranger) -> bytes:
    return stranger.payload(FrameType.MESSAGE, b"x", offset=7)


def skip_one(stranger: Stranger) -> bytes:
    ping(stranger)
    return ping(stranger)


def _body(frame_type: int, body: bytes) -> Speech:
    return lambda stranger: stranger.raw_control(frame_type, body)


# One of each reader of a frame; tests/wire and tests/proto have all others.
SPEECHES: list[tuple[str, str, Speech]] = [
    ("damaged", "KVW-HD-01", damaged),
    ("replayed message", "KVW-HD-05", _twice(message)),
    ("nested", "KVW-CT-01", _body(FrameType.PING, b"\x91" * 1000)),
    ("pings", "KVW-LV-02", lambda s: b"".join(ping(s) for _ in range(5000))),
]


@pytest.mark.parametrize(
    ("rule", "speech"),
    [pytest.param(rule, speech, id=name) for name, rule, speech in SPEECHES],
)
async def test_each_kind_of_bad_frame_is_refused_by_rule(
    pair: Pair, rule: str, speech: Speech
) -> None:
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        await stranger.say(speech(stranger))
        await expect_rule(pair, stranger, there, rule)


async def test_a_damaged_payload_fails_its_request_only(pair: Pair) -> None:
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        for into in (None, bytearray(10)):
            await stranger.say(
                stranger.payload(FrameType.MESSAGE, b"damaged", offset=7, check=1)
            )
            with pytest.raises(IntegrityError, match="damaged"):
                await there.recv(7, into)
        await stranger.say(message(stranger))
        assert await there.recv(7) == b"x"
    await there.wait_closed()


@pytest.mark.parametrize("kept", [1, 31, 32, 33, 40])
async def test_a_frame_that_is_cut_off(pair: Pair, kept: int) -> None:
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        frame = stranger.payload(FrameType.MESSAGE, bytes(100), offset=7)
        await stranger.say(frame[:kept])
        stranger.close()
        with pytest.raises(ConnectionLost):
            await there.recv(7)
    await expect_fine(pair)
    assert len(inside.buffers(pair.far)) == 0


# --- a hostile listener ---------------------------------------------------------------


async def test_a_client_is_lied_to_after_the_handshake(pair: Pair) -> None:
    async with answering() as (address, answered):
        connecting = asyncio.create_task(pair.near.connect(address, transport="tcp"))
        stranger = await answered.get()
        await stranger.shake()
        connection = await connecting
        waiting = connection.recv(1)
        await stranger.say(skip_one(stranger))
        with pytest.raises(ConnectionClosed, match="KVW-HD-05"):
            await waiting
    await connection.wait_closed()
    await expect_fine(pair)
