"""Lanes over TCP: how they come up, what strangers get, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from kvwire.backend import Link
from kvwire.backend.lane import LaneContext
from kvwire.errors import BackendUnavailable, ConnectionLost
from kvwire.limits import CONNECTIONS_MAX
from kvwire.types import Address, Role
from kvwire_tcp import TcpBackend
from kvwire_tcp.lane import BOOTSTRAP, PendingLanes, TcpLane
from kvwire_tcp.preamble import (
    ANSWER_BYTES,
    NONCE_BYTES,
    answer_to,
    make_preamble,
)
from kvwire_tcp.wire import PlainWire
from tests.backends.kvwire_tcp.lanes import BodyRecorder, Ends, House, house, raised
from tests.backends.kvwire_tcp.recorder import (
    ANYWHERE,
    VIEW,
    Body,
    Recorder,
)

SECRET = bytes(range(32))


class Door:
    """A house whose links are started, as a communicator would."""

    def __init__(self) -> None:
        self.handlers: list[Recorder] = []

    def accept(self, link: Link) -> None:
        self.handlers.append(Recorder())
        link.start(self.handlers[-1])


@pytest.fixture
async def home() -> AsyncIterator[House]:
    door = Door()
    async with house(door.accept) as made:
        yield made
    for handler in door.handlers:
        await handler.end()


async def knock(home: House, data: bytes) -> bytes:
    """Say something as a stranger; what comes back until the end."""
    reader, writer = await asyncio.open_connection(home.address.host, home.address.port)
    writer.write(data)
    got = b""
    with contextlib.suppress(ConnectionResetError):
        got = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionResetError):
        await writer.wait_closed()
    return got


def send(ends: Ends, data: bytes, kind: int = VIEW) -> None:
    """From the client to the server."""
    assert ends.client.send(memoryview(data), data) == b""
    ends.client.flush()
    ends.server.receive(b"", Body(len(data), 0, kind))


async def test_the_listener_may_send_before_the_client_is_there(home: House) -> None:
    client, server = home.lane(Role.CLIENT, SECRET), home.lane(Role.SERVER, SECRET)
    at_client, at_server = BodyRecorder(), BodyRecorder()
    await server.join(client.bootstrap, at_server)
    server.send(memoryview(b"first"), 1)
    server.flush()
    server.receive(b"", Body(2, 0, VIEW))
    assert (server.queued_bytes, at_server.sent) == (5, [])
    await client.join(server.bootstrap, at_client)
    client.send(memoryview(b"ok"), 1)
    client.flush()
    client.receive(b"", Body(5, 0, VIEW))
    await at_client.until(lambda: at_client.received)
    await at_server.until(lambda: at_server.received and at_server.writable)
    assert (at_client.contents, at_server.contents) == ([b"first"], [b"ok"])
    client.close()
    assert isinstance(await at_server.end(), ConnectionLost)
    assert await at_client.end() is None


async def test_a_lane_is_not_a_connection_and_its_first_link_says_so() -> None:
    door = Door()
    async with house(door.accept) as home, raised(home):
        error = await door.handlers[0].end()
        assert "a lane" in str(error)
        assert door.handlers[0].headers == 0


async def test_a_lane_that_ends_within_a_payload_is_lost(home: House) -> None:
    async with raised(home) as ends:
        send(ends, b"abc")
        ends.server.receive(b"", Body(9, 0, VIEW))
        ends.client.close()
        error = await ends.at_server.end()
        assert "after 0 of 9 payload bytes, 0 more expected" in str(error)
        assert ends.at_server.contents == [b"abc"]


# --- strangers ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
async def test_a_wrong_proof_leaves_the_lane_waiting(home: House, number: int) -> None:
    client, server = home.lane(Role.CLIENT, SECRET), home.lane(Role.SERVER, SECRET)
    at_client, at_server = BodyRecorder(), BodyRecorder()
    await server.join(BOOTSTRAP, at_server)
    forged = bytearray(make_preamble(SECRET, number, bytes(NONCE_BYTES)))
    if number == 1:
        forged[-1] ^= 1
    assert await knock(home, bytes(forged)) == b""
    await client.join(BOOTSTRAP, at_client)
    client.abort()
    assert isinstance(await at_server.end(), ConnectionLost)
    assert await at_client.end() is None


# --- what cannot be -------------------------------------------------------------------


async def test_a_peer_that_is_not_the_listener_of_this_connection(home: House) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(ANSWER_BYTES))
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
        answered.set()

    answered = asyncio.Event()
    impostor = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = impostor.sockets[0].getsockname()[1]
    client = home.lane(Role.CLIENT, SECRET, address=Address("tcp", "127.0.0.1", port))
    with pytest.raises(BackendUnavailable, match="admits no lane"):
        await client.join(BOOTSTRAP, BodyRecorder())
    await answered.wait()
    impostor.close()
    await impostor.wait_closed()


async def test_a_listener_that_does_not_expect_it(home: House) -> None:
    client = home.lane(Role.CLIENT, SECRET)
    with pytest.raises(BackendUnavailable, match="cannot be reached"):
        await client.join(BOOTSTRAP, BodyRecorder())
    with pytest.raises(BackendUnavailable, match="closed before"):
        await client.join(BOOTSTRAP, BodyRecorder())


@pytest.mark.parametrize("address", [None, Address("inproc", "somewhere", 0)])
async def test_without_a_control_link_over_tcp_there_is_none(
    address: Address | None,
) -> None:
    context = LaneContext(role=Role.CLIENT, number=1, secret=SECRET)
    with pytest.raises(BackendUnavailable, match="does not run over tcp"):
        TcpBackend().open_lane(dataclasses.replace(context, remote_address=address))


def test_a_secret_is_not_shown() -> None:
    assert "secret" not in repr(
        LaneContext(role=Role.CLIENT, number=1, secret=SECRET, remote_address=ANYWHERE)
    )


async def test_a_preamble_that_is_said_again_is_worth_nothing(home: House) -> None:
    server, handler = home.lane(Role.SERVER, SECRET), BodyRecorder()
    await server.join(BOOTSTRAP, handler)
    preamble = make_preamble(SECRET, 1, bytes(NONCE_BYTES))
    reader, writer = await asyncio.open_connection(home.address.host, home.address.port)
    writer.write(preamble)
    assert await reader.readexactly(ANSWER_BYTES) == answer_to(preamble, SECRET)
    assert await knock(home, preamble) == b""
    server.abort()
    assert await handler.end() is None
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()


def test_a_socket_that_is_gone_already_is_no_error() -> None:
    gone = socket.socket()
    gone.close()
    preamble = make_preamble(SECRET, 1, bytes(NONCE_BYTES))
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
