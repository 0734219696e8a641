"""The bootstrap of a lane, and the message tags that are derived from it.

::

    bootstrap = "KVUX" | version 1 | UCX major, minor, release |
                9 unused bytes | lane, 7 bytes | length | address

``lane`` is a random number of 40 bits, which only the bootstrap reveals. Every message
*to* that lane has these bits at the top of its tag. So an attacker who can merely reach
the worker over the network cannot match a posted receive. The lower bits number the
messages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvwire.errors import BackendUnavailable
from kvwire.limits import BOOTSTRAP_BYTES_MAX
from kvwire_ucx.library import Version

# The first message opens the lane, and the second ends it; all others are payloads.
HELLO: Final = 0
BYE: Final = 1
FIRST_PAYLOAD: Final = 2
MESSAGES: Final = 2**23

_FORMAT: Final = struct.Struct(">4sB3B9x7sH")
_MAGIC: Final = b"KVUX"
_VERSION: Final = 1
LANE_BITS: Final = 40
_MESSAGE_BITS: Final = 24
# UCX reads addresses without knowing their length. With this padding, a malicious
# address ends in zeros.
_PADDING: Final = bytes(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxBootstrap:
    """The first message from one lane endpoint to the other."""

    lane: int
    version: Version
    address: bytes

    def to_bytes(self) -> bytes:
        """Return it as bytes.

        Raises:
            BackendUnavailable: UCX's address is too long, because there are too many
                devices.
        """
        head = _FORMAT.pack(
            _MAGIC,
            _VERSION,
            *self.version,
            self.lane.to_bytes(7, "big"),
            len(self.address),
        )
        if len(head) + len(self.address) > BOOTSTRAP_BYTES_MAX:
            raise BackendUnavailable(
                f"UCX's address has {len(self.address)} bytes and a bootstrap at most "
                f"{BOOTSTRAP_BYTES_MAX}; name fewer devices in UCX_NET_DEVICES"
            )
        return head + self.address

    @property
    def padded_address(self) -> bytes:
        """Return the address, followed by zeros."""
        return self.address + _PADDING

    def tag(self, message: int) -> int:
        """Return the tag of a message to this side."""
        return self.lane << _MESSAGE_BITS | message


def parse(data: bytes) -> UcxBootstrap:
    """Read a peer's bootstrap.

    Raises:
        BackendUnavailable: It is malformed or of another version.
    """
    if not _FORMAT.size < len(data) <= BOOTSTRAP_BYTES_MAX:
        raise BackendUnavailable(f"the peer's bootstrap has {len(data)} bytes")
    magic, format_, *version, number, length = _FORMAT.unpack_from(data)
    if magic != _MAGIC or format_ != _VERSION:
        raise BackendUnavailable(
            f"the peer's bootstrap begins with {data[:5].hex()}, not with "
            f"{(_MAGIC + bytes([_VERSION])).hex()}; both sides need the same kvwire"
        )
    address = data[_FORMAT.size :]
    lane = int.from_bytes(number, "big")
    if length != len(address) or lane >> LANE_BITS:
        raise BackendUnavailable(
            f"the peer's bootstrap announces an address of {length} bytes but has "
            f"{len(address)}, for lane {lane}"
        )
    return UcxBootstrap(lane=lane, version=Version(*version), address=address)


def next_message(message: int) -> int:
    """Return the next message's number; numbers restart after ``MESSAGES``."""
    return message + 1 if message + 1 < MESSAGES else FIRST_PAYLOAD
