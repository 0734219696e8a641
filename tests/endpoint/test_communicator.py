"""Communicators: listening, connecting, handing out connections, ending."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvwire
from kvwire import (
    Address,
    BackendUnavailable,
    ClosedOK,
    Config,
    HandshakeError,
    HandshakeTimeout,
    UsageError,
)
from kvwire.backend import Availability, registry
from kvwire.security.keys import write_key_file
from kvwire_certify.conformance.rig import open_descriptors
from tests.security.test_keys import MALFORMED
from tests.support import inside
from tests.support.caches import Memory
from tests.support.pairs import SCHEMES, anywhere, communicators, connected, until

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/net is Linux's")
_TCP_LISTEN = "0A"


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    write_key_file(path)
    return str(path)


@pytest.fixture
async def deaf() -> AsyncIterator[Address]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Address("tcp", "127.0.0.1", listening.getsockname()[1])


def bound() -> dict[str, int]:
    """Addresses and ports that this process listens on, as the kernel knows them."""
    sockets = {
        what.removeprefix("socket:[").removesuffix("]")
        for what in open_descriptors().values()
    }
    found = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            columns = line.split()
            (host, _, port), state, inode = (
                columns[1].partition(":"),
                columns[3],
                columns[9],
            )
            if state == _TCP_LISTEN and inode in sockets:
                found[host] = int(port, 16)
    return found


# --- opening --------------------------------------------------------------------------


async def test_open_by_await_and_as_a_block(tmp_path: Path) -> None:
    path = tmp_path / "kvwire.toml"
    path.write_text('name = "from a file"\n')
    comm = await kvwire.open(path)
    assert comm.name == "from a file"
    assert repr(comm) == "<Communicator 'from a file', trust loopback, 0 connections>"
    await comm.close()
    assert "closed" in repr(comm)
    async with kvwire.open(Config(name="a config"), ping_misses=5) as comm:
        assert (comm.name, comm.config.ping_misses) == ("a config", 5)


async def test_what_opens_a_communicator_does_so_once() -> None:
    """Of two, the end of the block would close only the last."""
    opening = kvwire.open()
    async with opening as comm:
        with pytest.raises(UsageError, match=r"kvwire\.open: it was already opened"):
            await opening
        with pytest.raises(UsageError, match="call it again"):
            await opening.__aenter__()
    assert comm.closed
    awaited = kvwire.open()
    comm = await awaited
    with pytest.raises(UsageError, match="already opened"):
        async with awaited:
            pass
    assert not comm.closed
    await comm.close()


async def test_a_name_is_made_if_none_is_given() -> None:
    async with kvwire.open() as comm:
        assert comm.name.startswith(socket.gethostname())
    async with kvwire.open() as one, kvwire.open() as other:
        assert one.incarnation != other.incarnation
        assert len(one.incarnation) == 16


# --- listening ------------------------------------------------------------------------


@linux
@pytest.mark.parametrize(
    ("host", "in_kernel"),
    [
        ("127.0.0.1", "0100007F"),
        ("127.0.0.9", "0900007F"),
        ("[::1]", "00000000000000000000000001000000"),
    ],
)
async def test_nothing_but_the_address_asked_for_is_bound(
    host: str, in_kernel: str
) -> None:
    """Goal S3, which CVE-2025-47277 is the opposite of."""
    before = bound()
    async with communicators() as (near, far):
        address = await far.listen(f"{host}:0")
        assert bound() == before | {in_kernel: address.port}
        connection = await near.connect(address)
        assert bound() == before | {in_kernel: address.port}
        await connection.close()
    assert bound() == before


@linux
async def test_libraries_are_loaded_before_anybody_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a handshake they took longer than a peer waits. Never a forbidden one."""
    asked, ask = set[str](), registry.availability

    def availability(name: str) -> Availability:
        asked.add(name)
        return ask(name)

    monkeypatch.setattr(registry, "availability", availability)
    async with kvwire.open(forbid=["ucx"]) as comm:
        await comm.listen("127.0.0.1:0")
        assert asked == set(registry.names()) - {"ucx"}


# Ways to write what others can reach (goal S4).
REACHABLE = [
    "0.0.0.0",
    "0",
    "0x0",
    "00.0.0.0",
    "[::]",
    "[0:0:0:0:0:0:0:0]",
    "[::0.0.0.0]",
    "[::ffff:0.0.0.0]",
    "[::ffff:10.0.0.1]",
    "10.0.0.1",
    "192.0.2.7",
    "169.254.1.1",
    "224.0.0.1",
    "255.255.255.255",
    "[2001:db8::1]",
    "[fe80::1]",
]


@pytest.mark.parametrize("host", [*REACHABLE, *MALFORMED])
async def test_no_address_of_others_without_a_trust_mode(host: str) -> None:
    """Goal S4: refused for listening and for connecting, and not merely warned of."""
    async with kvwire.open() as comm:
        before = bound()
        with pytest.raises(UsageError, match=r"address|trust"):
            await comm.listen(f"{host}:0")
        with pytest.raises(UsageError, match=r"address|trust"):
            await comm.connect(f"{host}:7400")
        assert bound() == before


