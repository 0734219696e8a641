"""KV transfers as OpenTelemetry spans.

>>> tracer = TransferTracer(comm)

Each end of a transfer is one span, from the call to the outcome, below the span that is
current where the call was made. The two ends have the transfer's id in common; what a
serving stack passes between its processes joins them into one trace.

==============================  ======================================================
attribute                       says
==============================  ======================================================
``kvwire.transfer.id``          its id
``kvwire.communicator``         this side's name
``kvwire.blocks``               blocks in its list
``kvwire.outcome``              ``complete``, ``partial`` or ``failed``
``kvwire.landed_blocks``        blocks that landed
``kvwire.bytes``                payload bytes that landed
``kvwire.layers_grouped``       layers that moved together
``kvwire.peers``                the names of the other side
``kvwire.transports``           what carried the payload, in the same order
``kvwire.queue_s`` and others   the fields of :class:`kvwire.Timings`, in seconds
==============================  ======================================================
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

import kvwire
from kvwire import Communicator, Connection, Outcome
from kvwire.extras import needed_by
from kvwire.transfers.base import text_of

with needed_by("kvwire.observe.opentelemetry", extra="traces"):
    from opentelemetry import trace
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

if TYPE_CHECKING:
    from kvwire import Incoming, Outgoing


class TransferTracer:
    """Traces the KV transfers of one communicator that begin from here on.

    Args:
        communicator: Which one. To be called on its loop; for a
            :class:`kvwire.Engine` that is what ``engine.start`` is for.
        provider: Where spans go; None for the global provider.
    """

    def __init__(
        self, communicator: Communicator, provider: TracerProvider | None = None
    ) -> None:
        self._communicator = communicator
        self._tracer = trace.get_tracer(
            "kvwire", kvwire.__version__, tracer_provider=provider
        )
        # One for each transfer under way.
        self._spans: dict[Incoming | Outgoing, Span] = {}
        communicator.watchers.add(self)

    def close(self) -> None:
        """Trace no more. Spans of transfers under way end here, and say so."""
        self._communicator.watchers.remove(self)
        for span in self._spans.values():
            span.set_status(Status(StatusCode.ERROR, "not traced to its end"))
            span.end()
        self._spans.clear()

    def __enter__(self) -> Self:
        """Return the tracer; it is closed at the end of the block."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """See :meth:`close`."""
        self.close()

    def begun(self, transfer: Incoming | Outgoing) -> None:
        """See :class:`kvwire.endpoint.observers.Observer`."""
        verb, kind = "send", SpanKind.PRODUCER
        if isinstance(transfer, kvwire.Incoming):
            verb, kind = "receive", SpanKind.CONSUMER
        self._spans[transfer] = self._tracer.start_span(
            f"kvwire {verb}",
            kind=kind,
            attributes={
                "kvwire.transfer.id": text_of(transfer.id),
                "kvwire.communicator": self._communicator.name,
            },
        )

    def ended(
        self,
        transfer: Incoming | Outgoing,
        outcome: Outcome,
        connections: tuple[Connection, ...],
    ) -> None:
        """See :class:`kvwire.endpoint.observers.Observer`."""
        span = self._spans.pop(transfer, None)
        if span is None:  # begun before us
            return
        span.set_attributes(
            {
                "kvwire.outcome": outcome.state,
                "kvwire.blocks": sum(map(len, outcome.lists.values())),
                "kvwire.landed_blocks": len(outcome.landed),
                "kvwire.bytes": outcome.nbytes,
                "kvwire.layers_grouped": outcome.layers_grouped,
                "kvwire.peers": [one.peer.name for one in connections],
                "kvwire.transports": [one.transport for one in connections],
            }
        )
        for phase, seconds in dataclasses.asdict(outcome.timings).items():
            span.set_attribute(f"kvwire.{phase}", seconds)
        if not outcome.complete:
            reasons = "; ".join(outcome.missing.reasons)
            span.set_status(Status(StatusCode.ERROR, reasons))
        span.end()
