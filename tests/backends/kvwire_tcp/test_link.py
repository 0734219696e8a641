"""What a link promises while it lives: order, whole frames, memory, back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvwire.backend import Finding, Landing, Payload
from kvwire.errors import ConnectionLost, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import HEADER_BYTES, MIB, WAKEUP_BYTES
from kvwire.memory.copy import address_of
from kvwire.types import Address
from kvwire_tcp import TcpBackend, options
from kvwire_tcp.duplex import CALLS_PER_WAKEUP, LINGER_S
from kvwire_tcp.link import TcpLink
from kvwire_tcp.options import address_from, findings, tune
from kvwire_tcp.payloads import PayloadReader
from kvwire_tcp.reader import SCRATCH_BYTES
from kvwire_tcp.wire import PlainWire
from kvwire_tcp.writer import JOINED_BYTES_MAX
from tests.backends.kvwire_tcp.by_hand import alone
from tests.backends.kvwire_tcp.recorder import (
    DROP,
    PIECES,
    VIEW,
    Body,
    Recorder,
    against_a_socket,
    header,
    linked,
)

# More than the kernel holds on both sides of loopback, so that some must wait.
MORE_THAN_FITS = 24 * MIB


async def test_a_small_frame_sent_now_leaves_nothing_in_the_queue() -> None:
    async with linked() as pair:
        assert pair.near.send_now(header(5, 0), memoryview(b"12345"), "first")
        assert pair.near.queued_bytes == 0
        assert pair.near.send_now(header(0, 1))
        large = os.urandom(JOINED_BYTES_MAX + 1)
        assert pair.near.send_now(header(len(large), 2), memoryview(large), "third")
        pair.near.send(header(1, 3), memoryview(b"3"), "token")
        assert pair.at_near.sent == []
        assert not pair.near.send_now(header(1, 4), memoryview(b"4"), "last")
        assert pair.at_near.sent == []
        pair.near.flush()
        assert pair.at_near.sent == ["token", "last"], "those that had to be queued"
        await pair.at_far.received(5)
        assert [body for _, body in pair.at_far.frames] == [
            *(b"12345", b"", large, b"3", b"4")
        ]


@pytest.mark.parametrize("room", [0, 1, HEADER_BYTES, HEADER_BYTES + 4])
async def test_what_is_left_of_a_frame_sent_now_goes_when_there_is_room(
    room: int,
) -> None:
    def full(sock: socket.socket) -> PlainWire:
        wire = PlainWire(sock)

        def send(data: bytes) -> int:
            wire.send = sock.send
            if not room:
                raise BlockingIOError
            return sock.send(data[:room])

        wire.send = send
        return wire

    body = bytearray(b"12345")
    async with alone(full) as (link, told, turns, peer):
        with told.calling("send"):
            assert not link.send_now(header(5, 0), memoryview(body))
        link.flush()
        assert link.queued_bytes == HEADER_BYTES + 5 - room
        body[:] = bytes(5)  # it is free
        link.send_now(header(0, 1))
        turns.writable()
        sent = header(5, 0) + b"12345" + header(0, 1)
        assert peer.recv(len(sent), socket.MSG_WAITALL) == sent
        assert told.writable
        assert link.queued_bytes == 0


@pytest.mark.parametrize("fragments", [False, True])
async def test_memory_is_lent_if_only_a_part_of_a_frame_was_taken(
    fragments: bool,
) -> None:
    async with linked() as pair:
        data = np.frombuffer(os.urandom(MORE_THAN_FITS), np.uint8)
        payload: Payload = data.data
        if fragments:
            halves = np.array([data.size // 2] * 2, np.uint64)
            first = address_of(data.data)
            places = np.array([first, first + data.size // 2], np.uint64)
            payload = Fragments(places, halves, owner=data, writable=False)
        assert not pair.near.send_now(header(data.size, 0), payload, "token")
        assert 0 < pair.near.queued_bytes < data.size
        pair.near.flush()
        assert pair.at_near.sent == []
        await pair.at_far.received(1)
        await pair.at_near.until(lambda: pair.at_near.sent == ["token"])
        assert pair.at_far.frames == [(0, data.tobytes())]


async def test_a_socket_that_fails_while_a_frame_is_sent_now_ends_the_link() -> None:
    def broken(sock: socket.socket) -> PlainWire:
        wire = PlainWire(sock)
        wire.send = Mock(side_effect=BrokenPipeError)
        return wire

    async with alone(broken) as (link, told, _, _):
        link.send_now(header(0, 1))
        await told.until(lambda: told.closed)
        assert isinstance(told.closed[0], ConnectionLost)


async def test_a_wakeup_delivers_a_share_of_a_burst_of_small_frames() -> None:
    async with alone() as (_, told, turns, peer):
        share = CALLS_PER_WAKEUP * SCRATCH_BYTES // HEADER_BYTES
        peer.sendall(header(0) * (share + 9))
        turns.readable()
        assert len(told.frames) == share
        turns.readable()
        assert len(told.frames) == share + 9


# --- how links end --------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 9, 3 * WAKEUP_BYTES])
async def test_a_reset_that_comes_with_the_last_bytes_is_not_missed(
    length: int,
) -> None:
    """libuv reports the error once, together with what can still be received."""
    async with against_a_socket() as (_, recorder, peer):
        peer.settimeout(0)
        frame = memoryview(header(length, 1, DROP) + bytes(length))
        with contextlib.suppress(BlockingIOError):
            while frame:
                frame = frame[peer.send(frame) :]
        reset(peer)
        error = await recorder.end()
        assert isinstance(error, ConnectionLost)
        assert isinstance(error.__cause__, ConnectionResetError)
        assert recorder.headers == 1


async def test_frames_sent_before_the_peer_broke_are_delivered_first() -> None:
    """A peer may say why it leaves; our own failed send must not hide it."""
    async with against_a_socket() as (link, recorder, peer):
        peer.sendall(header(3, 1) + b"why")
        reset(peer)
        link.send(header(0), None, "late")
        link.flush()
        error = await recorder.end()
        assert isinstance(error, ConnectionLost)
        assert isinstance(error.__cause__, OSError)
        assert error.__cause__.errno in (errno.EPIPE, errno.ECONNRESET)
        assert recorder.frames == [(1, b"why")]
        assert recorder.sent == []


@pytest.mark.parametrize(
    ("unread", "left"), [(0, "all was sent"), (MORE_THAN_FITS, "bytes unsent")]
)
async def test_a_peer_that_does_not_end_is_given_up(unread: int, left: str) -> None:
    """Or that does not read: the error has what is left."""
    async with alone() as (link, told, turns, _):
        if unread:
            link.send(header(unread), memoryview(bytes(unread)), 1)
        link.close()
        await asyncio.sleep(0)
        if unread:
            turns.time_is_up()
            assert len(turns.timers) == 2, "it takes something"
        turns.time_is_up()
        error = await told.end()
        assert isinstance(error, ConnectionLost)
        assert f"did not end the connection within {LINGER_S:g} s" in str(error)
        assert left in str(error)


async def test_a_slow_peer_is_waited_for_while_it_takes_something() -> None:
    async with alone() as (link, told, turns, peer):
        link.send(header(MORE_THAN_FITS), memoryview(bytes(MORE_THAN_FITS)), 1)
        link.close()
        got, all_bytes = 0, HEADER_BYTES + MORE_THAN_FITS
        while got < all_bytes:
            await asyncio.sleep(0)
            turns.writable()
            taken = all_bytes - link.queued_bytes - got
            got += len(peer.recv(min(MIB, taken), socket.MSG_WAITALL))
            if link.queued_bytes:
                turns.time_is_up()
            assert not told.closed
        assert len(turns.timers) > 2
        peer.close()
        await asyncio.sleep(0)
        turns.readable()
        assert await told.end() is None


async def test_a_handler_that_raises_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bug = RuntimeError("a bug of the handler")

    def broken(*_: object) -> None:
        raise bug

    async with against_a_socket() as (_, recorder, peer):
        recorder.body_received = broken  # type: ignore[method-assign, assignment]
        peer.sendall(header(3, 1) + b"abc")
        assert await recorder.end() is bug
    assert "its handler raised" in caplog.text
    assert bug in [record.exc_info[1] for record in caplog.records if record.exc_info]


async def test_abort_after_the_loop_has_closed_only_closes_the_socket() -> None:
    loop = asyncio.new_event_loop()
    near, far = socket.socketpair()
    with far:
        near.setblocking(False)
        link = TcpLink(PlainWire(near), Address("tcp", "::1", 1), loop)
        recorder = Recorder()
        link.start(recorder)
        loop.close()
        link.abort()
        assert near.fileno() == -1
        assert recorder.closed == []


def reset(peer: socket.socket) -> None:
    """Close with RST."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


