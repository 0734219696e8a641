"""Lanes over TCP: how they come up, what strangers get, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.backend.lane import LaneContext
from kvwire.errors import BackendUnavailable, ConnectionLost
from kvwire.limits import CONNECTIONS_MAX
from kvwire.types import Address, Role
from kvwire_certify.conformance.rig import LaneRig
from kvwire_certify.conformance.sides import LaneSide, Parcel
from kvwire_tcp import TcpBackend, preamble
from kvwire_tcp.lane import BOOTSTRAP, PendingLanes, TcpLane
from kvwire_tcp.preamble import ANSWER_BYTES, NONCE_BYTES, answer_to, make_preamble
from kvwire_tcp.wire import PlainWire
from tests.backends.kvwire_tcp.recorder import ANYWHERE, Recorder
from tests.support.waiting import PATIENCE_S


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[LaneRig]:
    rig = LaneRig(TcpBackend, {}, PATIENCE_S, ANYWHERE)
    await rig.open()
    yield rig
    await rig.aclose()


def preamble_to(side: LaneSide, *, number: int | None = None) -> bytes:
    """What a client says that knows the secret of this half."""
    assert isinstance(side.lane, TcpLane)
    context = side.lane._context
    number = context.number if number is None else number
    return make_preamble(context.secret, number, bytes(NONCE_BYTES))


async def knock(rig: LaneRig, data: bytes) -> bytes:
    """Say something as a stranger; what comes back until the end."""
    where = rig.address
    reader, writer = await asyncio.open_connection(where.host, where.port)
    writer.write(data)
    got = b""
    with contextlib.suppress(ConnectionResetError):
        got = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()
    return got


async def test_an_endpoint_of_a_later_version_is_refused_by_name() -> None:
    async with listening() as rig:
        left, _ = rig.prepare()
        said = "'tcp lane 2' and this side's b'tcp lane 1'; both sides need the same"
        with pytest.raises(BackendUnavailable, match=said):
            await left.join(b"tcp lane 2")


async def test_the_listener_may_send_before_the_client_is_there() -> None:
    async with listening() as rig:
        left, right = rig.prepare()
        await right.join(left.lane.bootstrap)
        left.holding = True
        right.send(5)
        assert (right.queued_bytes, right.sent) == (5, [])
        await left.join(right.lane.bootstrap)
        left.release()
        left.send(2)
        await rig.moved(left, right, 1)
        await rig.moved(right, left, 1)
        await rig.until(lambda: right.writable, "it was full")
        left.close()
        await rig.closes(left, right)
        assert left.closed == [None]
        assert isinstance(right.closed[0], ConnectionLost)


async def test_a_lane_is_not_a_connection_and_its_first_link_says_so() -> None:
    rig, recorder = LaneRig(TcpBackend, {}, PATIENCE_S), Recorder()
    listener = await rig.far.listen(ANYWHERE, lambda link: link.start(recorder))
    rig.address = listener.address
    await rig.pair()
    assert "a lane" in str(await recorder.end())
    assert recorder.headers == 0
    await listener.close()
    await rig.aclose()


async def test_a_lane_that_ends_within_a_payload_is_lost() -> None:
    async with listening() as rig:
        left, right = await rig.pair()
        left.send(3)
        right.receive(Parcel(1, 9, b""))
        left.close()
        await rig.closes(right)
        assert "after 0 of 9 payload bytes, 0 more expected" in str(right.closed[0])
        assert right.arrived == [0]


async def test_nothing_is_sent_on_a_lane_that_has_ended_and_could_not_say_so_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as rig:
        left, right = await rig.pair()
        assert isinstance(left.lane, TcpLane)
        assert left.lane._socket is not None
        left.lane._socket._end(ConnectionLost("planted"))
        left.send(5)
        assert not left.lane._queue.nbytes
        await rig.closes(left, right)
        assert "planted" in str(left.closed[0])
    assert not caplog.records


# --- strangers ------------------------------------------------------------------------


@pytest.mark.parametrize("is_of_this_lane", [True, False])
async def test_a_wrong_proof_leaves_the_lane_waiting(is_of_this_lane: bool) -> None:
    async with listening() as rig:
        left, right = rig.prepare()
        await right.join(left.lane.bootstrap)
        forged = bytearray(preamble_to(right, number=None if is_of_this_lane else 9))
        if is_of_this_lane:
            forged[-1] ^= 1
        assert await knock(rig, bytes(forged)) == b""
        await left.join(right.lane.bootstrap)
        left.send(100)
        await rig.moved(left, right, 1)


async def test_a_preamble_that_is_said_again_is_worth_nothing() -> None:
    async with listening() as rig:
        left, right = rig.prepare()
        await right.join(left.lane.bootstrap)
        preamble = preamble_to(right)
        where = rig.address
        reader, writer = await asyncio.open_connection(where.host, where.port)
        writer.write(preamble)
        assert isinstance(right.lane, TcpLane)
        answer = answer_to(preamble, right.lane._context.secret)
        assert await reader.readexactly(ANSWER_BYTES) == answer
        assert await knock(rig, preamble) == b""
        right.abort()
        await rig.closes(right)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


# --- what cannot be -------------------------------------------------------------------


async def test_a_peer_that_is_not_the_listener_of_this_connection() -> None:
    async with listening() as rig:

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(bytes(ANSWER_BYTES))
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await writer.wait_closed()
            answered.set()

        answered = asyncio.Event()
        impostor = await asyncio.start_server(answer, "127.0.0.1", 0)
        rig.address = Address("tcp", *impostor.sockets[0].getsockname())
        left, _ = rig.prepare()
        with pytest.raises(BackendUnavailable, match="admits no lane"):
            await left.join(BOOTSTRAP)
        await answered.wait()
        impostor.close()
        await impostor.wait_closed()


async def test_a_listener_that_does_not_expect_it() -> None:
    async with listening() as rig:
        left, _ = rig.prepare()
        with pytest.raises(BackendUnavailable, match="cannot be reached"):
            await left.join(BOOTSTRAP)
        with pytest.raises(BackendUnavailable, match="closed before"):
            await left.join(BOOTSTRAP)


@pytest.mark.parametrize("address", [None, Address("inproc", "somewhere", 0)])
async def test_without_a_control_link_over_tcp_there_is_none(
    address: Address | None,
) -> None:
    context = LaneContext(role=Role.CLIENT, number=1, secret=bytes(32))
    with pytest.raises(BackendUnavailable, match="does not run over tcp"):
        TcpBackend().open_lane(dataclasses.replace(context, remote_address=address))


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in repr(
        LaneContext(role=Role.CLIENT, number=1, secret=bytes(32))
    )


def test_a_socket_that_is_gone_already_is_no_error() -> None:
    gone = socket.socket()
    gone.close()
    preamble = make_preamble(bytes(32), 1, bytes(NONCE_BYTES))
    PendingLanes().claim_socket(PlainWire(gone), ANYWHERE, preamble)
    assert gone.fileno() == -1


def test_so_many_lanes_may_wait_and_no_more() -> None:
    pending_lanes, lane = PendingLanes(), cast("TcpLane", object())
    for number in range(CONNECTIONS_MAX):
        pending_lanes.expect(number.to_bytes(16, "big"), lane)
    with pytest.raises(BackendUnavailable, match=f"{CONNECTIONS_MAX} lanes wait"):
        pending_lanes.expect(b"one more than all", lane)
    pending_lanes.forget(bytes(16))
    pending_lanes.expect(b"in the free place", lane)


# --- the first bytes on a lane's socket -----------------------------------------------


SECRET, NONCE = bytes(range(32)), bytes(range(100, 100 + preamble.NONCE_BYTES))
PREAMBLE = preamble.make_preamble(SECRET, 3, NONCE)


@given(st.binary(min_size=8, max_size=32))
def test_other_bytes_are_none(header: bytes) -> None:
    assert preamble.is_preamble(memoryview(header)) == (header[:8] == preamble.MAGIC)


def test_it_proves_one_lane_only() -> None:
    assert preamble.is_proof(PREAMBLE, SECRET, 3)
    assert not preamble.is_proof(PREAMBLE, SECRET, 4)
    assert not preamble.is_proof(PREAMBLE, bytes(32), 3)


@given(st.integers(0, preamble.PREAMBLE_BYTES * 8 - 1))
def test_every_bit_of_it_is_covered(bit: int) -> None:
    changed = bytearray(PREAMBLE)
    changed[bit // 8] ^= 1 << bit % 8
    assert not preamble.is_proof(bytes(changed), SECRET, 3)


def test_the_layout_is_that_of_the_protocol_page() -> None:
    def prove(purpose: bytes, data: bytes) -> bytes:
        text = b"kvwire tcp lane " + purpose + b"\0" + data
        return hmac.digest(SECRET, text, "sha256")

    fields = b"KVWIRE+L" + (3).to_bytes(8, "little") + prove(b"token", b"")[:16]
    fields += NONCE + bytes(160)
    assert fields + prove(b"client", fields) == PREAMBLE
    assert prove(b"server", PREAMBLE) == preamble.answer_to(PREAMBLE, SECRET)
