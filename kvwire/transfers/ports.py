"""The services of a communicator that a KV transfer uses, and who is told of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.services import Services
from kvwire.errors import KVWireError
from kvwire.kv.outcome import Outcome


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
        connections: Iterable[ConnectionDriver],
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

    registry: RegistryPort
    watchers: ObserverPort
