"""The pump between memory, TLS and a socket: what it keeps, in any portions."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import AuthenticationFailed
from kvwire.limits import HEADER_BYTES, KIB
from kvwire.memory.iovec import Iovecs
from kvwire.types import Role
from kvwire_tcp.tls_wire import PIECE_BYTES, STRANGER_BYTES, UNSENT_BYTES_MAX
from tests.backends.kvwire_tcp.recorder import gathered, header, pieces_of
from tests.backends.kvwire_tcp.tls import ALL, Wires, blocked
from tests.support.certificates import Authority
from tests.support.depth import examples, sample

# Around what TLS and the wire cut at.
SIZES = [1, 31, HEADER_BYTES, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, PIECE_BYTES + 1]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def wires(authority: Authority) -> Wires:
    made = Wires(authority)
    made.shake()
    return made


def received(wires: Wires, role: Role = Role.SERVER) -> bytes:
    """All that one side can receive now."""
    target, got = memoryview(bytearray(2 * PIECE_BYTES)), b""
    while True:
        try:
            count = wires.wires[role].recv_into(target)
        except BlockingIOError:
            return got
        if not count:
            return got
        got += target[:count]


# --- any portions ---------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(60), print_blob=True)
@given(seed=st.integers(0, 2**32), tight=st.booleans())
def test_what_is_sent_is_received_in_any_portions(
    authority: Authority, seed: int, tight: bool
) -> None:
    """Views, lists and looks, through a network that takes and gives what it likes."""
    rng = random.Random(seed)
    wires = Wires(authority)
    for sock in wires.socks.values():
        sock.split = lambda most: rng.choice((0, 1, rng.randint(0, most), most))
    wires.shake()
    sent = {role: bytearray() for role in Role}
    got = {role: bytearray() for role in Role}
    for _ in range(40):
        role = rng.choice(list(Role))
        if tight:
            wires.socks[role].out.room = rng.choice((0, 100, 20_000, ALL))
        _send_some(wires, role, sent[role], rng)
        _receive_some(wires, role.other, got[role], rng)
        assert wires.wires[role].unsent <= UNSENT_BYTES_MAX
    for role in Role:
        wires.socks[role].out.room = ALL
        wires.socks[role].split = wires.socks[role.other].split = lambda most: most
        wires.wires[role].flush()
        got[role] += received(wires, role.other)
        assert got[role] == sent[role]
        assert not wires.wires[role.other].more


def _send_some(wires: Wires, role: Role, sent: bytearray, rng: random.Random) -> None:
    wire, size = wires.wires[role], rng.choice(SIZES)
    data = rng.randbytes(size)
    try:
        match rng.randrange(3):
            case 0:
                sent += data[: wire.send(data)]
            case 1:
                views: list[bytes | memoryview] = [data, memoryview(data), b"end"]
                sent += b"".join(views)[: wire.sendmsg(views)]
            case _:
                arena = bytearray(rng.randbytes(2 * size))
                head = header(size, 0)
                part = Iovecs(pieces_of(arena, size), head)
                whole = head + gathered(arena, size)
                while part.rest:
                    count = wire.send_list(part)
                    sent += whole[len(whole) - part.rest :][:count]
                    part.rest -= count
    except BlockingIOError:
        pass


def _receive_some(wires: Wires, role: Role, got: bytearray, rng: random.Random) -> None:
    wire, size = wires.wires[role], rng.choice(SIZES)
    try:
        match rng.randrange(4):
            case 0:
                assert wire.look()
                assert wire.more
            case 1:
                arena = bytearray(2 * size)
                part = Iovecs(pieces_of(arena, size))
                count = wire.recv_list(part)
                assert part.asked >= count
                got += gathered(arena, size)[:count]
            case 2:
                first, second = bytearray(size), bytearray(9)
                count = wire.recv_two(memoryview(first), memoryview(second))
                assert count <= size
                got += first[:count]
            case _:
                target = bytearray(size)
                got += target[: wire.recv_into(memoryview(target))]
    except BlockingIOError:
        pass


def test_a_call_moves_a_piece_at_most(wires: Wires) -> None:
    """Encrypting more would stop the loop; so would decrypting it."""
    data = os.urandom(3 * PIECE_BYTES)
    assert wires.client.send(data) == PIECE_BYTES
    assert wires.client.sendmsg([b"small", data]) == PIECE_BYTES
    assert wires.client.sendmsg([memoryview(data), b"small"]) == PIECE_BYTES
    target = memoryview(bytearray(len(data)))
    assert 0 < wires.server.recv_into(target) <= PIECE_BYTES


def test_nothing_more_is_encrypted_before_the_last_is_gone(wires: Wires) -> None:
    wires.socks[Role.CLIENT].out.room = 1000
    assert wires.client.send(bytes(5000)) == 5000
    unsent = wires.client.unsent
    assert 4000 < unsent < 5000
    for _ in range(2):
        assert blocked(lambda: wires.client.send(b"more"))
        assert wires.client.unsent == unsent
    wires.socks[Role.CLIENT].out.room = ALL
    assert wires.client.send(b"more") == 4
    assert received(wires) == bytes(5000) + b"more"


def test_what_was_received_and_not_read_is_known(wires: Wires) -> None:
    """The socket will not say so again."""
    wires.client.send(b"some bytes")
    byte = memoryview(bytearray(1))
    assert wires.server.recv_into(byte) == 1
    assert not wires.socks[Role.SERVER].into.held
    assert wires.server.more
    assert received(wires) == b"ome bytes"
    assert not wires.server.more


def test_whoever_asks_for_keys_and_takes_none_is_cut_off(wires: Wires) -> None:
    """Answers to it would fill our memory. (No API makes a KeyUpdate.)"""
    answers = bytes(UNSENT_BYTES_MAX)
    wires.server._outgoing.write(answers)
    wires.client.send(b"x")
    byte = memoryview(bytearray(1))
    assert wires.server.recv_into(byte) == 1
    wires.server._outgoing.write(b"one more")
    wires.client.send(b"y")
    with pytest.raises(
        ConnectionAbortedError, match="new TLS keys faster than it reads"
    ):
        wires.server.recv_into(byte)


# --- the end --------------------------------------------------------------------------


def test_after_the_end_the_other_way_is_open(wires: Wires) -> None:
    wires.client.send_end()
    wires.client.flush()
    assert received(wires) == b""
    wires.server.send(b"still here")
    wires.server.send_end()
    wires.server.flush()
    assert received(wires, Role.CLIENT) == b"still here"
    assert wires.client.recv_into(memoryview(bytearray(1))) == 0


@pytest.mark.parametrize("read", [0, 1, 20 * KIB])
def test_saying_the_end_drops_nothing_that_was_not_read(
    wires: Wires, read: int
) -> None:
    data = os.urandom(100 * KIB)
    wires.server.send(data)
    held = wires.socks[Role.CLIENT].into.held
    cut = len(held) // 2  # within a record
    rest = bytes(held[cut:])
    del held[cut:]
    target = memoryview(bytearray(read or 1))
    got = b""
    if read:
        got = bytes(target[: wires.client.recv_into(target)])
    else:
        assert wires.client.look()
    wires.client.send_end()
    held += rest
    assert got + received(wires, Role.CLIENT) == data


def test_an_end_that_was_not_said_is_an_error(authority: Authority) -> None:
    """Whoever cuts the stream at a byte of his choice makes no end of it."""
    for cut in range(30):
        wires = Wires(authority)
        wires.shake()
        wires.client.send(b"told")
        into = wires.socks[Role.SERVER].into
        whole = cut >= len(into.held)
        del into.held[cut:]
        into.ended = True
        target = memoryview(bytearray(9))
        if whole:
            assert wires.server.recv_into(target) == 4
        with pytest.raises(ConnectionResetError, match="cut off"):
            wires.server.recv_into(target)


def test_one_changed_bit_is_an_error(wires: Wires) -> None:
    """What came whole before it is given out first."""
    wires.client.send(b"fine")
    into = wires.socks[Role.SERVER].into
    border = len(into.held)
    wires.client.send(b"changed")
    into.held[border + 9] ^= 1
    target = memoryview(bytearray(100))
    assert wires.server.recv_into(target) == 4
    assert wires.server.more
    for _ in range(2):
        with pytest.raises(OSError, match="damaged or changed in transit"):
            wires.server.recv_into(target)
    with pytest.raises(OSError, match="BAD_RECORD_MAC"):
        wires.client.recv_into(target)  # the alert has reached it


def test_an_error_keeps_no_memory(wires: Wires) -> None:
    wires.client.send(b"changed")
    wires.socks[Role.SERVER].into.held[9] ^= 1
    target = bytearray(100)
    with pytest.raises(OSError, match="damaged"):
        wires.server.recv_into(memoryview(target))
    target.clear()  # refused while there is a view of it


# --- the handshake --------------------------------------------------------------------


def test_nothing_is_sent_before_the_handshake(authority: Authority) -> None:
    wires = Wires(authority)
    assert not wires.client.opened
    assert blocked(wires.client.shake_hands)
    assert wires.socks[Role.CLIENT].out.held[0] == 0x16
    assert blocked(wires.client.look)
    wires.client.send_end()
    assert not wires.client.unsent


def test_a_server_does_not_hang_up_on_whom_it_does_not_accept(
    authority: Authority,
) -> None:
    """The protocol above says why; nothing is proved all the same."""
    wires = Wires(authority, accepted=False)
    wires.shake()
    for _ in range(2):
        with pytest.raises(AuthenticationFailed, match="tls_peers"):
            wires.server.proven()
    assert wires.client.proven() is not None


@pytest.mark.parametrize(
    "garbage", [b"\x01hello", b"GET / HTTP/1.1\r\n", b"\x80", b"\0"]
)
def test_a_stranger_without_tls_is_told_in_seven_bytes(
    authority: Authority, garbage: bytes
) -> None:
    wires = Wires(authority)
    wires.socks[Role.SERVER].into.held += garbage
    with pytest.raises(AuthenticationFailed, match="speaks no TLS"):
        wires.server.shake_hands()
    assert wires.socks[Role.SERVER].out.held == bytes.fromhex("15030300020246")
    with pytest.raises(AuthenticationFailed, match=r"speaks no TLS 1\.3"):
        wires.client.shake_hands()


def test_a_server_without_tls_is_not_told(authority: Authority) -> None:
    wires = Wires(authority)
    wires.socks[Role.CLIENT].into.held += b"\x04REFUSE"
    with pytest.raises(AuthenticationFailed, match="speaks no TLS"):
        wires.client.shake_hands()


@settings(deadline=None, max_examples=examples(100))
@given(garbage=st.binary(min_size=1, max_size=200))
def test_garbage_behind_the_first_byte(authority: Authority, garbage: bytes) -> None:
    """One documented outcome, whatever it is."""
    for role in Role:
        wires = Wires(authority)
        into = wires.socks[role].into
        into.held += b"\x16" + garbage
        into.ended = True
        with pytest.raises((AuthenticationFailed, ConnectionResetError)):
            wires.wires[role].shake_hands()
        assert not wires.wires[role].opened


def flights(authority: Authority) -> Iterator[tuple[Role, bytes]]:
    """What each side says in its first flight, of a handshake that is not ended."""
    wires = Wires(authority)
    for role in Role:
        assert blocked(wires.wires[role].shake_hands)
        yield role, bytes(wires.socks[role].out.held)


def test_a_peer_that_says_nothing_was_not_cut_off(authority: Authority) -> None:
    wires = Wires(authority)
    wires.socks[Role.SERVER].into.ended = True
    assert wires.server.recv_into(memoryview(bytearray(1))) == 0
    assert not wires.server.opened


def test_a_flight_cut_at_every_byte(authority: Authority) -> None:
    for role, flight in flights(authority):
        for cut in sample(range(1, len(flight)), every=31):
            wires = Wires(authority)
            blocked(wires.wires[role.other].shake_hands)
            into = wires.socks[role.other].into
            into.held[:] = flight[:cut]
            into.ended = True
            with pytest.raises((ConnectionResetError, AuthenticationFailed)):
                wires.wires[role.other].shake_hands()


def test_a_stranger_is_read_in_small_portions(authority: Authority) -> None:
    """And what it sends beyond a handshake stays in the kernel, or ends it."""
    wires = Wires(authority)
    assert blocked(wires.client.shake_hands)
    into = wires.socks[Role.SERVER].into
    # A record of a handshake that says it is 16 MiB long, again and again.
    endless = b"\x16\x03\x01\x40\x00" + b"\x01\xff\xff\xff" + bytes(16 * KIB - 4)
    into.held[:] = endless * 64
    tracemalloc.start()
    try:
        with pytest.raises(AuthenticationFailed):
            wires.server.shake_hands()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(into.held) > 32 * len(endless)
    assert peak < 8 * STRANGER_BYTES
