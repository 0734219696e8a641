"""The 32-byte header of every frame.

It is little-endian and fixed, so that a link can receive it knowing nothing else::

    0  type           u8    what follows; 0x40 and above carry payload
    1  flags          u8    SEALED, CHECKED
    2  sequence       u16   frames sent before on this link, modulo 65,536
    4  length         u32   bytes that follow the header
    8  request        u32   the request, or 0
    12 segment        u32   the segment of a transfer, or 0
    16 offset         u64   where the payload belongs; the tag of a message
    24 payload_check  u32   if CHECKED: of payload the low half of its xxh3-64, of a
                            control body its CRC-32; else 0
    28 header_check   u32   CRC-32 of the 28 bytes above

The check detects damaged headers (CRC-32 detects every burst of up to 32 bits) before a
length or a request number is used. The sequence number shows, at the next frame and on
any transport, that a frame was lost, duplicated or reordered. A control body is always
protected as well, by its seal or its own check.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import Final

import msgspec

from kvwire.errors import FrameTooLarge, MalformedFrame, UnexpectedFrame
from kvwire.limits import (
    BOOTSTRAP_BYTES_MAX,
    CHUNK_BYTES_MAX,
    CONTROL_BODY_BYTES_MAX,
    DESCRIPTOR_BYTES_MAX,
    EAGER_BYTES_MAX,
    HANDSHAKE_BODY_BYTES,
    HEADER_BYTES,
    LANDED_MAX,
    LANE_PAYLOADS_MAX,
    SEAL_BYTES,
    WINDOW_DATA_BYTES_MAX,
    WINDOW_GET_BLOCKS_MAX,
)

_LAYOUT: Final = struct.Struct("<BBHIIIQII")
_CHECKED_PART: Final = struct.Struct("<BBHIIIQI")
assert _LAYOUT.size == HEADER_BYTES
# The CRC-32 of any data followed by its own CRC-32, little-endian.
_INTACT: Final = 0x2144DF1C
# Looked up once, because every frame is packed and unpacked.
_unpack: Final = _LAYOUT.unpack_from
pack_head: Final = _CHECKED_PART.pack
pack_check: Final = struct.Struct("<I").pack
_crc32: Final = zlib.crc32


class FrameType(enum.IntEnum):
    """The types of frames. Values are never reused; unknown types are refused."""

    HELLO = 0x01
    ACCEPT = 0x02
    CONFIRM = 0x03
    REFUSE = 0x04
    OFFER = 0x05
    CHOICE = 0x06
    PING = 0x10
    PONG = 0x11
    CLOSE = 0x12
    CREDIT = 0x13
    LANE_OPEN = 0x14
    LANE_READY = 0x15
    LANE_CLOSE = 0x16
    LANE_ACK = 0x17
    WINDOW_VIEW = 0x18
    WINDOW_MEMORY = 0x19
    WINDOW_CLOSE = 0x1A
    ANNOUNCE = 0x20
    READY = 0x21
    PUT = 0x22
    GET = 0x23
    FIN = 0x24
    FAIL = 0x25
    LANE_DATA = 0x26
    WINDOW_OPEN = 0x27
    WINDOW_OPENED = 0x28
    WINDOW_GET = 0x29
    WINDOW_GOT = 0x2A
    OPEN = 0x30
    AGREE = 0x31
    SEGMENT = 0x32
    SEGMENT_ACK = 0x33
    COMMIT = 0x34
    COMMIT_ACK = 0x35
    MESSAGE = 0x40
    DATA = 0x41
    MARKED_DATA = 0x42
    WINDOW_DATA = 0x43


FIRST_PAYLOAD_TYPE: Final = 0x40
HANDSHAKE_TYPES: Final = frozenset(
    {FrameType.HELLO, FrameType.ACCEPT, FrameType.CONFIRM, FrameType.REFUSE}
)


class Flag(enum.IntFlag):
    """The bits of the flags byte.

    A control frame has exactly one of them, because its body is always protected. A
    payload frame is never sealed, and need not have a checksum, because the transport
    may be trusted.
    """

    SEALED = 1
    """The last SEAL_BYTES of the body authenticate the frame."""
    CHECKED = 2
    """``payload_check`` is the checksum of the bytes after the header."""


_SEALED: Final = int(Flag.SEALED)
_CHECKED: Final = int(Flag.CHECKED)

# The smallest and the largest body of each type. No more than this is ever read.
_BODY_BYTES: Final[dict[int, tuple[int, int]]] = {
    **dict.fromkeys(HANDSHAKE_TYPES, (HANDSHAKE_BODY_BYTES, HANDSHAKE_BODY_BYTES)),
    **dict.fromkeys(
        (t for t in FrameType if FrameType.OFFER <= t < FIRST_PAYLOAD_TYPE),
        (1, 1024 + SEAL_BYTES),
    ),
    # The only one of the four that may be sent after the proofs, and so may be sealed.
    FrameType.REFUSE: (HANDSHAKE_BODY_BYTES, HANDSHAKE_BODY_BYTES + SEAL_BYTES),
    FrameType.OFFER: (1, CONTROL_BODY_BYTES_MAX),
    FrameType.CHOICE: (1, CONTROL_BODY_BYTES_MAX),
    FrameType.LANE_OPEN: (1, BOOTSTRAP_BYTES_MAX + 1024),
    FrameType.LANE_CLOSE: (1, 9 * LANE_PAYLOADS_MAX + 1024),
    FrameType.LANE_DATA: (1, DESCRIPTOR_BYTES_MAX + 128),
    FrameType.WINDOW_VIEW: (1, CONTROL_BODY_BYTES_MAX),
    FrameType.WINDOW_MEMORY: (1, CONTROL_BODY_BYTES_MAX),
    FrameType.WINDOW_OPENED: (1, CONTROL_BODY_BYTES_MAX),
    FrameType.WINDOW_GET: (1, 12 * WINDOW_GET_BLOCKS_MAX + 1024),
    FrameType.OPEN: (1, CONTROL_BODY_BYTES_MAX),
    FrameType.AGREE: (1, CONTROL_BODY_BYTES_MAX),
    FrameType.SEGMENT_ACK: (1, 5 * LANDED_MAX + 64),
    FrameType.COMMIT_ACK: (1, CONTROL_BODY_BYTES_MAX),
    FrameType.MESSAGE: (0, EAGER_BYTES_MAX),
    FrameType.DATA: (1, CHUNK_BYTES_MAX),
    FrameType.MARKED_DATA: (1, CHUNK_BYTES_MAX),
    FrameType.WINDOW_DATA: (1, WINDOW_DATA_BYTES_MAX),
}
# The same bounds by plain numbers, with the flag that a type may have instead of
# CHECKED.
_ALLOWED: Final = {
    int(frame_type): (low, high, 0 if frame_type >= FIRST_PAYLOAD_TYPE else _SEALED)
    for frame_type, (low, high) in _BODY_BYTES.items()
}


class Header(msgspec.Struct, frozen=True):
    """A decoded header; the table above explains the fields."""

    type: int
    flags: int
    sequence: int
    length: int
    request: int
    segment: int
    offset: int
    payload_check: int
    header_check: int


def encode_header(
    type: int,
    flags: int,
    sequence: int,
    length: int,
    request: int = 0,
    segment: int = 0,
    offset: int = 0,
    payload_check: int = 0,
) -> bytes:
    """Return the 32 bytes of a header."""
    head = pack_head(
        type, flags, sequence, length, request, segment, offset, payload_check
    )
    return head + pack_check(_crc32(head))


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Decode the 32 bytes of a header, and check everything that needs no state.

    Raises:
        MalformedFrame: The check does not match, the type does not allow these flags,
            or a field that is unused with these flags is not zero.
        UnexpectedFrame: The type is unknown.
        FrameTooLarge: The type does not allow this length.
    """
    header = Header(*_unpack(data))
    if _crc32(data) != _INTACT:
        raise MalformedFrame("KVW-HD-01", "header check does not match its bytes")
    allowed = _ALLOWED.get(header.type)
    if allowed is None:
        raise UnexpectedFrame("KVW-HD-02", f"unknown frame type 0x{header.type:02x}")
    low, high, other = allowed
    if header.flags != _CHECKED:
        if header.flags != other:
            raise MalformedFrame(
                "KVW-HD-03",
                f"{FrameType(header.type).name} with flags 0x{header.flags:02x}; "
                f"0x{_CHECKED:02x} and 0x{other:02x} are allowed",
            )
        if header.payload_check:
            raise MalformedFrame(
                "KVW-HD-06", "a payload check without the CHECKED flag"
            )
    if not low <= header.length <= high:
        raise FrameTooLarge(
            "KVW-HD-04",
            f"{FrameType(header.type).name} of {header.length} bytes; {low} to {high} "
            f"are allowed",
        )
    return header
