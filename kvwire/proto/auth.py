"""The keys of one connection, and the proofs made with them.

HKDF-SHA256 (RFC 5869) derives one key per purpose and direction from the pre-shared key
and both nonces, so a proof that is reflected to its maker proves nothing. In
``loopback`` mode the pre-shared key is empty: the same code runs, but the proofs only
show that both sides received the same handshake. In ``mtls`` mode the digests of both
certificates of this TLS connection replace the key. They are not secret: TLS has proved
the peer's identity, and the proofs show that there is no proxy between the two sides
with a separate TLS connection to each.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from kvwire.types import Role


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys derived in one handshake; never shown or logged."""

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
        """Return the secret with which both endpoints of a lane authenticate."""
        return hmac.digest(self.lane, number.to_bytes(4, "little"), "sha256")

    def server_proof(self, transcript: bytes) -> bytes:
        """Return the proof in ACCEPT; a server needs HELLO and the key to make it."""
        return hmac.digest(self.accept, b"server" + transcript, "sha256")

    def client_proof(self, transcript: bytes) -> bytes:
        """Return the proof in CONFIRM; a client needs ACCEPT and the key to make it."""
        return hmac.digest(self.confirm, b"client" + transcript, "sha256")


def transcript_hash(*messages: bytes) -> bytes:
    """Return the digest of handshake messages, which have fixed lengths."""
    return hashlib.sha256(b"".join(messages)).digest()