# --- traps of bulk data over sockets in Python, by their numbers --------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
async def test_trap_31_a_huge_send_is_not_copied_and_does_not_block() -> None:
    """asyncio's transports of CPython 3.11 copy what they cannot send: 0.7 s here."""
    async with alone() as (link, told, turns, _):
        body = np.zeros(256 * MIB, np.uint8).data
        before = resident_bytes()
        link.send(header(len(body)), body, "bulk")
        link.flush()
        queued = link.queued_bytes
        # One wake-up's bytes and no more: a loop blocked for about a millisecond.
        assert HEADER_BYTES + len(body) - queued <= 2 * WAKEUP_BYTES
        while link.queued_bytes > 240 * MIB:
            turns.writable()
            if link.queued_bytes == queued:
                break
            queued = link.queued_bytes
        assert link.queued_bytes >= 200 * MIB, "the peer never reads"
        assert resident_bytes() - before < 32 * MIB
        assert told.sent == []


async def test_trap_35_buffer_sizes_are_left_to_the_kernel() -> None:
    """Setting SO_RCVBUF switches autotuning off, at less than it would reach."""
    options: list[tuple[int, ...]] = []

    class Noting(socket.socket):
        def setsockopt(self, *args: int) -> None:  # type: ignore[override]
            options.append(args)
            super().setsockopt(*args)

    with Noting(socket.AF_INET, socket.SOCK_STREAM) as noting:
        tune(noting, "127.0.0.1")
    names = {option[:2] for option in options}
    assert (socket.IPPROTO_TCP, socket.TCP_NODELAY) in names
    for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        assert (socket.SOL_SOCKET, name) not in names
    async with alone() as (_, _, turns, peer):
        for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            ours = turns.sock.getsockopt(socket.SOL_SOCKET, name)
            assert ours >= peer.getsockopt(socket.SOL_SOCKET, name) // 2


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- the options of a link's socket, as the kernel has them ---------------------------


