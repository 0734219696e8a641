"""The four fixed messages of the handshake, 256 bytes each including the header.

Every field has a fixed size, so nothing of unknown size is parsed before the peer is
authenticated, and ACCEPT is never longer than HELLO. Unused bytes must be zero and are
refused otherwise, so a new field needs a new version. Every version keeps the size, the
magic, and the position of the version numbers in HELLO and REFUSE.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, ClassVar, Final, Self

from kvwire.errors import MalformedFrame, VersionMismatch, WireCode
from kvwire.limits import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    EAGER_BYTES_MAX,
    EAGER_WINDOW_BYTES_MAX,
    HANDSHAKE_BODY_BYTES,
    KEY_ID_BYTES,
)
from kvwire.types import Role, TrustMode

MAGIC: Final = b"kvwire\r\n"
"""Ends in CR LF, so that a channel that rewrites line ends is detected at once."""

MAC_BYTES: Final = 32
NONCE_BYTES: Final = 32
_KEY_ID_LABEL: Final = b"kvwire key id"

VersionRange = tuple[int, int]
"""The lowest and the highest version that a side supports."""


def key_id(psk: bytes) -> bytes:
    """Return 16 bytes that identify a pre-shared key without revealing it."""
    return hmac.digest(psk, _KEY_ID_LABEL, "sha256")[:KEY_ID_BYTES]


def common_version(mine: VersionRange, theirs: VersionRange) -> int:
    """Return the highest version in both ranges; 0 if they do not overlap."""
    version = min(mine[1], theirs[1])
    return version if version >= max(mine[0], theirs[0]) else 0


def version_mismatch(
    mine: VersionRange, theirs: VersionRange, who: str = "peer"
) -> VersionMismatch:
    """Return the error for two ranges that do not overlap; ``who`` is the peer."""
    return VersionMismatch(
        f"{who} speaks protocol versions {theirs[0]} to {theirs[1]}, this side "
        f"{mine[0]} to {mine[1]}; upgrade the older one",
        fields=("version",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionParameters:
    """The limits of one side of a connection.

    Attributes:
        chunk_bytes: The most payload bytes in one DATA frame.
        eager_bytes: The most payload bytes in one MESSAGE frame.
        window_bytes: The most bytes of eager messages that this side holds until they
            are received.
        window_messages: The most eager messages that it holds.
        features: One bit for each addition of a later minor version; both sides use the
            features that both have set. This version defines none.
    """

    chunk_bytes: int
    eager_bytes: int
    window_bytes: int
    window_messages: int
    features: int = 0

    @classmethod
    def read(cls, numbers: Iterable[int]) -> ConnectionParameters:
        """Read a peer's parameters from the numbers in a body."""
        names = [field.name for field in fields(cls)]
        parameters = cls(**dict(zip(names, numbers, strict=True)))
        for name, low, high in (
            ("chunk_bytes", CHUNK_BYTES_MIN, CHUNK_BYTES_MAX),
            ("eager_bytes", 0, EAGER_BYTES_MAX),
            ("window_bytes", 0, EAGER_WINDOW_BYTES_MAX),
            ("window_messages", 1, 2**20),
        ):
            value = getattr(parameters, name)
            if not low <= value <= high:
                raise MalformedFrame(
                    "KVW-HS-02", f"{name}={value}; {low} to {high} are allowed"
                )
        if parameters.eager_bytes > parameters.window_bytes:
            raise MalformedFrame(
                "KVW-HS-02",
                f"eager_bytes={parameters.eager_bytes} is more than "
                f"window_bytes={parameters.window_bytes}",
            )
        return parameters


