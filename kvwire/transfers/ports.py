"""What a KV transfer needs of the connections it runs on, and of its communicator.

Transfers know nothing else of either: who implements these stands above them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvwire.config import Config
from kvwire.driver.buffers import BufferTable
from kvwire.driver.counters import Counters
from kvwire.driver.device_staging import DeviceStaging
from kvwire.driver.devices import Devices
from kvwire.driver.loop_thread import LoopThread
from kvwire.driver.trace_ring import TraceRing
from kvwire.errors import KVWireError, WireCode
from kvwire.kv.outcome import Outcome
from kvwire.proto.requests import RequestRecord
from kvwire.proto.transfers import Transfers
from kvwire.types import PeerInfo

if TYPE_CHECKING:
    from kvwire.transfers.base import Attempt, KVTransfer
    from kvwire.transfers.matching import TransferRegistry


class ConnectionPort(Protocol):
    """One connection, as transfers use it."""

    @property
    def peer(self) -> PeerInfo:
        """Who is at the other end."""

    @property
    def silent_s(self) -> float:
        """How long nothing was heard of the peer."""

    @property
    def transfers(self) -> Transfers:
        """What the core of the connection does for transfers."""

    @property
    def staging(self) -> DeviceStaging:
        """What moves memory of devices."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk that arrives here."""

    def start_transfer(
        self,
        attempt: Attempt,
        *,
        key: bytes,
        priority: int,
        description: bytes,
        pull: bool,
    ) -> None:
        """Send OPEN; the attempt has its request of the core from here on.

        Raises:
            UsageError: The peer has too many transfers to answer already.
            ConnectionClosed: The connection is closing or closed.
        """

    def refuse(
        self, request: RequestRecord, error: KVWireError, code: WireCode
    ) -> None:
        """End a request and tell the peer why."""

    def run(self) -> None:
        """Carry out what the core has decided."""


class ObserverPort(Protocol):
    """Who is told when transfers begin and end."""

    @property
    def watchers(self) -> Sequence[object]:
        """Who is told of transfers."""

    @property
    def traced(self) -> bool:
        """Whether some watcher traces."""

    def trace_context(self) -> bytes:
        """Return the trace that the caller is in; b"" if it is in none."""

    def begun(self, transfer: KVTransfer) -> None:
        """Tell that a transfer was taken on."""

    def ended(
        self,
        transfer: KVTransfer,
        outcome: Outcome,
        connections: Iterable[ConnectionPort],
    ) -> None:
        """Tell that a transfer has an outcome, and which connections it ran on."""


class CommunicatorPort(Protocol):
    """One communicator, as transfers use it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that all of it runs on."""

    @property
    def thread(self) -> LoopThread:
        """Who may call its transfers."""

    @property
    def config(self) -> Config:
        """Leases, quarantine, and whether transfers are resumed."""

    @property
    def buffers(self) -> BufferTable:
        """The memory that is lent to links."""

    @property
    def devices(self) -> Devices:
        """The devices that some of the memory belongs to."""

    @property
    def ring(self) -> TraceRing | None:
        """Where events are noted for a trace, if they are."""

    @property
    def counters(self) -> Counters:
        """Counts of what has ended how."""

    @property
    def watchers(self) -> ObserverPort:
        """Who is told of transfers."""

    @property
    def registry(self) -> TransferRegistry:
        """Every transfer of the communicator that has not ended."""
