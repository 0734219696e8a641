"""The interfaces of a connection and a communicator that a KV transfer uses.

Transfers depend only on these; the rooms above implement them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvwire.backend import Payload
from kvwire.config import Config
from kvwire.driver.device_staging import DeviceStaging
from kvwire.errors import KVWireError, WireCode
from kvwire.kv.outcome import Outcome
from kvwire.proto.records import Box, RequestRecord, SegmentRecord
from kvwire.proto.transfers import Transfers
from kvwire.runtime.services import Services
from kvwire.security.tls import CredentialFiles
from kvwire.types import PeerInfo


class ConnectionPort(Protocol):
    """The part of a connection that transfers use.

    Attributes:
        front: The connection object that users hold.
        chunk_bytes: The size of incoming chunks.
    """

    front: Any
    peer: PeerInfo
    transfers: Transfers
    staging: DeviceStaging
    chunk_bytes: int

    @property
    def silent_s(self) -> float:
        """Return the seconds since the peer last sent anything."""

    def start_transfer(
        self,
        leg: Any,
        *,
        key: bytes,
        priority: int,
        description: bytes,
        pull: bool,
    ) -> None:
        """Send OPEN, and set the leg's core request."""

    def send_segment(
        self,
        request: RequestRecord,
        box: Box,
        memory: Payload,
        nbytes: int,
        commit: int = 0,
    ) -> SegmentRecord:
        """Send a part of a transfer at once, or queue it for :meth:`run` to send."""

    def refuse(
        self, request: RequestRecord, error: KVWireError, code: WireCode
    ) -> None:
        """End a request and send the reason to the peer."""

    def run(self) -> None:
        """Execute the core's decisions."""


class ObserverPort(Protocol):
    """Observes the begin and end of transfers.

    Attributes:
        traced: Whether at least one observer is a tracer.
    """

    traced: bool

    @property
    def watchers(self) -> Sequence[object]:
        """Return the observers; usually there are none."""

    def trace_context(self) -> bytes:
        """Return the caller's trace context, or b"" if there is none."""

    def begun(self, transfer: Any) -> None:
        """Report that a transfer has begun."""

    def ended(
        self,
        transfer: Any,
        outcome: Outcome,
        connections: Iterable[ConnectionPort],
    ) -> None:
        """Report a transfer's outcome, and the connections that carried it."""


class RegistryPort(Protocol):
    """The part of the registry that a transfer uses."""

    def over(self, end: Any, cause: KVWireError) -> None:
        """Remove a transfer that has ended; keep the cause for late peers."""

    def owe(self, leg: Any) -> None:
        """Keep an ended leg until its peer knows how it ended."""

    def peer_knows(self, leg: Any) -> None:
        """Drop a leg whose peer knows how it ended."""


class SharedServices(Services):
    """Adds the registry and the observers to the services of a communicator.

    Attributes:
        registry: All transfers of the communicator that have not ended.
        watchers: The observers, called when a transfer begins and ends.
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
