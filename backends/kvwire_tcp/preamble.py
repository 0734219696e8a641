"""The first bytes on a lane's socket: the lane's identity, proved by both sides.

========= ======================================== =====================================
bytes     client to listener                       listener to client
========= ======================================== =====================================
0 to 8    magic; as a frame's header it is invalid
8 to 16   the lane's number
16 to 32  token: identifies the secret, but does
          not reveal it
32 to 64  nonce
64 to 224 zero
224 to    HMAC-SHA256 under the secret             32 bytes: an HMAC over the whole, so
256                                                the client knows who accepted it
========= ======================================== =====================================

It is as long as the first message of a handshake. Both have a fixed length, so an
unauthenticated peer cannot choose how much is read. The secret is new for each lane,
and a lane is admitted once, so an eavesdropped preamble is useless.

Inside TLS both HMACs also cover the *binding*, the digests of the two certificates of
this one TLS connection. Otherwise a man in the middle with a certificate that both
sides accept could pass the preamble on from one TLS connection to another.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from kvwire.limits import HANDSHAKE_BODY_BYTES, HEADER_BYTES

PREAMBLE_BYTES: Final = HEADER_BYTES + HANDSHAKE_BODY_BYTES
NONCE_BYTES: Final = 32
ANSWER_BYTES: Final = 32
# 0x4B is not a frame type, so no header begins like this.
MAGIC: Final = b"KVWIRE+L"

_FIELDS: Final = struct.Struct("<8sQ16s32s160x")
_MAGIC_VIEW: Final = memoryview(MAGIC)

assert _FIELDS.size + hashlib.sha256().digest_size == PREAMBLE_BYTES


def make_preamble(
    secret: bytes, number: int, nonce: bytes, binding: bytes = b""
) -> bytes:
    """Return the client's preamble."""
    fields = _FIELDS.pack(MAGIC, number, token_of(secret), nonce)
    return fields + _proof(secret, b"client", fields + binding)


def is_preamble(header: memoryview) -> bool:
    """Return whether these bytes, at least 8, begin a preamble."""
    return header[: len(MAGIC)] == _MAGIC_VIEW


def token_of(secret: bytes) -> bytes:
    """Return the token by which a listener finds the lane."""
    return _proof(secret, b"token", b"")[:16]


def token_in(preamble: bytes) -> bytes:
    """Return the token in a preamble."""
    token: bytes = _FIELDS.unpack_from(preamble)[2]
    return token


def is_proof(preamble: bytes, secret: bytes, number: int, binding: bytes = b"") -> bool:
    """Return whether a preamble proves that its sender knows the lane's secret."""
    nonce = _FIELDS.unpack_from(preamble)[3]
    expected = make_preamble(secret, number, nonce, binding)
    return hmac.compare_digest(preamble, expected)


def answer_to(preamble: bytes, secret: bytes, binding: bytes = b"") -> bytes:
    """Return the listener's answer, which proves that it knows the secret too."""
    return _proof(secret, b"server", preamble + binding)


def _proof(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, b"kvwire tcp lane " + purpose + b"\0" + data, "sha256")