class _Fixed:
    """The base of the four messages: the magic, then the fields in order.

    A message with a role has the sender's role before the trust mode.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _layout: ClassVar[struct.Struct]
    _role: ClassVar[Role | None] = None

    def encode(self) -> bytes:
        """Return the body, 224 bytes."""
        values: list[object] = [MAGIC]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "trust" and self._role is not None:
                values.append(self._role)
            if field.name == "parameters":
                values += [getattr(value, one.name) for one in fields(value)]
            else:
                values.append(value)
        return self._layout.pack(*values).ljust(HANDSHAKE_BODY_BYTES, b"\0")

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode a body."""
        values = iter(_unpack(cls._layout, body)[1:])
        found = dict[str, Any]()
        for field in fields(cls):
            if field.name == "trust" and cls._role is not None:
                _check_role(next(values), cls._role)
            if field.name == "parameters":
                found["parameters"] = ConnectionParameters.read(islice(values, 5))
            elif field.name == "trust":
                found["trust"] = _trust(next(values))
            else:
                found[field.name] = next(values)
        return cls(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(_Fixed):
    """HELLO, the client's first message: its versions, limits and nonce."""

    _layout = struct.Struct("<8sHHBBIIIIQ16s16s32s")
    _role = Role.CLIENT

    version_min: int
    version_max: int
    trust: TrustMode
    parameters: ConnectionParameters
    incarnation: bytes
    key_id: bytes
    nonce: bytes

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode a body."""
        cls.versions(body)
        return super(Hello, cls).decode(body)

    @staticmethod
    def versions(body: bytes) -> VersionRange:
        """Return only the version numbers.

        The other bytes may mean something else in versions that this side does not
        support.
        """
        low, high = _VERSIONS.unpack_from(_magical(body), len(MAGIC))
        if not 1 <= low <= high:
            raise MalformedFrame("KVW-HS-02", f"versions {low} to {high}")
        return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept(_Fixed):
    """ACCEPT, the server's answer: the version, its limits, nonce and proof."""

    _layout = struct.Struct("<8sHBBIIIIQ16s32s32s")
    _role = Role.SERVER

    version: int
    trust: TrustMode
    parameters: ConnectionParameters
    incarnation: bytes
    nonce: bytes
    mac: bytes = bytes(MAC_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm(_Fixed):
    """CONFIRM, the client's proof."""

    _layout = struct.Struct("<8s32s")

    mac: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(_Fixed):
    """REFUSE, a side's last message: a code, and the side's versions and trust mode."""

    _layout = struct.Struct("<8sHHHB")

    code: int
    version_min: int
    version_max: int
    trust: TrustMode

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode a body; if the code is VERSION, only the versions are meaningful."""
        (code,) = _CODE.unpack_from(_magical(body), len(MAGIC))
        if code == WireCode.VERSION:
            known = len(MAGIC) + _CODE.size + _VERSIONS.size
            body = body[:known].ljust(HANDSHAKE_BODY_BYTES, b"\0")
        return super(Refuse, cls).decode(body)


_CODE: Final = struct.Struct("<H")
_VERSIONS: Final = struct.Struct("<HH")


def _magical(body: bytes) -> bytes:
    """Return a body after checking its size and magic, the same in all versions."""
    if len(body) != HANDSHAKE_BODY_BYTES:
        raise MalformedFrame(
            "KVW-HS-01",
            f"a handshake message has {len(body)} bytes instead of "
            f"{HANDSHAKE_BODY_BYTES}",
        )
    if not body.startswith(MAGIC):
        raise MalformedFrame("KVW-HS-01", "not a kvwire peer: the magic is missing")
    return body


def _unpack(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if any(_magical(body)[layout.size :]):
        raise MalformedFrame("KVW-HS-01", "handshake message with nonzero unused bytes")
    return layout.unpack_from(body)


def _check_role(role: object, expected: Role) -> None:
    if role != expected:
        raise MalformedFrame(
            "KVW-HS-03",
            f"a {expected.name.lower()}'s message, sent in the wrong direction",
        )


def _trust(value: int) -> TrustMode:
    try:
        return TrustMode(value)
    except ValueError:
        raise MalformedFrame("KVW-HS-02", f"trust mode {value} is unknown") from None
