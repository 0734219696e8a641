"""The record of each request, collected from the processes' events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from demo.lines import (
    Arrived,
    Event,
    LayerLanded,
    LayerSpan,
    NewToken,
    Prefilled,
    Recomputed,
    Single,
    Up,
)


class Bar(NamedTuple):
    """One bar of a plot, with its start and end."""

    # The layer, or "sent" for layers that moved together.
    row: str
    # Computed by prefill, moved, or computed by decode because it was lost.
    kind: Literal["prefill", "transfer", "recompute"]
    start: float
    stop: float


@dataclass(slots=True)
class RequestTimes:
    """The times of one request."""

    request: str
    # The computations in the prefill process, and the time when each layer was marked
    # ready.
    spans: list[LayerSpan] = field(default_factory=list)
    marked: list[float] = field(default_factory=list)
    # The time when each layer had landed in the decode process; empty if blocks were
    # lost.
    landed: dict[int, float] = field(default_factory=dict)
    # The computations in the decode process of tokens that did not arrive.
    recomputed: list[LayerSpan] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # The tokens that one process alone generates.
    single: list[int] = field(default_factory=list)
    _arrived: Arrived | None = None

    @property
    def arrived(self) -> Arrived:
        """The end of the transfer."""
        assert self._arrived is not None, f"{self.request}: not over yet"
        return self._arrived

    def note(self, event: Event) -> None:
        """Record an event of this request."""
        match event:
            case Prefilled(spans=spans, marked=marked):
                self.spans = spans
                self.marked = marked
            case LayerLanded(layer=layer, at=at):
                self.landed[layer] = at
            case Arrived():
                self._arrived = event
            case Recomputed(spans=spans):
                self.recomputed += spans
            case NewToken(token=token):
                self.tokens.append(token)
            case Single(tokens=tokens):
                self.single = tokens
            case Up():
                raise AssertionError("not about a request")

    @property
    def began(self) -> float:
        """The time when prefill began."""
        return self.spans[0].start

    @property
    def ended(self) -> float:
        """The time when the KV of the whole prompt was in the decode process."""
        computed = [span.stop for span in (*self.spans, *self.recomputed)]
        return max(self.arrived.at, *computed)

    @property
    def rows(self) -> list[str]:
        """The rows of its plot, from the top."""
        layers = [f"layer {layer}" for layer in range(len(self.marked))]
        return [*layers, "sent"] if self.arrived.missing else layers

    def bars(self) -> Iterator[Bar]:
        """Yield the bars of its plot.

        A layer with missing blocks never lands as a whole. In that case one bar for all
        layers shows the transfer, from the first to the last byte.
        """
        for s in self.spans:
            yield Bar(f"layer {s.layer}", "prefill", s.start, s.stop)
        for s in self.recomputed:
            yield Bar(f"layer {s.layer}", "recompute", s.start, s.stop)
        if self.arrived.missing:
            last = self.arrived.at - self.arrived.commit_s
            yield Bar("sent", "transfer", last - self.arrived.wire_s, last)
        for layer, landed in self.landed.items():
            yield Bar(f"layer {layer}", "transfer", self.marked[layer], landed)

    @property
    def exposed_s(self) -> float:
        """The time from the last layer's mark until decode knew the outcome."""
        return max(0.0, self.arrived.at - self.marked[-1])

    @property
    def overlap_efficiency(self) -> float:
        """The time of prefill up to the last mark, over that plus the exposed time."""
        compute_s = self.marked[-1] - self.began
        return compute_s / (compute_s + self.exposed_s)

    @property
    def equal(self) -> bool:
        """Whether decode has generated the same tokens as one process alone."""
        return self.tokens == self.single

    @property
    def recomputed_tokens(self) -> int:
        """The number of tokens that the decode process prefilled."""
        return sum(span.tokens for span in self.recomputed if span.layer == 0)

    def faults(self) -> Iterable[str]:
        """Yield the errors of this request; usually there are none."""
        if not self.equal:
            yield f"{self.request}: the tokens differ from those of a single process"
        lacked = self.arrived.tokens - self.arrived.usable_tokens
        if self.recomputed_tokens != lacked:
            yield (
                f"{self.request}: {lacked} tokens did not arrive, and "
                f"{self.recomputed_tokens} were prefilled again"
            )
