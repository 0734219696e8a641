"""The numbers, checks and seals of one link's frames, in both directions.

Each direction of a link counts its frames. The header contains the low 16 bits of the
count, so the next frame shows if one was lost, duplicated or reordered. A CRC-32 in the
header covers a control body. In ``psk`` mode, after the proofs were exchanged, the body
ends with a seal instead: a truncated HMAC over the full 64-bit count, the header and
the body, with a key for this connection and direction. So a seal cannot be replayed,
reflected, or moved to another frame.
"""

from __future__ import annotations

import hmac
import zlib
from typing import Final

from kvwire.errors import MalformedFrame, UnexpectedFrame
from kvwire.limits import SEAL_BYTES
from kvwire.types import Role
from kvwire.wire.header import (
    FIRST_PAYLOAD_TYPE,
    Flag,
    Header,
    decode_header,
    encode_header,
    pack_check,
    pack_head,
)

_SEQUENCE_MASK: Final = 0xFFFF
_CHECKED: Final = int(Flag.CHECKED)
_SEALED: Final = int(Flag.SEALED)


class Framing:
    """Encodes one side's frames for a link, and checks the received frames.

    Attributes:
        sent: Frames encoded so far.
        received: Frames whose header was accepted so far.
    """

    __slots__ = ("_open_key", "_seal_key", "received", "sent")

    def __init__(self) -> None:
        self.sent: int = 0
        self.received: int = 0
        self._seal_key: bytes | None = None
        self._open_key: bytes | None = None

    def use_seals(self, role: Role, seal: dict[Role, bytes]) -> None:
        """Seal control frames from now on, and require the peer's seals."""
        self._seal_key = seal[role]
        self._open_key = seal[role.other]

    @property
    def sealed(self) -> bool:
        """Whether control frames are sealed."""
        return self._seal_key is not None

    def control(
        self, frame_type: int, body: bytes, *, request: int = 0
    ) -> tuple[bytes, bytes]:
        """Return the header and body of the next control frame."""
        key = self._seal_key
        sequence = self.sent & _SEQUENCE_MASK
        if key is None:
            header = encode_header(
                frame_type,
                _CHECKED,
                sequence,
                len(body),
                request,
                payload_check=zlib.crc32(body),
            )
        else:
            length = len(body) + SEAL_BYTES
            header = encode_header(frame_type, _SEALED, sequence, length, request)
            body += _seal(key, self.sent, header, body)
        self.sent += 1
        return header, body

    def payload(
        self,
        frame_type: int,
        length: int,
        request: int = 0,
        segment: int = 0,
        offset: int = 0,
        check: int | None = None,
    ) -> bytes:
        """Return the header of the next frame that carries payload."""
        sent = self.sent
        self.sent = sent + 1
        head = pack_head(
            frame_type,
            0 if check is None else _CHECKED,
            sent & _SEQUENCE_MASK,
            length,
            request,
            segment,
            offset,
            check or 0,
        )
        return head + pack_check(zlib.crc32(head))

    def accept_header(self, raw: bytes | memoryview) -> Header:
        """Decode the next header and check its place in the sequence."""
        header = decode_header(raw)
        received = self.received
        if header.sequence != received & _SEQUENCE_MASK:
            raise MalformedFrame(
                "KVW-HD-05",
                f"frame {header.sequence} where {received & _SEQUENCE_MASK} was due: a "
                f"frame was lost, doubled or reordered",
            )
        if header.type < FIRST_PAYLOAD_TYPE:
            sealed = header.flags == _SEALED
            if sealed != (self._open_key is not None):
                kind = "a sealed" if sealed else "an unsealed"
                raise UnexpectedFrame(
                    "KVW-AU-01",
                    f"{kind} control frame in this trust mode, at this point",
                )
        self.received = received + 1
        return header

    def open(self, header: Header, raw: bytes, body: bytes) -> bytes:
        """Check the control frame just received; return its body without the seal."""
        if self._open_key is None:
            if zlib.crc32(body) != header.payload_check:
                raise MalformedFrame("KVW-HD-07", "a control body arrived damaged")
            return body
        plain = body[:-SEAL_BYTES]
        seal = body[-SEAL_BYTES:]
        expected = _seal(self._open_key, self.received - 1, raw, plain)
        if not hmac.compare_digest(seal, expected):
            raise MalformedFrame("KVW-AU-02", "the seal of a control frame is wrong")
        return plain


def _seal(key: bytes, count: int, header: bytes, body: bytes) -> bytes:
    message = count.to_bytes(8, "little") + header + body
    return hmac.digest(key, message, "sha256")[:SEAL_BYTES]
