"""Any 32 bytes, as they are and under a check that matches them."""

from __future__ import annotations

import zlib

from kvwire.errors import ProtocolError
from kvwire.limits import CHUNK_BYTES_MAX, HEADER_BYTES
from kvwire.wire.header import decode_header, encode_header


def run(data: bytes) -> int:
    """A header that is read is written again as it was."""
    raw = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    repaired = raw[:-4] + zlib.crc32(raw[:-4]).to_bytes(4, "little")
    for candidate in (raw, repaired):
        try:
            header = decode_header(candidate)
        except ProtocolError:
            continue
        assert header.length <= CHUNK_BYTES_MAX
        written = encode_header(
            header.type,
            header.flags,
            header.sequence,
            header.length,
            header.request,
            header.segment,
            header.offset,
            header.payload_check,
        )
        assert written == candidate
    return 2 * HEADER_BYTES
