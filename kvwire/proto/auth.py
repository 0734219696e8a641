"""Keys of one connection, and the proofs made with them.

From the pre-shared key and both nonces HKDF-SHA256 (RFC 5869) derives one key per
purpose and direction, so that a proof sent back to its maker proves nothing. In
``loopback`` mode the pre-shared key is empty: the same code runs, and the proofs then
only show that both sides saw the same handshake. In ``mtls`` mode it is the digests of
both certificates of this TLS connection, which are no secret: who the peer is, TLS has
proved, and the proofs show that nobody has ended one TLS connection and begun another
between the two.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from kvwire.errors import UsageError
from kvwire.limits import KEY_ID_BYTES, PSK_BYTES_MAX, PSK_BYTES_MIN
from kvwire.types import Role

_KEY_ID_LABEL = b"kvwire key id"


def key_id(psk: bytes) -> bytes:
    """Name a pre-shared key without revealing it: 16 bytes of an HMAC under it."""
    return hmac.digest(psk, _KEY_ID_LABEL, "sha256")[:KEY_ID_BYTES]


def check_psk(psk: bytes) -> None:
    """Refuse a key that could be guessed."""
    if not PSK_BYTES_MIN <= len(psk) <= PSK_BYTES_MAX:
        raise UsageError(
            f"the key has {len(psk)} bytes; {PSK_BYTES_MIN} to {PSK_BYTES_MAX} random "
            f"bytes are needed: make one with `kvwire keygen FILE`"
        )


@dataclass(frozen=True, slots=True)
class Keys:
    """Holds the keys that one handshake derives; never shown, never logged."""

    accept: bytes = field(repr=False)
    confirm: bytes = field(repr=False)
    seal: dict[Role, bytes] = field(repr=False)
    grant: dict[Role, bytes] = field(repr=False)
    lane: bytes = field(repr=False)

    @classmethod
    def derive(cls, psk: bytes, nonce_client: bytes, nonce_server: bytes) -> Keys:
        """Derive all keys of a connection."""
        root = hmac.digest(nonce_client + nonce_server, psk, "sha256")

        def expand(label: str) -> bytes:
            return hmac.digest(root, b"kvwire " + label.encode() + b"\x01", "sha256")

        return cls(
            accept=expand("server proof"),
            confirm=expand("client proof"),
            seal={role: expand(f"seal {role.name.lower()}") for role in Role},
            grant={role: expand(f"grant {role.name.lower()}") for role in Role},
            lane=expand("lane"),
        )

    def lane_secret(self, number: int) -> bytes:
        """Return 32 bytes for the two endpoints of a lane to know each other by."""
        return hmac.digest(self.lane, number.to_bytes(4, "little"), "sha256")

    def server_proof(self, transcript: bytes) -> bytes:
        """Return ACCEPT's proof: the server saw HELLO and holds the key."""
        return hmac.digest(self.accept, b"server" + transcript, "sha256")

    def client_proof(self, transcript: bytes) -> bytes:
        """Return CONFIRM's proof: the client saw ACCEPT and holds the key."""
        return hmac.digest(self.confirm, b"client" + transcript, "sha256")


def transcript_hash(*messages: bytes) -> bytes:
    """Digest handshake messages; lengths are fixed, so none shifts."""
    return hashlib.sha256(b"".join(messages)).digest()


def same(proof: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(proof, expected)
