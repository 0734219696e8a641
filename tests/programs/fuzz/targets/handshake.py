"""A handshake with somebody in the middle, against either side, in either trust mode.

The other side is honest. The bytes decide what becomes of its frames on their way, and
what is put between them. In ``psk`` mode a side that agrees has heard exactly what was
said to it; in ``loopback`` mode anybody can make an OFFER and a CHOICE.
"""

from __future__ import annotations

import copy
import functools
import zlib

from kvwire.errors import HandshakeError, ProtocolError
from kvwire.limits import HEADER_BYTES
from kvwire.proto.handshake import Handshake, HandshakeState, ServerHandshake
from kvwire.types import Role, TrustMode
from kvwire.wire.header import FrameType, encode_header
from tests.programs.fuzz.reader import Reader
from tests.support.core_pair.handshakes import (
    Frame,
    Inlet,
    Shaking,
    begin,
    choose_first,
    identity,
)

_STEPS_MAX = 40


def run(data: bytes) -> int:
    """The first byte chooses the side and the mode."""
    reader = Reader(data)
    options = reader.byte()
    role = Role(options & 1)
    shaking = copied(_made(TrustMode(options >> 1 & 1)))
    middle = _Middle(shaking, role)
    for _ in range(_STEPS_MAX):
        if not reader or middle.over:
            break
        middle.step(reader)
    target = shaking.of(role)
    if target.agreement is not None:
        assert target.state is HandshakeState.DONE
        in_psk = target.identity.trust is TrustMode.PSK
        assert middle.honest or not in_psk, "somebody has changed what was said"
    return len(middle.heard)


@functools.cache
def _made(trust: TrustMode) -> Shaking:
    return begin(identity("client", trust=trust), identity("server", trust=trust))


def copied(made: Shaking) -> Shaking:
    """The same two handshakes, to go on with."""
    client, server = copy.copy(made.client), copy.copy(made.server)
    for side in (client, server):
        side.framing = copy.copy(side.framing)
        side.outgoing = list(side.outgoing)
    return Shaking(client, server, [])


class _Middle:
    """Stands between a target and the honest other side.

    Attributes:
        over: One of them has refused, or the target has agreed.
    """

    def __init__(self, shaking: Shaking, role: Role) -> None:
        self._target = shaking.of(role)
        self._other = shaking.of(role.other)
        self._inlet = Inlet(self._target.header_received, self._body)
        self._waiting: list[Frame] = []
        self.over = False
        self.said = b""
        self.heard = b""

    def step(self, reader: Reader) -> None:
        """Do what the next byte says."""
        choice = reader.byte() % 6
        if choice == 0:
            self._answer()
        self._listen()
        if choice == 3:
            self._feed(reader.short())
        elif choice == 4:
            self._feed(self._forged(reader))
        elif choice == 5 and self._waiting:
            self._feed(b"".join(self._waiting[0]))
        elif choice == 2 and self._waiting:
            self._feed(self._changed(reader, self._waiting.pop(0)))
        elif self._waiting:
            self._feed(b"".join(self._waiting.pop(0)))

    @property
    def honest(self) -> bool:
        """Whether the target has heard what was said, and nothing else."""
        return self.said.startswith(self.heard)

    def _feed(self, data: bytes) -> None:
        self.heard += data
        try:
            self._inlet.feed(data)
        except (HandshakeError, ProtocolError):
            assert self._target.state is HandshakeState.FAILED
            self.over = True
        self.over |= self._inlet.stopped or self._target.agreement is not None

    def _body(self, body: bytes) -> None:
        self._target.body_received(body)
        _decide(self._target)

    def _listen(self) -> None:
        """Take what the honest side says."""
        frames = self._other.outgoing
        self.said += b"".join(header + body for header, body in frames)
        self._waiting += frames
        frames.clear()

    def _answer(self) -> None:
        """The honest side hears all that the target has said."""
        while self._target.outgoing:
            header, body = self._target.outgoing.pop(0)
            try:
                self._other.header_received(header)
                self._other.body_received(body)
            except (HandshakeError, ProtocolError):
                self.over = True
                return
            _decide(self._other)

    def _changed(self, reader: Reader, frame: Frame) -> bytes:
        """A frame with one byte changed, and if asked a header that matches again."""
        whole = bytearray(b"".join(frame))
        repair, place, bits = reader.byte(), reader.byte(), reader.byte()
        whole[place % len(whole)] ^= bits
        if repair & 1:
            whole[24:28] = zlib.crc32(whole[HEADER_BYTES:]).to_bytes(4, "little")
        if repair & 2:
            whole[28:32] = zlib.crc32(whole[:28]).to_bytes(4, "little")
        return bytes(whole)

    def _forged(self, reader: Reader) -> bytes:
        """A frame of any type in the right place, with any body."""
        frame_type, flags = reader.pick(tuple(FrameType)), reader.byte() & 3
        body = reader.short()
        if reader.byte() & 1:
            body = body.ljust(224, b"\0")
        header = encode_header(
            frame_type,
            flags,
            self._target.framing.received & 0xFFFF,
            len(body),
            payload_check=zlib.crc32(body) if flags == 2 else 0,
        )
        return header + body


def _decide(handshake: Handshake) -> None:
    if handshake.state is HandshakeState.DECISION:
        assert isinstance(handshake, ServerHandshake)
        choose_first(handshake)