async def test_with_a_key_every_interface_may_be_listened_on(key: str) -> None:
    async with communicators(trust="psk", psk_file=key) as (near, far):
        address = await far.listen("0.0.0.0:0")
        connection = await near.connect(f"127.0.0.1:{address.port}")
        assert connection.peer.incarnation == far.incarnation
        await connection.close()


async def test_an_address_is_listened_on_once() -> None:
    for scheme in SCHEMES:
        async with communicators() as (near, far):
            address = await far.listen(anywhere(scheme))
            for comm in (near, far):
                with pytest.raises(kvwire.ListenError, match=r"in use|taken") as caught:
                    await comm.listen(address)
                assert isinstance(caught.value, kvwire.KVWireError)
                assert isinstance(caught.value, OSError)
                assert caught.value.address == str(address) in str(caught.value)
                assert caught.value.errno == errno.EADDRINUSE
        async with kvwire.open() as comm:
            assert await comm.listen(address) == address


async def test_a_scheme_that_nobody_offers() -> None:
    async with kvwire.open(require=["tcp"]) as comm:
        with pytest.raises(BackendUnavailable, match="not among `require` = tcp"):
            await comm.listen("inproc://")
    async with kvwire.open(forbid=["tcp"]) as comm:
        with pytest.raises(BackendUnavailable, match="no backend called 'carrier'"):
            await comm.listen("carrier://pigeon:1")
        with pytest.raises(BackendUnavailable, match="forbidden by `forbid`"):
            await comm.listen("127.0.0.1:0")
        with pytest.raises(BackendUnavailable, match="forbidden by `forbid`"):
            await comm.connect("127.0.0.1:7400")


# --- connecting -----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_communicator_does_not_dial_itself(scheme: str) -> None:
    """Its transfers would wait for a peer that is nobody else."""
    async with kvwire.open() as comm:
        address = await comm.listen(anywhere(scheme))
        with pytest.raises(
            kvwire.ConnectError, match="dialled its own address"
        ) as caught:
            await comm.connect(address)
        assert caught.value.address == str(address)
        peer = comm.peer(str(address))
        with pytest.raises(kvwire.ConnectError, match="dialled its own address"):
            await peer.connect()
        assert not comm.live_connections


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_nobody_listens_there(scheme: str) -> None:
    async with kvwire.open() as comm:
        address = await comm.listen(anywhere(scheme))
    async with kvwire.open() as comm:
        with pytest.raises(kvwire.ConnectError, match="cannot connect to") as caught:
            await comm.connect(address)
    assert isinstance(caught.value, kvwire.KVWireError)
    assert isinstance(caught.value, OSError)
    assert caught.value.address == str(address) in str(caught.value)
    assert caught.value.errno == errno.ECONNREFUSED
    assert "refused" in str(caught.value) or "nothing" in str(caught.value)


@pytest.mark.parametrize("configured", [True, False])
async def test_a_peer_that_says_nothing(deaf: Address, configured: bool) -> None:
    config: dict[str, Any] = {"handshake_timeout_s": 0.05} if configured else {}
    async with kvwire.open(**config) as comm:
        with pytest.raises(HandshakeTimeout, match=r"0\.05 s; it waited for ACCEPT"):
            await comm.connect(deaf, timeout_s=None if configured else 0.05)
        await until(lambda: not inside.drivers(comm))


@pytest.mark.parametrize("turns", range(4))
async def test_close_while_connecting(deaf: Address, turns: int) -> None:
    comm = await kvwire.open()
    connecting = asyncio.create_task(comm.connect(deaf))
    for _ in range(turns):
        await asyncio.sleep(0)
    await comm.close()
    with pytest.raises(ClosedOK, match="the communicator is closed"):
        await connecting
    await until(lambda: not inside.drivers(comm))
    assert not comm.live_connections


# --- who the peer is ------------------------------------------------------------------


def trusting(key: str, *accepted: str) -> dict[str, Any]:
    return {"trust": "psk", "psk_file": key, "psk_accept_files": accepted}


async def test_keys_are_rotated_without_a_gap(key: str, tmp_path: Path) -> None:
    """The new key is accepted everywhere, then used, then the old one is removed."""
    new = str(tmp_path / "new")
    write_key_file(Path(new))
    steps = [trusting(key), trusting(key, new), trusting(new, key), trusting(new)]
    for near_step, far_step in [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2)]:
        async with (
            kvwire.open(**steps[near_step]) as near,
            kvwire.open(**steps[far_step]) as far,
        ):
            address = await far.listen("127.0.0.1:0")
            connection = await near.connect(address)
            assert connection.peer.incarnation == far.incarnation
            await connection.close()


# --- handing out ----------------------------------------------------------------------


