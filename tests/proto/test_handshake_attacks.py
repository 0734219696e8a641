"""Handshakes that somebody damages, changes, replays or reflects (goal S6)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvwire.errors import AuthenticationFailed, HandshakeError, ProtocolError
from kvwire.proto.framing import Framing
from kvwire.proto.handshake import HandshakeState
from kvwire.types import Role, TrustMode
from kvwire.wire.header import Flag, FrameType, decode_header, encode_header
from tests.proto.shaking import at_frame, both_fail, both_modes, recorded, start, types
from tests.support.core_pair.handshakes import (
    NONCE_CLIENT,
    NONCE_SERVER,
    Frame,
    receive,
    split,
)
from tests.support.depth import sample

NONCES = [bytes([n]) * 32 for n in range(8)]


# --- damaged on the way


def damage(body: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(body)):
        wrong = bytearray(body)
        wrong[bit // 8] ^= 1 << bit % 8
        yield bytes(wrong)


def with_body(frame: Frame, body: bytes) -> Frame:
    """A frame with another body, and everything that anybody can compute made right."""
    header = decode_header(frame[0])
    if header.flags != Flag.CHECKED:
        return frame[0], body
    fresh = Framing()
    fresh.sent = header.sequence
    return fresh.control(header.type, body)


@pytest.mark.rule("KVW-HS-07", "KVW-HD-07", "breaks")
@both_modes
def test_every_flipped_bit_and_truncation(trust: TrustMode) -> None:
    """In headers and bodies of all five, as damage on the way does it."""
    for index in range(5):
        _, _, (header, body) = at_frame(trust, index)
        wrongs = [split(wrong) for wrong in sample(damage(header + body), every=9)]
        read = decode_header(header)
        for length in range(len(body)):
            shorter = msgspec.structs.replace(read, length=length)
            fields = msgspec.structs.astuple(shorter)[:-1]
            wrongs.append((encode_header(*fields), body[:length]))
        for frame in wrongs:
            shaking, role, _ = at_frame(trust, index)
            receiver = shaking.of(role.other)
            with pytest.raises((ProtocolError, HandshakeError)):
                receive(receiver, frame)
            assert receiver.agreement is None
            assert receiver.state is HandshakeState.FAILED


@pytest.mark.rule("KVW-HS-07", "breaks")
@both_modes
def test_every_bit_changed_by_somebody(trust: TrustMode) -> None:
    """The same with checks made right, so that the proofs have to notice it."""
    for index in range(3):
        _, _, frame = at_frame(trust, index)
        for wrong in sample(damage(frame[1]), every=9):
            shaking, role, _ = at_frame(trust, index)
            shaking.of(role).outgoing.insert(0, with_body(frame, wrong))
            assert both_fail(shaking)
            assert not (shaking.client.agreement and shaking.server.agreement)
            # In psk mode nobody gets as far as the first body of unknown length.
            if trust is TrustMode.PSK:
                assert shaking.server.offer is None


# --- replayed, reflected


@pytest.mark.rule("KVW-HS-03", "KVW-HS-04", "breaks")
@both_modes
def test_every_reflected_frame(trust: TrustMode) -> None:
    """Each frame sent back to where it came from, as it is and under the type due."""
    for index in range(5):
        for relabel in (False, True):
            shaking, role, frame = at_frame(trust, index)
            sender = shaking.of(role)
            agreed = sender.agreement
            if relabel and isinstance(sender.state.value, FrameType):
                framing = Framing()
                framing.sent = sender.framing.received
                frame = framing.control(sender.state.value, frame[1])
            with pytest.raises((ProtocolError, HandshakeError)):
                receive(sender, frame)
            assert sender.agreement is agreed


def test_a_server_cannot_prove_itself_with_the_clients_proof() -> None:
    """Each direction has its key and its label."""
    frames = recorded(TrustMode.PSK)
    confirm = frames[2][1][1]
    shaking, _, (_, body) = at_frame(TrustMode.PSK, 1)
    forged = bytearray(body)
    forged[84:116] = confirm[8:40]
    framing = Framing()
    with pytest.raises(AuthenticationFailed):
        receive(shaking.client, framing.control(FrameType.ACCEPT, bytes(forged)))


@pytest.mark.rule("KVW-HS-07", "breaks")
@both_modes
def test_a_replayed_side(trust: TrustMode) -> None:
    """All that a side has sent, to one with another nonce: no agreement."""
    frames = recorded(trust)
    hello, accept, confirm = (frame for _, frame in frames[:3])
    for nonce in NONCES:
        server = start(trust, nonces=(NONCE_CLIENT, nonce)).server
        receive(server, hello)
        with pytest.raises(AuthenticationFailed):
            receive(server, confirm)
        assert server.offer is None
        client = start(trust, nonces=(nonce, NONCE_SERVER)).client
        client.outgoing.clear()
        with pytest.raises(AuthenticationFailed):
            receive(client, accept)
        assert types([(Role.CLIENT, frame) for frame in client.outgoing]) == [
            FrameType.REFUSE
        ]
