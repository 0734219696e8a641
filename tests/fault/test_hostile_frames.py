"""Bad input through a live endpoint: refused by rule, and the process lives.

The core's own tests break each rule in memory. Here bytes come through a socket, the
connection that broke a rule ends with the rule's number, and another connection of the
same communicator goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvwire
from kvwire import Connection, ConnectionClosed, ConnectionLost, IntegrityError, limits
from kvwire.proto.handshake import Identity
from kvwire.security.keys import read_key_file, write_key_file
from kvwire.types import TrustMode
from kvwire.wire.control import AccessBody, Announce, Close, Ping
from kvwire.wire.header import FrameType, encode_header
from tests.fault.stranger import TERMS, Stranger, answering, dial, expect_ended_by
from tests.support.core_pair.handshakes import identity
from tests.support.pairs import Pair, connected

TAG8 = (7).to_bytes(8, "little")
NO_GRANT = AccessBody(9, 1, bytes(16), 0, 10)

Speech = Callable[[Stranger], bytes]


async def expect_rule(
    pair: Pair, stranger: Stranger, there: Connection, rule: str
) -> None:
    """That connection has ended because of the rule; the pair has noticed nothing."""
    await stranger.expect_gone()
    await expect_ended_by(rule, there)
    assert len(pair.far._state.buffers) == 0
    await expect_fine(pair)


async def expect_fine(pair: Pair) -> None:
    await asyncio.gather(pair.left.send(1, b"there"), pair.right.send(1, b"back"))
    assert await pair.right.recv(1) == b"there"
    assert await pair.left.recv(1) == b"back"


# --- frames of every wrong kind -------------------------------------------------------


def _header(frame_type: int, flags: int = 2, length: int = 1, **fields: int) -> Speech:
    """A header with a right checksum and the right number; fields are as given."""

    def speech(stranger: Stranger) -> bytes:
        return encode_header(
            frame_type, flags, stranger.handshake.framing.sent, length, **fields
        )

    return speech


def _twice(speech: Speech) -> Speech:
    """The same bytes again: a replay."""

    def again(stranger: Stranger) -> bytes:
        return 2 * speech(stranger)

    return again


def _both(*speeches: Speech) -> Speech:
    return lambda stranger: b"".join(speech(stranger) for speech in speeches)


def ping(stranger: Stranger) -> bytes:
    return stranger.control(FrameType.PING, Ping(1))


def damaged(stranger: Stranger) -> bytes:
    """A header of which one bit is wrong; tests/wire turns every other one."""
    header = bytearray(ping(stranger)[: limits.HEADER_BYTES])
    header[10] ^= 1
    return bytes(header)


def close(stranger: Stranger) -> bytes:
    return stranger.control(FrameType.CLOSE, Close(0))


def announce(stranger: Stranger) -> bytes:
    return stranger.control(FrameType.ANNOUNCE, Announce(TAG8, 2**36), request=1)


def put(stranger: Stranger) -> bytes:
    return stranger.control(FrameType.PUT, NO_GRANT, request=3)


def message(stranger: Stranger) -> bytes:
    return stranger.payload(FrameType.MESSAGE, b"x", offset=7)


def skip_one(stranger: Stranger) -> bytes:
    ping(stranger)
    return ping(stranger)


def too_many(stranger: Stranger) -> bytes:
    """One small message more than there is credit for."""
    return b"".join(message(stranger) for _ in range(TERMS.window_messages + 1))


def _body(frame_type: int, body: bytes, request: int = 0) -> Speech:
    return lambda stranger: stranger.raw_control(frame_type, body, request=request)


def _data(data: bytes, **fields: int) -> Speech:
    return lambda stranger: stranger.payload(FrameType.DATA, data, **fields)


SPEECHES: list[tuple[str, str, Speech]] = [
    ("damaged", "KVW-HD-01", damaged),
    ("unknown type", "KVW-HD-02", _header(0x7F)),
    ("type 0", "KVW-HD-02", _header(0)),
    ("unknown flags", "KVW-HD-03", _header(FrameType.PING, flags=0x82)),
    ("oversized control", "KVW-HD-04", _header(FrameType.PING, length=2**32 - 1)),
    ("oversized message", "KVW-HD-04", _header(FrameType.MESSAGE, length=65_537)),
    ("oversized chunk", "KVW-HD-04", _header(FrameType.DATA, length=2**24 + 1)),
    ("empty control", "KVW-HD-04", _header(FrameType.PING, length=0)),
    ("replayed", "KVW-HD-05", _twice(ping)),
    ("replayed message", "KVW-HD-05", _twice(message)),
    ("lost frame", "KVW-HD-05", skip_one),
    ("sealed", "KVW-AU-01", _header(FrameType.PING, flags=1, length=40)),
    ("handshake again", "KVW-CN-01", _body(FrameType.CONFIRM, bytes(224))),
    ("request of a ping", "KVW-CN-02", _body(FrameType.PING, b"\x91\x01", request=1)),
    ("no request", "KVW-CN-02", _body(FrameType.ANNOUNCE, b"\x90")),
    ("not msgpack", "KVW-CT-01", _body(FrameType.PING, b"\xc1")),
    ("truncated", "KVW-CT-01", _body(FrameType.CREDIT, b"\x92\x01")),
    ("trailing", "KVW-CT-01", _body(FrameType.PING, b"\x91\x01\x00")),
    ("negative", "KVW-CT-01", _body(FrameType.CREDIT, b"\x92\x01\xff")),
    ("huge number", "KVW-CT-01", _body(FrameType.PING, b"\x91\xcf" + b"\xff" * 8)),
    ("nested", "KVW-CT-01", _body(FrameType.PING, b"\x91" * 1000)),
    ("eager with a request", "KVW-MS-01", _header(FrameType.MESSAGE, request=1)),
    ("without credit", "KVW-CR-01", too_many),
    ("announced twice", "KVW-RQ-02", _both(announce, announce)),
    ("data for nothing", "KVW-RQ-04", _data(b"x", request=2)),
    ("data for request 0", "KVW-RQ-04", _data(b"x")),
    ("pong", "KVW-LV-01", lambda s: s.control(FrameType.PONG, Ping(9))),
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


@pytest.mark.parametrize(
    ("rule", "speech"),
    [("KVW-CL-01", close), ("KVW-CL-02", message), ("KVW-CL-02", put)],
)
async def test_after_its_close_a_peer_starts_nothing(
    pair: Pair, rule: str, speech: Speech
) -> None:
    """We still wait for a message of it, so our own CLOSE has not been said."""
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        there.recv(7, bytearray(10))
        begun = stranger.control(FrameType.ANNOUNCE, Announce(TAG8, 10), request=1)
        await stranger.say(begun, close(stranger), speech(stranger))
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


@pytest.mark.timeout(180)
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
    assert len(pair.far._state.buffers) == 0


# --- numbers that would allocate ------------------------------------------------------


async def test_what_is_announced_costs_nothing(pair: Pair) -> None:
    """64 GiB, a thousand times over: no memory is the receiver's answer to a number."""
    async with dial(pair.address) as stranger:
        there = await pair.far.accept()
        largest = Announce(TAG8, limits.REQUEST_BYTES_MAX)
        await stranger.say(
            *(
                stranger.control(FrameType.ANNOUNCE, largest, request=number)
                for number in range(1, 2000, 2)
            )
        )
        with pytest.raises(kvwire.MessageTooLarge, match="refused"):
            await there.recv(7)
        with pytest.raises(kvwire.MessageTooLarge, match="larger buffer"):
            await there.recv(7, bytearray(1000))
        assert len(pair.far._state.buffers) == 0
        there.abort()
    await there.wait_closed()


