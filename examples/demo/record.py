"""What happened to each request, gathered from what the processes say."""

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
    """Describes what is drawn, and from when to when."""

    # The layer, or "sent" for layers that moved together.
    row: str
    # Computed by prefill, moved, or computed by decode because it was lost.
    kind: Literal["prefill", "transfer", "recompute"]
    start: float
    stop: float


@dataclass(slots=True)
class RequestTimes:
    """Records the times of one request."""

    request: str
    # Compute in the prefill process, and when each layer was marked ready.
    spans: list[LayerSpan] = field(default_factory=list)
    marked: list[float] = field(default_factory=list)
    # When each layer was in the decode process; empty if blocks were lost.
    landed: dict[int, float] = field(default_factory=dict)
    # Compute of what did not arrive, in the decode process.
    recomputed: list[LayerSpan] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # What one process alone generates.
    single: list[int] = field(default_factory=list)
    _arrived: Arrived | None = None

    @property
    def arrived(self) -> Arrived:
        """Return how the transfer ended."""
        assert self._arrived is not None, f"{self.request}: not over yet"
        return self._arrived

    def note(self, event: Event) -> None:
        """Take in what a process said about this request."""
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
        """Return when prefill began."""
        return self.spans[0].start

    @property
    def ended(self) -> float:
        """Return when the KV of the whole prompt was in the decode process."""
        computed = [span.stop for span in (*self.spans, *self.recomputed)]
        return max(self.arrived.at, *computed)

    @property
    def rows(self) -> list[str]:
        """Return the rows of its picture, from above."""
        layers = [f"layer {layer}" for layer in range(len(self.marked))]
        return [*layers, "sent"] if self.arrived.missing else layers

    def bars(self) -> Iterator[Bar]:
        """Yield what its drawings show.

        A layer of which blocks are missing never lands as a whole. There what moved is
        one bar for all layers, from the first to the last byte.
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
        """Return the time from the last layer's mark until decode knew the outcome."""
        return max(0.0, self.arrived.at - self.marked[-1])

    @property
    def overlap_efficiency(self) -> float:
        """Prefill up to the last mark, over the same plus what was exposed after it."""
        compute_s = self.marked[-1] - self.began
        return compute_s / (compute_s + self.exposed_s)

    @property
    def equal(self) -> bool:
        """Tell whether decode said what one process alone says."""
        return self.tokens == self.single

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that the decode process prefilled."""
        return sum(span.tokens for span in self.recomputed if span.layer == 0)

    def faults(self) -> Iterable[str]:
        """Yield what is not as it has to be; nothing, usually."""
        if not self.equal:
            yield f"{self.request}: the tokens differ from those of a single process"
        lacked = self.arrived.tokens - self.arrived.usable_tokens
        if self.recomputed_tokens != lacked:
            yield (
                f"{self.request}: {lacked} tokens did not arrive, and "
                f"{self.recomputed_tokens} were prefilled again"
            )
