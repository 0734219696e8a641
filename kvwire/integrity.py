"""Whether a payload is the one that was sent."""

from __future__ import annotations

from kvwire.backend import Payload
from kvwire.memory.checksum import checksum
from kvwire.wire.header import Flag, Header

_CHECKED = int(Flag.CHECKED)


def matches(payload: Payload | None, header: Header) -> bool:
    """Whether a payload is what its header says, as far as anybody can tell."""
    return (
        not header.flags & _CHECKED
        or payload is None
        or checksum(payload) == header.payload_check
    )
