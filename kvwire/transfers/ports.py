"""The interfaces of a connection and a communicator that a KV transfer uses.

Transfers know nothing else of either; those that implement these stand above them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvwire.config import Config
from kvwire.driver.device_staging import DeviceStaging
from kvwire.driver.services import Services
from kvwire.errors import KVWireError, WireCode
from kvwire.kv.outcome import Outcome
from kvwire.proto.records import RequestRecord
from kvwire.proto.transfers import Transfers
from kvwire.security.tls import CredentialFiles
from kvwire.types import PeerInfo


class ConnectionPort(Protocol):
    """Stands for one connection, as transfers use it.

    Attributes:
        front: The connection that users hold.
        chunk_bytes: Bytes of a chunk that arrives here.
    """

    front: Any
    peer: PeerInfo
    transfers: Transfers
    staging: DeviceStaging
    chunk_bytes: int

    @property
    def silent_s(self) -> float:
        """Return the seconds since the peer was last active."""

    def start_transfer(
        self,
        leg: Any,
        *,
        key: bytes,
        priority: int,
        description: bytes,
        pull: bool,
    ) -> None:
        """Send OPEN; the leg has its request of the core from here on."""

    def refuse(
        self, request: RequestRecord, error: KVWireError, code: WireCode
    ) -> None:
        """End a request and send the reason to the peer."""

    def run(self) -> None:
        """Carry out the core's decisions."""


class ObserverPort(Protocol):
    """Observes when transfers begin and end.

    Attributes:
        traced: Whether some watcher traces.
    """

    traced: bool

    @property
    def watchers(self) -> Sequence[object]:
        """Return who is told; most often nobody."""

    def trace_context(self) -> bytes:
        """Return the trace that the caller is in; b"" if it is in none."""

    def begun(self, transfer: Any) -> None:
        """Tell that a transfer was taken on."""

    def ended(
        self,
        transfer: Any,
        outcome: Outcome,
        connections: Iterable[ConnectionPort],
    ) -> None:
        """Tell that a transfer has an outcome, and which connections it ran on."""


class RegistryPort(Protocol):
    """Stands for all transfers of a communicator, as each of them uses it."""

    def over(self, end: Any, cause: KVWireError) -> None:
        """Remove a transfer that has ended; keep the cause for late peers."""

    def owe(self, leg: Any) -> None:
        """Keep a leg that is over here until its peer knows how it ended."""

    def peer_knows(self, leg: Any) -> None:
        """Drop a leg whose peer knows how it ended."""


class SharedServices(Services):
    """Adds what transfers share to what the parts of a communicator share.

    Attributes:
        registry: All transfers of the communicator that have not ended.
        watchers: Those that are called when a transfer begins and ends.
    """

    def __init__(
        self,
        config: Config,
        tls: CredentialFiles | None,
        registry: RegistryPort,
        watchers: ObserverPort,
    ) -> None:
        super().__init__(config, tls)
        self.registry: RegistryPort = registry
        self.watchers: ObserverPort = watchers