async def test_two_iterators_share_the_connections() -> None:
    async with communicators() as (near, far):
        address = await far.listen("127.0.0.1:0")
        taken: list[bytes] = []

        async def take() -> None:
            taken.extend([c._digest async for c in far.connections()])

        takers = [asyncio.create_task(take()) for _ in range(2)]
        ends = [await near.connect(address) for _ in range(6)]
        await until(lambda: len(far.live_connections) == 6)
        await far.close()
        await asyncio.gather(*takers)
        assert sorted(taken) == sorted(end._digest for end in ends)


async def test_nothing_comes_after_close() -> None:
    async with communicators() as (near, far):
        await near.connect(await far.listen("127.0.0.1:0"))
        await until(lambda: len(far.live_connections))
        await far.close()
        assert [connection async for connection in far.connections()] == []
        for _ in range(2):
            with pytest.raises(ClosedOK):
                await far.accept()


async def test_a_connection_that_has_ended_still_brings_its_messages() -> None:
    async with communicators() as (near, far):
        connection = await near.connect(await far.listen("127.0.0.1:0"))
        await connection.send(1, b"left behind")
        await connection.close()
        other = await far.accept()
        assert other.closed
        assert await other.recv(1) == b"left behind"


async def test_connections_that_nobody_takes_are_bounded() -> None:
    """Also those that ended, since what they brought is kept."""
    async with kvwire.open() as near, kvwire.open(connections_max=3) as far:
        address = await far.listen("127.0.0.1:0")
        for _ in range(3):
            async with await near.connect(address) as connection:
                await connection.send(1, b"unread")
        await until(lambda: not far.live_connections)
        with pytest.raises(HandshakeError, match="reached its connections_max"):
            await near.connect(address)
        await far.accept()
        await (await near.connect(address)).close()


async def test_connections_at_once_are_bounded() -> None:
    async with kvwire.open() as near, kvwire.open(connections_max=2) as far:
        address = await far.listen("127.0.0.1:0")
        first, _ = [await near.connect(address) for _ in range(2)]
        for _ in range(2):
            await far.accept()
        with pytest.raises(HandshakeError, match="connections_max"):
            await near.connect(address)
        await first.close()
        await until(lambda: len(far.live_connections) == 1)
        await near.connect(address)


async def test_unread_messages_go_with_their_connection() -> None:
    async with communicators() as (near, far):
        connection = await near.connect(await far.listen("127.0.0.1:0"))
        for tag in (*[1] * 10, 2):
            await connection.send(tag, b"never asked for")
        other = await far.accept()
        await other.recv(2)
        assert len(inside.buffers(far)) == 0
        assert bytes(await other.recv(1)) == b"never asked for"
        await connection.close()
        await other.wait_closed()
        gone = weakref.ref(other)
        del other, connection
        await asyncio.sleep(0)
        gc.collect()
        assert gone() is None
        assert len(inside.buffers(far)) == len(inside.buffers(far).holds) == 0


# --- the end --------------------------------------------------------------------------


async def test_after_close_every_call_says_so() -> None:
    comm = await kvwire.open()
    await comm.close()
    await comm.close()
    with pytest.raises(ClosedOK, match="the communicator is closed"):
        await comm.listen("127.0.0.1:0")
    with pytest.raises(ClosedOK, match="the communicator is closed"):
        await comm.connect("127.0.0.1:7400")
    with pytest.raises(ClosedOK, match="the communicator is closed"):
        comm.register(bytearray(1))


async def test_close_ends_connections_gracefully_and_listeners() -> None:
    async with connected() as pair:
        waiting = pair.left.recv(1)
        await pair.right.send(2, b"last")
        await pair.far.close()
        with pytest.raises(ClosedOK):
            await waiting
        assert await pair.left.recv(2) == b"last"
        with pytest.raises(kvwire.ConnectError):
            await pair.near.connect(pair.address)


async def test_a_block_left_by_an_exception_aborts() -> None:
    async with kvwire.open() as near:
        far = kvwire.open()
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is the test
            async with far as comm:
                connection = await near.connect(await comm.listen("127.0.0.1:0"))
                raise ZeroDivisionError
        await connection.wait_closed()
        with pytest.raises(kvwire.ConnectionLost):
            await connection.send(1, b"x")


async def test_cancelling_close_and_closing_again() -> None:
    async with connected() as pair:
        pair.right.send(1, bytes(1 << 20))  # close waits for it to be received
        closing = asyncio.create_task(pair.far.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        again = asyncio.create_task(pair.far.close())
        assert len(await pair.left.recv(1)) == 1 << 20
        await again
        assert not inside.drivers(pair.far)


async def closing(count: int) -> int:
    """The calls, of Python and of C, of a close with so many published requests."""
    calls = 0

    def seen(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    cache = Memory().cache
    async with kvwire.open() as comm:
        held = [comm.publish(number, cache, [number % 4]) for number in range(count)]
        sys.setprofile(seen)
        try:
            await comm.close()
        finally:
            sys.setprofile(None)
    assert all(one.is_drained for one in held)
    return calls


async def test_a_close_takes_the_same_for_each_published_request() -> None:
    few, many = await closing(200), await closing(2000)
    assert many <= 11 * few
    assert many <= 2000 * 90
