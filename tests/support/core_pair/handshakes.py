"""Handshakes in memory: identities, both roles, and the frames between them.

Nonces are fixed unless given, so the same call makes the same bytes each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvwire.limits import CHUNK_BYTES_MIN, HEADER_BYTES, KIB
from kvwire.proto.handshake import ClientHandshake, Handshake, Identity, ServerHandshake
from kvwire.types import Role, TrustMode
from kvwire.wire import control
from kvwire.wire.handshake_messages import NONCE_BYTES, ConnectionParameters, key_id

Frame = tuple[bytes, bytes]
"""A header and what follows it."""

PSK: Final = bytes(range(32))
NONCE_CLIENT: Final = bytes([0xC1]) * NONCE_BYTES
NONCE_SERVER: Final = bytes([0x5E]) * NONCE_BYTES

# As if the client's certificate and the server's had these digests.
BINDING: Final = bytes([0xCC]) * 32 + bytes([0x55]) * 32

# As small as they may be, so that a few bytes show what megabytes would.
SMALL: Final = ConnectionParameters(
    chunk_bytes=CHUNK_BYTES_MIN, eager_bytes=64, window_bytes=1 * KIB, window_messages=8
)


def identity(
    name: str,
    *,
    trust: TrustMode = TrustMode.LOOPBACK,
    parameters: ConnectionParameters = SMALL,
    psk: bytes = PSK,
    profile: tuple[tuple[str, str], ...] = (),
    versions: tuple[int, int] = (1, 1),
) -> Identity:
    """What one side brings."""
    in_psk = trust is TrustMode.PSK
    return Identity(
        name=name,
        incarnation=name.encode()[:16].ljust(16, b"."),
        trust=trust,
        parameters=parameters,
        psk=psk if in_psk else b"",
        keys={key_id(psk): psk} if in_psk else {},
        profile=profile,
        versions=versions,
    )


@dataclass(slots=True)
class Shaking:
    """Two handshakes and the frames that have passed between them."""

    client: ClientHandshake
    server: ServerHandshake
    sent: list[tuple[Role, Frame]]

    def of(self, role: Role) -> Handshake:
        """The handshake of one side."""
        return self.client if role is Role.CLIENT else self.server

    def parameters(self, role: Role) -> ConnectionParameters:
        """What that side has said of its own limits; the handshake must be over."""
        other = self.of(role.other).agreement
        assert other is not None
        return other.peer_parameters


def begin(
    client: Identity | None = None,
    server: Identity | None = None,
    *,
    nonces: tuple[bytes, bytes] = (NONCE_CLIENT, NONCE_SERVER),
    backends: tuple[str, ...] = ("memory",),
    bindings: tuple[bytes, bytes] = (BINDING, BINDING),
) -> Shaking:
    """Both sides before the first frame has arrived.

    In ``mtls`` mode each side is bound to a TLS connection, unless that is b"".
    """
    mine = client or identity("client")
    offer = control.TransportOffer(
        name=mine.name,
        backends=tuple(control.BackendOffer(backend, 1) for backend in backends),
        profile=mine.profile,
    )
    shaking = Shaking(
        ClientHandshake(mine, nonces[0], offer),
        ServerHandshake(server or identity("server"), nonces[1]),
        [],
    )
    for role, binding in zip(Role, bindings, strict=True):
        if shaking.of(role).identity.trust is TrustMode.MTLS and binding:
            shaking.of(role).bind(binding)
    return shaking


def choose_first(server: ServerHandshake) -> None:
    """Answer the client's offer: its first transport is taken."""
    assert server.offer is not None
    verdicts = tuple(
        control.HandshakeVerdict(
            backend.name, place == 0, "first" if place == 0 else "not first"
        )
        for place, backend in enumerate(server.offer.backends)
    )
    mine = server.identity
    server.choose(
        control.TransportChoice(name=mine.name, verdicts=verdicts, profile=mine.profile)
    )


def receive(handshake: Handshake, frame: Frame) -> None:
    """Give a handshake one whole frame, and answer an offer that is complete."""
    header, body = frame
    length = handshake.header_received(header)
    assert length == len(body), "a frame that is not whole"
    handshake.body_received(body)
    if isinstance(handshake, ServerHandshake) and handshake.offer is not None:
        choose_first(handshake)


def shake(shaking: Shaking) -> Shaking:
    """Pass frames to and fro until nothing is left to send."""
    while True:
        frames = _take(shaking, Role.CLIENT) + _take(shaking, Role.SERVER)
        if not frames:
            return shaking
        for role, frame in frames:
            receive(shaking.of(role.other), frame)


def _take(shaking: Shaking, role: Role) -> list[tuple[Role, Frame]]:
    outgoing = shaking.of(role).outgoing
    frames = [(role, frame) for frame in outgoing]
    outgoing.clear()
    shaking.sent += frames
    return frames


def split(data: bytes) -> Frame:
    """A frame from its bytes."""
    return data[:HEADER_BYTES], data[HEADER_BYTES:]


class Inlet:
    """Splits a byte stream by asking its owner, at each header, how much follows.

    Holds no more than it was fed: what a header announces is not allocated.
    """

    __slots__ = ("_begin", "_body_bytes", "_end", "_pending", "stopped")

    def __init__(
        self, begin: Callable[[bytes], int | None], end: Callable[[bytes], None]
    ) -> None:
        self.stopped = False
        self._begin = begin
        self._end = end
        self._pending = bytearray()
        # Of the body that is due; None while a header is.
        self._body_bytes: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes; whatever ``begin`` and ``end`` raise goes through."""
        self._pending += data
        while not self.stopped:
            in_header = self._body_bytes is None
            size = HEADER_BYTES if self._body_bytes is None else self._body_bytes
            if len(self._pending) < size:
                return
            piece = bytes(self._pending[:size])
            del self._pending[:size]
            if in_header:
                self._body_bytes = self._begin(piece)
                self.stopped = self._body_bytes is None
            else:
                self._body_bytes = None
                self._end(piece)
        self._pending.clear()
