"""Handshakes for tests: stopped at any frame, followed to their end on both sides."""

from __future__ import annotations

import itertools

import pytest

from kvwire.errors import HandshakeError, KVWireError, ProtocolError
from kvwire.types import Role, TrustMode
from kvwire.wire.header import FrameType
from tests.support.core_pair.handshakes import (
    NONCE_CLIENT,
    NONCE_SERVER,
    Frame,
    Shaking,
    begin,
    identity,
    receive,
    shake,
)

both_modes = pytest.mark.parametrize("trust", list(TrustMode))


def start(trust: TrustMode, *, nonces: tuple[bytes, bytes] | None = None) -> Shaking:
    """Both sides in a trust mode."""
    return begin(
        identity("client", trust=trust),
        identity("server", trust=trust),
        nonces=nonces or (NONCE_CLIENT, NONCE_SERVER),
    )


def recorded(trust: TrustMode) -> list[tuple[Role, Frame]]:
    """Every frame of a handshake, with its sender."""
    return shake(start(trust)).sent


def types(frames: list[tuple[Role, Frame]]) -> list[FrameType]:
    """Of frames as :func:`recorded` has them."""
    return [FrameType(frame[0][0]) for _, frame in frames]


def both_fail(shaking: Shaking) -> dict[Role, KVWireError]:
    """Pass frames until nothing is left; the error of each side that had one."""
    errors: dict[Role, KVWireError] = {}
    for _ in range(10):
        for role in Role:
            outgoing = shaking.of(role).outgoing
            while outgoing:
                frame = outgoing.pop(0)
                if role.other in errors:
                    continue
                try:
                    receive(shaking.of(role.other), frame)
                except (HandshakeError, ProtocolError) as exc:
                    errors[role.other] = exc
    return errors


def shake_until(shaking: Shaking, frame_type: FrameType) -> list[tuple[Role, Frame]]:
    """Pass frames up to the first one of a type, which is not delivered."""
    seen: list[tuple[Role, Frame]] = []
    while True:
        for role in Role:
            outgoing = shaking.of(role).outgoing
            while outgoing:
                frame = outgoing.pop(0)
                if frame[0][0] == frame_type:
                    return [*seen, (role, frame)]
                seen.append((role, frame))
                receive(shaking.of(role.other), frame)


def at_frame(trust: TrustMode, index: int) -> tuple[Shaking, Role, Frame]:
    """A handshake just before its frame number ``index`` is delivered."""
    shaking = start(trust)
    for count in itertools.count():
        role = next(r for r in Role if shaking.of(r).outgoing)
        frame = shaking.of(role).outgoing.pop(0)
        if count == index:
            return shaking, role, frame
        receive(shaking.of(role.other), frame)
    raise AssertionError
