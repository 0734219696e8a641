"""What the two endpoints of a lane tell each other before anything is initialised.

The client names both directions, and both sides say which library they have loaded:
NCCL refuses a peer of another version only once both have begun, and not always by
name. Everything travels in the authenticated handshake; the names are secrets, since
whoever knows one can take the peer's place.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kvwire.errors import BackendUnavailable

_MAGIC: Final = b"KVNCCL01"
# magic, length of the library's name, lengths of the two directions' names
_HEAD: Final = struct.Struct("<8sBHH")
_LIBRARY_BYTES_MAX: Final = 64
# NCCL's unique ids have 128 bytes.
_NAME_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class NcclBootstrap:
    """Holds what one lane endpoint tells the other."""

    library: str
    there: bytes = b""
    back: bytes = b""

    def encode(self) -> bytes:
        """Encode it."""
        library = self.library.encode()[:_LIBRARY_BYTES_MAX]
        head = _HEAD.pack(_MAGIC, len(library), len(self.there), len(self.back))
        return head + library + self.there + self.back

    @classmethod
    def decode(cls, raw: bytes) -> NcclBootstrap:
        """Read what a peer has sent."""
        if len(raw) < _HEAD.size:
            raise _unreadable(f"{len(raw)} bytes")
        magic, library, there, back = _HEAD.unpack_from(raw)
        if magic != _MAGIC:
            raise _unreadable("of another version of kvwire")
        if library > _LIBRARY_BYTES_MAX or max(there, back) > _NAME_BYTES_MAX:
            raise _unreadable("with names too long")
        if len(raw) != _HEAD.size + library + there + back:
            raise _unreadable(f"of {len(raw)} bytes, which are not what it says")
        rest = raw[_HEAD.size :]
        try:
            name = rest[:library].decode()
        except UnicodeDecodeError:
            raise _unreadable("with a name that is no text") from None
        return cls(name, rest[library : library + there], rest[library + there :])

    def require_same_library(self, own: str) -> None:
        """Refuse a peer that has loaded something else."""
        if self.library != own:
            raise BackendUnavailable(
                f"{own} is loaded here and {self.library!r} at the peer; both sides "
                f"need the same version"
            )


def _unreadable(what: str) -> BackendUnavailable:
    return BackendUnavailable(f"the peer's bootstrap cannot be read: {what}")
