"""Observers, called when KV transfers begin and end: traces, logs, accounting.

They are called in the middle of a transfer's work, so they must be quick. If an
observer raises, the error is logged and the transfer is not affected.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.endpoint.connection import Connection
from kvwire.kv.outcome import Outcome
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.outgoing import Outgoing

logger: logging.Logger = logging.getLogger("kvwire.connections")

transfers_logger: logging.Logger = logging.getLogger("kvwire.transfers")


class Observer(Protocol):
    """Receives the begin and end of each transfer, on the communicator's loop."""

    def begun(self, transfer: Incoming | Outgoing) -> None:
        """Handle the begin of a transfer, in the context of the call that began it."""

    def ended(
        self,
        transfer: Incoming | Outgoing,
        outcome: Outcome,
        connections: tuple[Connection, ...],
    ) -> None:
        """Handle the outcome of a transfer; called once for each that has begun.

        Args:
            transfer: The transfer.
            outcome: Its outcome.
            connections: The connections used by its last attempts; empty if no peer
                joined.
        """


class Observers:
    """Holds the observers of one communicator.

    Attributes:
        traced: Whether at least one observer is a tracer.
    """

    def __init__(self) -> None:
        self.watchers: list[Observer] = []
        self.traced: bool = False

    def add(self, watcher: Observer) -> None:
        """Call an observer for every transfer that begins later.

        An observer with a method ``trace_context`` is a tracer. The method returns the
        caller's trace, in the format of
        :attr:`kvwire.transfers.offer.TransferOffer.trace`, which is sent to the peer.
        """
        self.watchers.append(watcher)
        self.traced = any(hasattr(one, "trace_context") for one in self.watchers)

    def trace_context(self) -> bytes:
        """Return the caller's trace context, or b"" if there is none."""
        for watcher in self.watchers:
            if hasattr(watcher, "trace_context"):
                with _logged():
                    return bytes(watcher.trace_context())
        return b""

    def remove(self, watcher: Observer) -> None:
        """Stop calling an observer; does nothing if it was not registered."""
        if watcher in self.watchers:
            self.watchers.remove(watcher)

    def begun(self, transfer: Incoming | Outgoing) -> None:
        """Report to every observer that a transfer has begun."""
        for watcher in tuple(self.watchers):
            with _logged():
                watcher.begun(transfer)

    def ended(
        self,
        transfer: Incoming | Outgoing,
        outcome: Outcome,
        connections: Iterable[ConnectionDriver],
    ) -> None:
        """Report the outcome of a transfer to every observer."""
        ran_on: tuple[Connection, ...] = tuple(c.front for c in connections)
        for watcher in tuple(self.watchers):
            with _logged():
                watcher.ended(transfer, outcome, ran_on)


class TransferLog:
    """Writes a debug line for each begin and each end of a transfer."""

    def begun(self, transfer: Incoming | Outgoing) -> None:
        """Log that a transfer begins."""
        transfers_logger.debug("%r", transfer)

    def ended(
        self,
        transfer: Incoming | Outgoing,
        outcome: Outcome,
        connections: tuple[object, ...],
    ) -> None:
        """Log the outcome of a transfer."""
        reasons = "; ".join(outcome.missing.reasons)
        text = "%r: %d bytes in %.3f s%s; %s"
        why = f", {reasons}" if reasons else ""
        spent_s = outcome.timings.total_s
        transfers_logger.debug(
            text, transfer, outcome.nbytes, spent_s, why, outcome.timings
        )


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("an observer of transfers failed")
