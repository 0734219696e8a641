"""Whether a payload is the one that was sent."""

from __future__ import annotations

from kvwire.backend import Payload
from kvwire.kv.fragments import Fragments
from kvwire.memory.checksum import checksum
from kvwire.wire.header import Flag, Header

_CHECKED = int(Flag.CHECKED)


def matches(payload: Payload | None, header: Header) -> bool:
    """Whether a payload is what its header says, as far as anybody can tell."""
    if not header.flags & _CHECKED or payload is None:
        return True
    if isinstance(payload, Fragments) and payload.device is not None:
        return True  # out of the host's reach: its transport answers for it
    return checksum(payload) == header.payload_check


def check_of(payload: Payload) -> int | None:
    """The checksum of a payload; None where the host cannot reach it."""
    if isinstance(payload, Fragments) and payload.device is not None:
        return None
    return checksum(payload)
