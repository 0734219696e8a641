"""Frames in their order, each control body covered by a check or a seal."""

from __future__ import annotations

import pytest

from kvwire.errors import MalformedFrame, UnexpectedFrame
from kvwire.limits import SEAL_BYTES
from kvwire.proto.framing import Framing
from kvwire.types import Role
from kvwire.wire.header import Flag, FrameType, encode_header

SEALS = {Role.CLIENT: b"c" * 32, Role.SERVER: b"s" * 32}
Pair = tuple[Framing, Framing]


def framings(*, sealed: bool) -> Pair:
    """A client's and a server's."""
    both = Framing(), Framing()
    if sealed:
        for framing, role in zip(both, Role, strict=True):
            framing.use_seals(role, SEALS)
    return both


def pass_on(receiver: Framing, header: bytes, body: bytes) -> bytes:
    return receiver.open(receiver.accept_header(header), header, body)


both_modes = pytest.mark.parametrize("sealed", [False, True], ids=["checked", "sealed"])


@pytest.mark.rule("KVW-HD-05", "KVW-HD-07", "KVW-AU-01", "KVW-AU-02", "keeps")
@both_modes
def test_frames_arrive(sealed: bool) -> None:
    """Control and payload, numbered together in each direction."""
    client, server = framings(sealed=sealed)
    assert client.sealed == sealed
    for count in range(3):
        header, body = client.control(FrameType.READY, b"body", request=5)
        assert len(body) == 4 + SEAL_BYTES * sealed
        assert pass_on(server, header, body) == b"body"
        raw = client.payload(FrameType.DATA, 9, request=1, segment=2, offset=3, check=4)
        read = server.accept_header(raw)
        assert (read.request, read.segment, read.offset, read.payload_check) == (
            *(1, 2, 3),
            4,
        )
        assert read.sequence == 2 * count + 1
    header, body = server.control(FrameType.FIN, b"x")
    assert pass_on(client, header, body) == b"x"
    assert (client.sent, server.received, server.sent, client.received) == (6, 6, 1, 1)


@pytest.mark.rule("KVW-HD-05", "keeps")
@both_modes
def test_the_number_wraps_and_the_seal_does_not(sealed: bool) -> None:
    """After 65,536 frames the header says 0 again."""
    client, server = framings(sealed=sealed)
    client.sent = server.received = 2**16 - 1
    for sequence in (2**16 - 1, 0, 1):
        header, body = client.control(FrameType.READY, b"b")
        assert server.accept_header(header).sequence == sequence
        server.received -= 1
        assert pass_on(server, header, body) == b"b"


@pytest.mark.rule("KVW-HD-05", "breaks")
@pytest.mark.parametrize(
    ("order", "bad"), [([1], 0), ([0, 0], 1), ([0, 2], 1), ([1, 0], 0), ([0, 1, 3], 2)]
)
@both_modes
def test_lost_doubled_and_reordered(sealed: bool, order: list[int], bad: int) -> None:
    """Seen at the next frame, of any kind."""
    client, server = framings(sealed=sealed)
    headers = [client.control(FrameType.READY, b"b")[0] for _ in range(3)]
    headers.append(client.payload(FrameType.DATA, 1))
    for place, index in enumerate(order):
        if place == bad:
            with pytest.raises(MalformedFrame, match="KVW-HD-05"):
                server.accept_header(headers[index])
            return
        server.accept_header(headers[index])
    raise AssertionError("no frame was out of order")


@pytest.mark.rule("KVW-HD-07", "KVW-AU-02", "breaks")
@both_modes
def test_every_bit_of_a_control_body_counts(sealed: bool) -> None:
    """And every byte cut off or added."""
    rule = "KVW-AU-02" if sealed else "KVW-HD-07"
    client, server = framings(sealed=sealed)
    header, body = client.control(FrameType.READY, b"body", request=5)
    damaged = [bytearray(body) for _ in range(8 * len(body))]
    for bit, copy in enumerate(damaged):
        copy[bit // 8] ^= 1 << bit % 8
    read = server.accept_header(header)
    for wrong in (*damaged, body[:-1], body + b"\0", b""):
        with pytest.raises(MalformedFrame, match=rule):
            server.open(read, header, bytes(wrong))
    assert server.open(read, header, body) == b"body"


@pytest.mark.rule("KVW-AU-02", "breaks")
def test_a_seal_fits_one_frame() -> None:
    """Not another body, request, place in the order, direction or connection."""
    client, server = framings(sealed=True)
    header, body = client.control(FrameType.READY, b"body", request=5)
    later, other = framings(sealed=True), Framing()
    later[0].sent = 2**16  # the same 16 bits in the header
    other.use_seals(Role.CLIENT, {Role.CLIENT: b"x" * 32, Role.SERVER: b"y" * 32})
    moved = encode_header(FrameType.READY, Flag.SEALED, 0, len(body), 7)
    attempts = [
        (moved, body),
        later[0].control(FrameType.READY, b"body", request=5),
        framings(sealed=True)[1].control(FrameType.READY, b"body", request=5),
        other.control(FrameType.READY, b"body", request=5),
    ]
    for wrong_header, wrong_body in attempts:
        fresh = framings(sealed=True)[1]
        with pytest.raises(MalformedFrame, match="KVW-AU-02"):
            pass_on(fresh, wrong_header, wrong_body)
    assert pass_on(server, header, body) == b"body"


@pytest.mark.rule("KVW-AU-01", "breaks")
@both_modes
def test_a_frame_of_the_other_mode(sealed: bool) -> None:
    """Nobody may leave the seals off, nor add them."""
    ours, theirs = framings(sealed=sealed)[1], framings(sealed=not sealed)[0]
    with pytest.raises(UnexpectedFrame, match="KVW-AU-01"):
        ours.accept_header(theirs.control(FrameType.READY, b"body")[0])
    assert ours.received == 0