EXPECTED = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": options.KEEPALIVE_IDLE_S,
    "TCP_KEEPINTVL": options.KEEPALIVE_INTERVAL_S,
    "TCP_KEEPCNT": options.KEEPALIVE_COUNT,
    "TCP_USER_TIMEOUT": options.USER_TIMEOUT_MS,
    "TCP_NOTSENT_LOWAT": options.NOTSENT_LOWAT_BYTES,
}


async def test_both_ends_have_the_options() -> None:
    async with linked() as pair:
        for link in (pair.near, pair.far):
            sock = link._sock
            assert not sock.getblocking()
            assert not sock.get_inheritable()
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for name, value in EXPECTED.items():
                if hasattr(socket, name):
                    option = getattr(socket, name)
                    assert sock.getsockopt(socket.IPPROTO_TCP, option) == value, name


@pytest.mark.parametrize("name", [n for n in EXPECTED if hasattr(socket, n)])
def test_an_option_that_the_platform_lacks_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = getattr(socket, name)
    with socket.socket() as sock:
        before = sock.getsockopt(socket.IPPROTO_TCP, option)
        monkeypatch.delattr(socket, name)
        tune(sock, "192.0.2.1")
        assert sock.getsockopt(socket.IPPROTO_TCP, option) == before
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


needs_congestion = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="this platform cannot choose"
)


def congestion(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@needs_congestion
@pytest.mark.parametrize(
    ("family", "host", "chosen"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "127.9.9.9", True),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::ffff:127.0.0.1", True),
        (socket.AF_INET, "192.0.2.1", False),
        (socket.AF_INET6, "fe80::1%eth0", False),
    ],
)
def test_congestion_control_is_chosen_on_loopback_only(
    family: socket.AddressFamily, host: str, chosen: bool
) -> None:
    with socket.socket(family) as sock:
        default = congestion(sock)
        tune(sock, host)
        expected = options.LOOPBACK_CONGESTION if chosen else default
        assert congestion(sock) == expected


def look(root: Path, **settings: str) -> dict[str, Finding]:
    folder = root / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    for name, text in settings.items():
        (folder / name).write_text(f"{text}\n")
    return {finding.name: finding for finding in findings(root)}


def test_an_address_of_one_link_says_of_which() -> None:
    """Without it nothing leads there: EINVAL, of each lane too."""
    address = address_from(("fe80::1", 7400, 0, 2))
    assert Address.parse(str(address)) == address == Address("tcp", "fe80::1%2", 7400)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    assert found[0][4] == ("fe80::1", 7400, 0, 2)
    assert address_from(("::1", 7400, 0, 0)) == Address("tcp", "::1", 7400)


def test_the_defaults_of_linux_are_in_order(tmp_path: Path) -> None:
    found = look(
        tmp_path,
        tcp_rmem="4096\t131072\t6291456",
        tcp_wmem="4096\t16384\t4194304",
        tcp_moderate_rcvbuf="1",
    )
    assert [finding.state for finding in found.values()] == ["ok", "ok"]
    assert "4 MiB, 33.6 Gbit/s" in found["send buffer"].text


