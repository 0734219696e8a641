"""KV transfers as OpenTelemetry spans.

>>> tracer = TransferTracer(comm)

Each end of a transfer is one span, from the call to the outcome. Its parent is the span
that is current at the call. The requesting end sends its trace to its peer, so both
ends share one trace. An end without a current span has the peer's span as its parent;
an end with a current span gets a link to the peer's span.

==============================  ======================================================
attribute                       meaning
==============================  ======================================================
``kvwire.transfer.id``          its id
``kvwire.communicator``         this side's name
``kvwire.blocks``               blocks in its list
``kvwire.outcome``              ``complete``, ``partial`` or ``failed``
``kvwire.landed_blocks``        blocks that landed
``kvwire.bytes``                payload bytes that landed
``kvwire.layers_grouped``       layers that moved together
``kvwire.peers``                the names of the other side
``kvwire.transports``           the payload's transports, in the same order
``kvwire.queue_s`` and others   the fields of :class:`kvwire.Timings`, in seconds
==============================  ======================================================
"""

from __future__ import annotations

import dataclasses
from time import time_ns
from typing import TYPE_CHECKING, Self

import kvwire
from kvwire import Communicator, Connection, Outcome
from kvwire.extras import needed_by
from kvwire.types import text_of

with needed_by("kvwire.observe.opentelemetry", extra="traces"):
    from opentelemetry import trace
    from opentelemetry.context import Context, attach, get_current
    from opentelemetry.trace import (
        Link,
        Span,
        SpanKind,
        Status,
        StatusCode,
        TracerProvider,
    )
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

if TYPE_CHECKING:
    from kvwire import Incoming, Outgoing


class TransferTracer:
    """Traces a communicator's KV transfers that begin from now on.

    Args:
        communicator: The communicator. Call this on its loop; with a
            :class:`kvwire.Engine`, through ``engine.run``.
        provider: The provider that gets the spans; None for the global one.
    """

    def __init__(
        self, communicator: Communicator, provider: TracerProvider | None = None
    ) -> None:
        self._communicator = communicator
        self._tracer = trace.get_tracer(
            "kvwire", kvwire.__version__, tracer_provider=provider
        )
        # The time and context of each running transfer's begin.
        self._begun: dict[Incoming | Outgoing, tuple[int, Context]] = {}
        communicator.watchers.add(self)

    def close(self) -> None:
        """Stop tracing. Spans of running transfers end here, with an error status."""
        self._communicator.watchers.remove(self)
        for transfer in list(self._begun):
            span = self._span(transfer)
            span.set_status(
                Status(StatusCode.ERROR, "tracing ended before the transfer")
            )
            span.end()

    def __enter__(self) -> Self:
        """Return the tracer; it is closed at the end of the block."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close it; see :meth:`close`."""
        self.close()

    def trace_context(self) -> bytes:
        """Return the trace of the current span, which kvwire sends to the peer."""
        now = trace.get_current_span().get_span_context()
        if not now.is_valid:
            return b""
        flags = bytes((int(now.trace_flags) & 0xFF,))
        return now.trace_id.to_bytes(16) + now.span_id.to_bytes(8) + flags

    def begun(self, transfer: Incoming | Outgoing) -> None:
        """Begin the span of a transfer."""
        self._begun[transfer] = time_ns(), get_current()

    def ended(
        self,
        transfer: Incoming | Outgoing,
        outcome: Outcome,
        connections: tuple[Connection, ...],
    ) -> None:
        """End the span of a transfer, with its outcome."""
        if transfer not in self._begun:  # it began before this tracer
            return
        span = self._span(transfer)
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

    def _span(self, transfer: Incoming | Outgoing) -> Span:
        """Start a transfer's span at its time of begin, in the trace of both ends.

        Without a current span at the call, its parent is the peer's span.
        """
        start_ns, context = self._begun.pop(transfer)
        shared = trace.get_current_span(_below(transfer.traceparent))
        here = trace.get_current_span(context).get_span_context()
        there = shared.get_span_context()
        links = []
        if not here.is_valid:
            context = trace.set_span_in_context(shared, context)
        elif there.is_valid and there.trace_id != here.trace_id:
            links.append(Link(there))
        kind = isinstance(transfer, kvwire.Incoming)
        return self._tracer.start_span(
            "kvwire receive" if kind else "kvwire send",
            context,
            SpanKind.CONSUMER if kind else SpanKind.PRODUCER,
            {
                "kvwire.transfer.id": text_of(transfer.id),
                "kvwire.communicator": self._communicator.name,
            },
            links,
            start_ns,
        )


def follow(traceparent: str) -> None:
    """Attach spans of the current task to a remote parent, from now on.

    Args:
        traceparent: The parent, as in the header of W3C's Trace Context; an invalid
            value is ignored.
    """
    attach(_below(traceparent))


def _below(traceparent: str) -> Context:
    """Return a context below a remote span; an empty one if the text is invalid."""
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
