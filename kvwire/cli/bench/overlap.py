"""``kvwire bench overlap``: how much of a transfer hides behind the compute.

A prefill of L layers computes layer after layer. *Whole*, its KV is sent when the last
layer is computed, and all of the transfer is on the way to the first token: it is
*exposed*. *Streamed*, each layer is sent while the next ones are computed, and exposed
is only what is left after the last mark. Both are measured from the last ``ready()`` to
the outcome at the consumer, in turns.

No schedule can hide the last layer, and none can hide more than there is compute. With
t for one layer's transfer, c for its compute and T for the whole transfer, the least
that stays exposed is

    ideal = max(t, T - (L - 1) c)

and the *efficiency* is what was hidden of what could be:

    efficiency = (T - streamed) / (T - ideal)

1 is a perfect overlap, 0 is as good as sending it whole. Where compute takes longer
than transfer, ideal is t, so the two targets say nearly the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, TypeVar

from kvwire.cli.bench.overlap_pair import Pair
from kvwire.limits import KIB, MIB

T = TypeVar("T")

LAYERS: Final = (8, 32, 80)
LAYER_BYTES: Final = 4 * MIB
# A layer's compute as a multiple of its transfer.
LONGER: Final = 2.0
SHORTER: Final = 0.5
EFFICIENCY_TARGET: Final = 0.95
# Exposed beyond one layer's transfer: wake-ups, commit and settlement.
SLACK_S: Final = 1e-3
# A prompt of one block: its prefill reads the weights once, 16 GB in some 8 ms.
SHORT_LAYERS: Final = 32
SHORT_LAYER_BYTES: Final = 64 * KIB
SHORT_COMPUTE_S: Final = 0.25e-3
# Streaming without compute, beside one mark of the same bytes.
BULK_TARGET: Final = 1.03
# Control work of a transfer of 32 layers beside one of 1 layer, both sides together.
CONTROL_LAYERS: Final = 32
CONTROL_LAYER_BYTES: Final = 4
CONTROL_REPEAT: Final = 50
CONTROL_TARGET_S: Final = 0.5e-3


@dataclass(slots=True)
class Setting:
    """A request, how long its layers take to compute, and what was found.

    Attributes:
        name: What is special about it.
        layers: How many.
        layer_bytes: Of each.
        compute_s: Of each; 0 until it has been chosen.
        streamed_s: Exposed when each layer is sent as it is ready, by round.
        whole_s: Exposed when all are sent at the end, by round.
        layer_s: The transfer of one layer alone, by round.
        streamed_cpu_s: CPU of both sides for one transfer, by round.
        whole_cpu_s: Likewise.
        judged: Whether the targets hold for it.
    """

    name: str
    layers: int
    layer_bytes: int
    compute_s: float
    judged: bool = True
    streamed_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    layer_s: list[float] = field(default_factory=list)
    streamed_cpu_s: list[float] = field(default_factory=list)
    whole_cpu_s: list[float] = field(default_factory=list)

    @property
    def ideal_s(self) -> float:
        """The least that can stay exposed."""
        hidden_s = (self.layers - 1) * self.compute_s
        return max(median(self.layer_s), median(self.whole_s) - hidden_s)

    @property
    def gain_s(self) -> float:
        """How much earlier the first token is; negative if streaming costs time."""
        return median(self.whole_s) - median(self.streamed_s)

    @property
    def efficiency(self) -> float:
        """What was hidden of what could be; 0 if nothing could."""
        hideable_s = median(self.whole_s) - self.ideal_s
        return self.gain_s / hideable_s if hideable_s > 0 else 0.0

    @property
    def met(self) -> bool:
        """Whether the targets are met: the efficiency, and what may stay exposed."""
        close = median(self.streamed_s) <= self.ideal_s + SLACK_S
        return close and self.efficiency >= EFFICIENCY_TARGET


@dataclass(slots=True)
class Bulk:
    """The same bytes marked layer by layer and at once, without compute.

    Attributes:
        layers: How many.
        layer_bytes: Of each.
        by_layer_s: From the first mark to the outcome, by round.
        at_once_s: Likewise.
    """

    layers: int
    layer_bytes: int
    by_layer_s: list[float] = field(default_factory=list)
    at_once_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """By layer, beside at once."""
        return median(self.by_layer_s) / median(self.at_once_s)


@dataclass(slots=True)
class Control:
    """CPU seconds of a transfer that carries next to nothing, both sides together.

    Attributes:
        one_s: One layer, by round.
        grouped_s: 32 layers that were ready within a moment, as they are sent.
        apart_s: 32 layers, each sent by itself.
    """

    one_s: list[float] = field(default_factory=list)
    grouped_s: list[float] = field(default_factory=list)
    apart_s: list[float] = field(default_factory=list)

    @property
    def added_s(self) -> float:
        """What 31 more layers add."""
        return median(self.grouped_s) - median(self.one_s)

    @property
    def added_apart_s(self) -> float:
        """What they add if each is sent by itself."""
        return median(self.apart_s) - median(self.one_s)


@dataclass(slots=True)
class Overlap:
    """Everything that was found."""

    settings: list[Setting]
    bulk: list[Bulk]
    control: Control
    facts: dict[str, Any]


def steps(layers: Sequence[int], rounds: int) -> int:
    """How often :func:`overlap` reports progress."""
    return (3 * len(layers) + 2) * rounds


def overlap(
    pair: Pair,
    layers: Sequence[int],
    layer_bytes: int,
    rounds: int,
    progress: Callable[[str], None],
) -> Overlap:
    """Measure everything.

    Args:
        pair: The two processes.
        layers: How many layers, one request for each.
        layer_bytes: Bytes of a layer.
        rounds: How often everything is done; the first time does not count.
        progress: Called before each step with what it is.

    Raises:
        BenchError: Something broke, or bytes were damaged.
    """
    settings, bulks = [], []
    for count in layers:
        pair.check(count, layer_bytes)
        alone_s = _layer_alone(pair, count, layer_bytes, rounds)
        for name, factor in (("compute", LONGER), ("transfer", SHORTER)):
            setting = Setting(f"{name} is longer", count, layer_bytes, factor * alone_s)
            _rounds(pair, setting, rounds, progress)
            settings.append(setting)
        bulk = Bulk(count, layer_bytes)
        _bulk(pair, bulk, rounds, progress)
        bulks.append(bulk)
    short = Setting(
        "a short prompt",
        SHORT_LAYERS,
        SHORT_LAYER_BYTES,
        SHORT_COMPUTE_S,
        judged=False,
    )
    pair.check(short.layers, short.layer_bytes)
    _rounds(pair, short, rounds, progress)
    settings.append(short)
    control = Control()
    _control(pair, control, rounds, progress)
    return Overlap(settings, bulks, control, pair.facts)


def _layer_alone(pair: Pair, layers: int, layer_bytes: int, rounds: int) -> float:
    """The transfer of one layer, to choose the compute by."""
    pair.move("last", layers, layer_bytes)
    spans = [pair.move("last", layers, layer_bytes) for _ in range(rounds)]
    return median(span.from_last_s for span in spans)


def _rounds(
    pair: Pair, setting: Setting, rounds: int, progress: Callable[[str], None]
) -> None:
    where, compute_s = (setting.layers, setting.layer_bytes), setting.compute_s
    for number in range(rounds):
        progress(f"{setting.layers} layers, {setting.name}")
        for way in _in_turn(("streamed", "whole", "last"), number):
            span = pair.move(way, *where, compute_s=0.0 if way == "last" else compute_s)
            if way == "last":
                setting.layer_s.append(span.from_last_s)
            elif way == "whole":
                setting.whole_s.append(span.from_last_s)
                setting.whole_cpu_s.append(span.cpu_s)
            else:
                setting.streamed_s.append(span.from_last_s)
                setting.streamed_cpu_s.append(span.cpu_s)


def _bulk(pair: Pair, bulk: Bulk, rounds: int, progress: Callable[[str], None]) -> None:
    for number in range(rounds):
        progress(f"{bulk.layers} layers, no compute")
        for way in _in_turn(("streamed", "whole"), number):
            span = pair.move(way, bulk.layers, bulk.layer_bytes)
            found = bulk.by_layer_s if way == "streamed" else bulk.at_once_s
            found.append(span.from_first_s)


def _control(
    pair: Pair, control: Control, rounds: int, progress: Callable[[str], None]
) -> None:
    ways: tuple[tuple[list[float], int, int | None], ...] = (
        (control.one_s, 1, None),
        (control.grouped_s, CONTROL_LAYERS, None),
        (control.apart_s, CONTROL_LAYERS, 1),
    )
    for number in range(-1, rounds):
        if number >= 0:
            progress("control work")
        for found, layers, group_bytes in _in_turn(ways, number):
            span = pair.move(
                "streamed",
                layers,
                CONTROL_LAYER_BYTES,
                repeat=CONTROL_REPEAT,
                group_bytes=group_bytes,
            )
            if number >= 0:
                found.append(span.cpu_s)


def _in_turn(ways: Sequence[T], number: int) -> list[T]:
    """Who begins changes from round to round."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]