def test_a_range_that_ends_early(tmp_path: Path) -> None:
    found = look(tmp_path, tcp_rmem="4096 87380 1048576", tcp_wmem="4096 16384 8388608")
    one = found["receive buffer"]
    assert (one.state, one.remedy) == (
        "warn",
        'sysctl net.ipv4.tcp_rmem="4096 87380 33554432"',
    )
    assert "at most 1 MiB, 8.39 Gbit/s" in one.text
    assert found["send buffer"].state == "ok"


def test_autotuning_that_is_off(tmp_path: Path) -> None:
    found = look(tmp_path, tcp_rmem="4096 131072 33554432", tcp_moderate_rcvbuf="0")
    one = found["receive buffer"]
    assert (one.state, one.remedy) == ("warn", "sysctl net.ipv4.tcp_moderate_rcvbuf=1")
    assert "stays at 0.125 MiB" in one.text


@pytest.mark.parametrize("text", ["", "4096 131072", "a b c"])
def test_what_is_not_linux_has_nothing_to_say(tmp_path: Path, text: str) -> None:
    assert look(tmp_path, tcp_rmem=text) == {}


def test_the_backend_tells_the_doctor() -> None:
    assert TcpBackend.diagnose() == findings()


# --- payloads without frames: each to its place, in the order they were expected ------


@dataclass
class Wire:
    """A reader on one end of a socket pair."""

    peer: socket.socket
    sock: socket.socket
    landed: list[Landing] = field(default_factory=list)
    early: int = 0

    def __post_init__(self) -> None:
        self.reader = PayloadReader(self.landed.append, self._note_early)

    def expect(self, length: int, kind: int = VIEW) -> Body:
        body = Body(length, 0, kind)
        self.reader.expect(body)
        return body

    def pour(self, data: bytes) -> None:
        """Send and receive at the same time, as much as each call takes."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.peer.send(rest) :]
            self.take()

    def take(self) -> None:
        """Receive until nothing is left."""
        while True:
            try:
                count = self.reader.receive(PlainWire(self.sock))
            except BlockingIOError:
                return
            assert count, "the stream goes on"
            self.reader.deliver(count)

    def _note_early(self) -> None:
        self.early += 1


@pytest.fixture
def wire() -> Iterator[Wire]:
    peer, sock = socket.socketpair()
    sock.setblocking(False)
    with peer, sock:
        yield Wire(peer, sock)


@pytest.mark.parametrize("seed", range(6))
def test_payloads_of_every_kind_land_however_the_bytes_are_cut(
    wire: Wire, seed: int
) -> None:
    choice = random.Random(seed)
    lengths = [choice.choice([1, 7, 4096, 70_001, 200_000]) for _ in range(12)]
    kinds = [choice.choice([VIEW, PIECES, DROP]) for _ in lengths]
    bodies = [wire.expect(n, kind) for n, kind in zip(lengths, kinds, strict=True)]
    data = os.urandom(sum(lengths))
    rest = data
    while rest:
        cut = choice.choice([1, 100, 5000, 150_000])
        wire.pour(rest[:cut])
        rest = rest[cut:]
    assert wire.landed == bodies
    assert wire.reader.received_bytes == len(data)
    assert wire.early == 0
    for body, length in zip(bodies, lengths, strict=True):
        part, data = data[:length], data[length:]
        assert body.content in (None, part)
        assert (body.content is None) == (body.payload is None)


def test_bytes_that_nobody_expects_stay_where_they_are(wire: Wire) -> None:
    wire.peer.sendall(b"early")
    wire.take()
    assert (wire.early, wire.reader.received_bytes) == (1, 0)
    body = wire.expect(5)
    wire.take()
    assert body.content == b"early"
    assert wire.early == 1


def test_the_end_is_seen_when_nothing_is_expected_and_within_a_payload(
    wire: Wire,
) -> None:
    wire.expect(3)
    wire.peer.sendall(b"no")
    wire.peer.shutdown(socket.SHUT_WR)
    wire.reader.deliver(wire.reader.receive(PlainWire(wire.sock)))
    assert wire.reader.receive(PlainWire(wire.sock)) == 0
    assert wire.reader.position == "2 of 3 payload bytes, 0 more expected"
    wire.reader.stop()
    assert wire.reader.receive(PlainWire(wire.sock)) == 0
    assert wire.reader.position == ""


def test_a_destination_of_another_length_is_refused(wire: Wire) -> None:
    with pytest.raises(UsageError, match="3 bytes does not fit a payload of 4"):
        wire.reader.expect(Landing(4, memoryview(bytearray(3))))
    with pytest.raises(UsageError, match="read-only: True"):
        wire.reader.expect(Landing(3, memoryview(bytes(3))))
    assert wire.reader.position == ""
