"""What each side brings to a handshake, and what both have when it ends well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvwire.proto.auth import Keys
from kvwire.types import PeerInfo, Role, TrustMode
from kvwire.wire.control import TransportChoice, TransportOffer
from kvwire.wire.handshake_messages import ConnectionParameters

VERSIONS: Final = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Holds what this side brings to a handshake.

    Attributes:
        name: Shown to the peer.
        incarnation: 16 random bytes, new for each start of the process.
        trust: How the sides know each other.
        psk: The key this side connects with; empty but in psk mode.
        keys: Every key this side accepts, by :func:`~kvwire.proto.auth.key_id`.
        parameters: This side's limits.
        profile: (field, value) pairs that must agree where both sides name the field.
        versions: The lowest and the highest version of the protocol it speaks.
    """

    name: str
    incarnation: bytes
    trust: TrustMode
    parameters: ConnectionParameters
    psk: bytes = field(default=b"", repr=False)
    keys: Mapping[bytes, bytes] = field(default_factory=dict, repr=False)
    profile: tuple[tuple[str, str], ...] = ()
    versions: tuple[int, int] = VERSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Holds what both sides have agreed on when the handshake ends well.

    Attributes:
        role: Of this side.
        digest: 32 bytes over HELLO and ACCEPT; names the connection.
        keys: The connection's keys.
        parameters: What both sides can live with.
        peer_parameters: The peer's own; its windows bound what it is sent unasked.
        peer: Who the peer is.
        choice: The verdict on each transport.
        offer: What the client offered.
    """

    role: Role
    digest: bytes = field(repr=False)
    keys: Keys
    parameters: ConnectionParameters
    peer_parameters: ConnectionParameters
    peer: PeerInfo
    choice: TransportChoice
    offer: TransportOffer


def common_parameters(
    mine: ConnectionParameters, theirs: ConnectionParameters
) -> ConnectionParameters:
    """Return the connection parameters that both sides can live with."""
    return ConnectionParameters(
        chunk_bytes=min(mine.chunk_bytes, theirs.chunk_bytes),
        eager_bytes=min(mine.eager_bytes, theirs.eager_bytes),
        window_bytes=min(mine.window_bytes, theirs.window_bytes),
        window_messages=min(mine.window_messages, theirs.window_messages),
        features=mine.features & theirs.features,
    )
