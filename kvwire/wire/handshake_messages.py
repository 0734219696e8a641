"""The four fixed messages of the handshake, 256 bytes each with their header.

Nothing in them has a length of its own, so nothing of unknown size is parsed before the
peer has proved itself, and the answer is never longer than the question. Unused bytes
are zero, and a byte that is not is refused: a field added later needs a new version.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvwire.errors import MalformedFrame
from kvwire.limits import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    EAGER_BYTES_MAX,
    EAGER_WINDOW_BYTES_MAX,
    HANDSHAKE_BODY_BYTES,
)
from kvwire.types import Role, TrustMode

MAGIC: Final = b"kvwire\r\n"
"""Ends in CR LF, so that a transfer that rewrites line ends is noticed at once."""

MAC_BYTES: Final = 32
NONCE_BYTES: Final = 32

_HELLO: Final = struct.Struct("<8sHHBBIIIIQ16s16s32s")
_ACCEPT: Final = struct.Struct("<8sHBBIIIIQ16s32s32s")
_CONFIRM: Final = struct.Struct("<8s32s")
_REFUSE: Final = struct.Struct("<8sHHHB")


# A bit of ``features``: short transfers in fewer frames.
BRIEF_TRANSFERS: Final = 1
# Another: layers that travel by themselves, in fewer frames.
BRIEF_LAYERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionParameters:
    """Holds the limits that a side allows; the smaller of two holds.

    Attributes:
        chunk_bytes: Most payload bytes in one DATA frame.
        eager_bytes: Most payload bytes in one MESSAGE frame.
        window_bytes: Eager bytes this side holds for messages nobody asked for yet.
        window_messages: How many such messages it holds.
        features: Bits of optional features; unknown ones are ignored.
    """

    chunk_bytes: int
    eager_bytes: int
    window_bytes: int
    window_messages: int
    features: int = 0

    @classmethod
    def read(cls, numbers: Sequence[int]) -> ConnectionParameters:
        """Read a peer's parameters from the numbers in a body.

        Raises:
            MalformedFrame: A field is out of its range.
        """
        chunk_bytes, eager_bytes, window_bytes, window_messages, features = numbers
        parameters = cls(
            chunk_bytes=chunk_bytes,
            eager_bytes=eager_bytes,
            window_bytes=window_bytes,
            window_messages=window_messages,
            features=features,
        )
        parameters.check()
        return parameters

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return them as they stand in a body."""
        return (
            self.chunk_bytes,
            self.eager_bytes,
            self.window_bytes,
            self.window_messages,
            self.features,
        )

    def check(self) -> None:
        """Refuse numbers outside the limits.

        Raises:
            MalformedFrame: A field is out of its range.
        """
        ranges = (
            ("chunk_bytes", self.chunk_bytes, CHUNK_BYTES_MIN, CHUNK_BYTES_MAX),
            ("eager_bytes", self.eager_bytes, 0, EAGER_BYTES_MAX),
            ("window_bytes", self.window_bytes, 0, EAGER_WINDOW_BYTES_MAX),
            ("window_messages", self.window_messages, 1, 2**20),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise MalformedFrame(
                    "KVW-HS-02", f"{name}={value}; {low} to {high} are allowed"
                )
        if self.eager_bytes > self.window_bytes:
            raise MalformedFrame(
                "KVW-HS-02",
                f"eager_bytes={self.eager_bytes} is more than "
                f"window_bytes={self.window_bytes}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Opens the handshake, client to server: who I am and what I speak."""

    version_min: int
    version_max: int
    trust: TrustMode
    parameters: ConnectionParameters
    incarnation: bytes
    key_id: bytes
    nonce: bytes

    def encode(self) -> bytes:
        """Return the body, 224 bytes."""
        return _padded(
            _HELLO.pack(
                MAGIC,
                self.version_min,
                self.version_max,
                Role.CLIENT,
                self.trust,
                *self.parameters.numbers,
                self.incarnation,
                self.key_id,
                self.nonce,
            )
        )

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        """Read a body.

        Raises:
            MalformedFrame: Not a HELLO of a client, or a field out of range.
        """
        fields = _unpack(_HELLO, body)
        _check_role(fields[3], Role.CLIENT)
        parameters = ConnectionParameters.read(fields[5:10])
        if not 1 <= fields[1] <= fields[2]:
            raise MalformedFrame("KVW-HS-02", f"versions {fields[1]} to {fields[2]}")
        return cls(
            version_min=fields[1],
            version_max=fields[2],
            trust=_trust(fields[4]),
            parameters=parameters,
            incarnation=fields[10],
            key_id=fields[11],
            nonce=fields[12],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Answers HELLO, server to client: what we speak, and the server's proof."""

    version: int
    trust: TrustMode
    parameters: ConnectionParameters
    incarnation: bytes
    nonce: bytes
    mac: bytes = bytes(MAC_BYTES)

    def encode(self) -> bytes:
        """Return the body, 224 bytes."""
        return _padded(
            _ACCEPT.pack(
                MAGIC,
                self.version,
                Role.SERVER,
                self.trust,
                *self.parameters.numbers,
                self.incarnation,
                self.nonce,
                self.mac,
            )
        )

    @classmethod
    def decode(cls, body: bytes) -> Accept:
        """Read a body.

        Raises:
            MalformedFrame: Not an ACCEPT of a server, or a field out of range.
        """
        fields = _unpack(_ACCEPT, body)
        _check_role(fields[2], Role.SERVER)
        parameters = ConnectionParameters.read(fields[4:9])
        return cls(
            version=fields[1],
            trust=_trust(fields[3]),
            parameters=parameters,
            incarnation=fields[9],
            nonce=fields[10],
            mac=fields[11],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Ends the proofs, client to server: the client's proof."""

    mac: bytes

    def encode(self) -> bytes:
        """Return the body, 224 bytes."""
        return _padded(_CONFIRM.pack(MAGIC, self.mac))

    @classmethod
    def decode(cls, body: bytes) -> Confirm:
        """Read a body.

        Raises:
            MalformedFrame: Not a CONFIRM.
        """
        return cls(mac=_unpack(_CONFIRM, body)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Refuses, as a side's last message: a code, and what it would have spoken."""

    code: int
    version_min: int
    version_max: int
    trust: TrustMode

    def encode(self) -> bytes:
        """Return the body, 224 bytes."""
        return _padded(
            _REFUSE.pack(
                MAGIC, self.code, self.version_min, self.version_max, self.trust
            )
        )

    @classmethod
    def decode(cls, body: bytes) -> Refuse:
        """Read a body.

        Raises:
            MalformedFrame: Not a REFUSE.
        """
        _, code, low, high, trust = _unpack(_REFUSE, body)
        return cls(code=code, version_min=low, version_max=high, trust=_trust(trust))


def _padded(body: bytes) -> bytes:
    return body.ljust(HANDSHAKE_BODY_BYTES, b"\0")


def _unpack(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != HANDSHAKE_BODY_BYTES or any(body[layout.size :]):
        raise MalformedFrame("KVW-HS-01", "handshake message with bytes beyond its end")
    fields = layout.unpack_from(body)
    if fields[0] != MAGIC:
        raise MalformedFrame("KVW-HS-01", "not a kvwire peer: the magic is missing")
    return fields


def _check_role(role: object, expected: Role) -> None:
    if role != expected:
        raise MalformedFrame(
            "KVW-HS-03", f"a {expected.name.lower()}'s message in the other direction"
        )


def _trust(value: int) -> TrustMode:
    try:
        return TrustMode(value)
    except ValueError:
        raise MalformedFrame("KVW-HS-02", f"trust mode {value} is unknown") from None