# --- sealed frames --------------------------------------------------------------------


@asynccontextmanager
async def sealed(folder: Path) -> AsyncIterator[tuple[Pair, Identity]]:
    """A pair that trusts by key, and the identity of somebody who holds it as well."""
    write_key_file(folder / "key")
    key = str(folder / "key")
    async with connected(trust="psk", psk_file=key) as pair:
        psk = read_key_file(key)
        yield pair, identity("stranger", trust=TrustMode.PSK, psk=psk, parameters=TERMS)


async def test_a_sealed_frame_is_not_taken_again(tmp_path: Path) -> None:
    """Renumbered by hand so that only the seal can tell."""
    async with sealed(tmp_path) as (pair, who), dial(pair.address, who) as stranger:
        there = await pair.far.accept()
        first = ping(stranger)
        body = first[limits.HEADER_BYTES :]
        sequence = stranger.handshake.framing.sent
        header = encode_header(FrameType.PING, 1, sequence, len(body))
        await stranger.say(first, header, body)
        await expect_rule(pair, stranger, there, "KVW-AU-02")


async def test_a_sealed_frame_is_not_taken_back(tmp_path: Path) -> None:
    """What the other side has said is reflected, with the number that is due here."""
    async with sealed(tmp_path) as (pair, who), dial(pair.address, who) as stranger:
        there = await pair.far.accept()
        there.send(1, bytes(100_000))
        heard = await stranger.hear()
        assert heard.header.type == FrameType.ANNOUNCE
        sequence = stranger.handshake.framing.sent
        header = encode_header(
            FrameType.ANNOUNCE, 1, sequence, len(heard.body), heard.header.request
        )
        await stranger.say(header, heard.body)
        await expect_rule(pair, stranger, there, "KVW-AU-02")


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
