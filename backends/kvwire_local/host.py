"""Whether two processes are on one host, and can have a Unix socket between them.

The boot id is random and new with each boot of a kernel; all containers of a host see
the same. An abstract Unix socket is seen within one network namespace.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvwire.errors import BackendUnavailable

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")
_MAGIC: Final = b"kvwlocl2"
_BOOTSTRAP: Final = struct.Struct("<8s16sQ")


@dataclass(frozen=True, slots=True)
class Host:
    """Describes where a process runs."""

    boot_id: bytes
    network: int

    @classmethod
    def here(cls) -> Self:
        """Return where this process runs."""
        try:
            boot_id = uuid.UUID(_BOOT_ID.read_text().strip()).bytes
            network = _NETWORK.stat().st_ino
        except (OSError, ValueError) as exc:
            raise BackendUnavailable(
                f"local: /proc does not say on which host this is: {exc}"
            ) from exc
        return cls(boot_id, network)

    def encode(self) -> bytes:
        """Return the bootstrap of a lane."""
        return _BOOTSTRAP.pack(_MAGIC, self.boot_id, self.network)

    @classmethod
    def decode(cls, bootstrap: bytes) -> Self:
        """Read the bootstrap of a peer."""
        if len(bootstrap) != _BOOTSTRAP.size or bootstrap[:8] != _MAGIC:
            raise BackendUnavailable(
                f"local: {len(bootstrap)} bytes from the peer are no bootstrap of "
                f"this version"
            )
        _, boot_id, network = _BOOTSTRAP.unpack(bootstrap)
        return cls(boot_id, network)

    def require_same(self, other: Host) -> None:
        """Do nothing if a socket can lead there."""
        if other.boot_id != self.boot_id:
            raise BackendUnavailable(
                f"local: the peer is on another host (boot id "
                f"{other.boot_id.hex()[:8]}, here {self.boot_id.hex()[:8]})"
            )
        if other.network != self.network:
            raise BackendUnavailable(
                f"local: the peer is in another network namespace ({other.network}, "
                f"here {self.network}); run both containers in one, as a pod does"
            )
