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

import asyncio
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import RenderableType
from rich.text import Text

import kvwire
from kvwire.cli.bench import report
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import COMMON, Common, Rounds
from kvwire.cli.bench.side import Bytes, ConnectedSide, digest, fill, paged
from kvwire.cli.bench.turns import MILLISECONDS, Benchmark, Case, CaseResult, Findings
from kvwire.limits import KIB, MIB

LAYERS: Final = (8, 32, 80)
LAYER_BYTES: Final = 4 * MIB
# That of 16 tokens of an 8B model of today.
BLOCK_BYTES: Final = 64 * KIB
# A layer's compute as a multiple of its transfer.
FACTORS: Final = {"compute is longer": 2.0, "transfer is longer": 0.5}
EFFICIENCY_TARGET: Final = 0.95
# Exposed beyond one layer's transfer: wake-ups, commit and settlement.
SLACK_S: Final = 1e-3
# A prompt of one block: its prefill reads the weights once, 16 GB in some 8 ms.
SHORT_LAYERS: Final = 32
SHORT_COMPUTE_S: Final = 0.25e-3
# Streaming without compute, beside one mark of the same bytes.
BULK_TARGET: Final = 1.03
# CPU of a transfer of 32 layers beside one of 1 layer, both sides together.
CONTROL_LAYERS: Final = 32
CONTROL_LAYER_BYTES: Final = 4
CONTROL_REPEAT: Final = 50
CONTROL_TARGET_S: Final = 0.5e-3

# What is timed: from the last mark, from the first one, or the CPU of both sides.
EXPOSED: Final = "exposed"
BULK: Final = "bulk"
CONTROL: Final = "control"
GROUPS: Final = {
    EXPOSED: "exposed after the last mark",
    BULK: "from the first mark",
    CONTROL: "CPU of both sides",
}
# Each layer is marked when it is computed, all when the last one is, or that one alone.
STREAMED: Final = "streamed"
WHOLE: Final = "whole"
ONE_LAYER: Final = "one layer"
WAYS: Final = (STREAMED, WHOLE, ONE_LAYER)
# Of one layer alone, since the first is not that of a socket in use.
ALONE_REPEAT: Final = 5
_GO: Final = 1
_MARKS: Final = 2
# When the first and the last mark was made, and the CPU it took.
_SPAN: Final = struct.Struct("<3d")

Kibibytes = Annotated[int, Parameter(validator=Number(gte=64, lte=1_048_576))]
Layers = Annotated[
    tuple[int, ...],
    Parameter(
        validator=Number(gte=2, lte=4096), consume_multiple=True, negative_iterable=()
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapWork(Work):
    """``count`` layers of ``nbytes`` bytes; ``verb`` is what is timed."""

    # What is marked when.
    way: str = STREAMED
    # Of one layer.
    compute_s: float = 0.0
    # Transfers of a round.
    repeat: int = 1
    # See publish().
    group_bytes: int | None = None


class OverlapSide(ConnectedSide[OverlapWork]):
    """Prefill on the right, decode on the left, and compute that is a timer.

    A GPU does not use the CPU while it computes, so neither does this: a thread sleeps
    for as long as a layer would take and marks it. Both processes run on one machine,
    whose monotonic clock they share, so an instant of one can be subtracted from one of
    the other.
    """

    work_type: ClassVar[type[Work]] = OverlapWork

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        # All works have the same memory, or each turn would begin with page faults.
        self._memory: Bytes = np.zeros(0, np.uint8)
        self._caches: dict[tuple[int, int], kvwire.PagedCache] = {}

    async def fill(self, work: OverlapWork) -> None:
        await fill(self._cache(work)[0])

    async def digest(self, work: OverlapWork) -> str:
        memory = self._cache(work)[0]
        # The other layers have not been sent.
        return digest(memory[-work.nbytes :] if work.way == ONE_LAYER else memory)

    async def drive(self, work: OverlapWork) -> dict[str, Any]:
        return {"values": [await self._pull(work) for _ in range(work.repeat)]}

    async def serve(self, work: OverlapWork) -> dict[str, Any]:
        for _ in range(work.repeat):
            await self._compute(work)
        return {}

    def _cache(self, work: OverlapWork) -> tuple[Bytes, kvwire.PagedCache, list[int]]:
        key = work.count, work.nbytes
        # A block of a toy model, to measure what is not payload.
        blocks = max(1, work.nbytes // BLOCK_BYTES)
        if self._memory.size < work.moved_bytes:
            self._memory = np.zeros(work.moved_bytes, np.uint8)
            self._caches.clear()
        memory = self._memory[: work.moved_bytes]
        if key not in self._caches:
            self._caches[key] = paged(memory, work.count, blocks)
        return memory, self._caches[key], list(range(blocks))

    async def _pull(self, work: OverlapWork) -> float:
        _, cache, blocks = self._cache(work)
        cpu_s = time.process_time()
        incoming = self.connection.pull(self.next_id(), cache, blocks)
        await self.connection.send(_GO, b"")
        outcome = await incoming
        over = time.monotonic()
        if not (outcome.complete or work.way == ONE_LAYER):
            raise RuntimeError(f"the transfer did not end well: {outcome!r}")
        await incoming.drained()
        cpu_s = time.process_time() - cpu_s
        first, last, theirs_s = _SPAN.unpack(await self.connection.recv(_MARKS))
        spans = {EXPOSED: over - last, BULK: over - first, CONTROL: cpu_s + theirs_s}
        return float(spans[work.verb])

    async def _compute(self, work: OverlapWork) -> None:
        _, cache, blocks = self._cache(work)
        cpu_s = time.process_time()
        outgoing = self.communicator.publish(
            self.next_id(), cache, blocks, group_bytes=work.group_bytes
        )
        # Behind it on the same link: the question for the transfer has been answered.
        await self.connection.recv(_GO)
        if work.compute_s:
            span = await asyncio.to_thread(self._mark, outgoing, work)
        else:
            span = self._mark(outgoing, work)
        await outgoing
        await outgoing.drained()
        cpu_s = time.process_time() - cpu_s
        await self.connection.send(_MARKS, _SPAN.pack(*span, cpu_s))

    def _mark(
        self, outgoing: kvwire.Outgoing, work: OverlapWork
    ) -> tuple[float, float]:
        """Compute and mark layer by layer; when the first and last mark was made."""
        began = time.monotonic()
        times = []
        for layer in range(work.count):
            # Until a fixed instant, so that what a sleep is late does not add up.
            left_s = began + (layer + 1) * work.compute_s - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
            if work.way == STREAMED or layer == work.count - 1:
                times.append(time.monotonic())
                outgoing.ready(layers=None if work.way == WHOLE else layer)
        outgoing.finish(partial=work.way == ONE_LAYER)
        return times[0], times[-1]


def works(
    contender: Contender, layers: Sequence[int], layer_bytes: int, rounds: int
) -> dict[str, OverlapWork]:
    """Return everything that is measured; computes are multiples of one transfer."""
    found = {}
    with contender.start() as pair:
        for count in layers:
            work = OverlapWork(
                verb=EXPOSED, nbytes=layer_bytes, count=count, way=ONE_LAYER
            )
            alone = [pair.round(work).values[0] for _ in range(rounds + 1)]
            for name, factor in FACTORS.items():
                found[f"{count} layers, {name}"] = replace(
                    work, way=STREAMED, compute_s=factor * median(alone[1:])
                )
    found["a short prompt"] = OverlapWork(
        verb=EXPOSED,
        nbytes=BLOCK_BYTES,
        count=SHORT_LAYERS,
        compute_s=SHORT_COMPUTE_S,
    )
    for count in layers:
        bulk = OverlapWork(verb=BULK, nbytes=layer_bytes, count=count)
        found[f"{count} layers, no compute"] = bulk
    one = OverlapWork(
        verb=CONTROL, nbytes=CONTROL_LAYER_BYTES, count=1, repeat=CONTROL_REPEAT
    )
    many = replace(one, count=CONTROL_LAYERS)
    return {
        **found,
        "1 tiny layer": one,
        f"{CONTROL_LAYERS} of them": many,
        f"{CONTROL_LAYERS}, each sent by itself": replace(many, group_bytes=1),
    }


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What was hidden of what could be; and the least that can stay exposed."""

    name: str
    compute_s: float
    ideal_s: float
    efficiency: float
    met: bool


def efficiency(finding: CaseResult) -> Efficiency:
    """Compare what stays exposed with what no schedule can hide."""
    streamed_s, whole_s, alone_s = (finding.samples[way].median for way in WAYS)
    work = finding.case.work
    ideal_s = max(alone_s, whole_s - (work.count - 1) * work.compute_s)
    hideable_s = whole_s - ideal_s
    found = (whole_s - streamed_s) / hideable_s if hideable_s > 0 else 0.0
    met = streamed_s <= ideal_s + SLACK_S and found >= EFFICIENCY_TARGET
    return Efficiency(finding.case.name, work.compute_s, ideal_s, found, met)


def efficiencies(findings: Findings) -> list[Efficiency]:
    """Judge everything that is exposed."""
    exposed = (f for f in findings if f.case.work.verb == EXPOSED)
    return [efficiency(f) for f in exposed if len(f.samples) == len(WAYS)]


def judged(findings: Findings) -> list[RenderableType]:
    """Make the table of efficiencies, and the line of what layers cost."""
    table = report.new_table("", "compute, ms", "ideal, ms", "efficiency", "targets")
    for one in efficiencies(findings):
        table.add_row(
            one.name,
            f"{one.compute_s * 1e3:.2f}",
            f"{one.ideal_s * 1e3:.2f}",
            f"{one.efficiency:.3f}",
            report.verdict(one.met),
        )
    lines: list[RenderableType] = [
        table,
        Text(
            f"Targets: streamed <= what no schedule can hide + {SLACK_S * 1e3:g} ms, "
            f"efficiency >= {EFFICIENCY_TARGET}."
        ),
    ]
    tiny = [f.samples for f in findings if f.case.work.verb == CONTROL]
    if all(tiny):
        one_s, many_s, _ = (found[STREAMED].median for found in tiny)
        line = Text(
            f"{CONTROL_LAYERS - 1} more tiny layers add {(many_s - one_s) * 1e3:.2f} "
            f"ms of CPU, target <= {CONTROL_TARGET_S * 1e3:g} ms: "
        )
        lines.append(line + report.verdict(many_s - one_s <= CONTROL_TARGET_S))
    return lines


def command(
    *,
    transport: str = "tcp",
    layers: Layers = LAYERS,
    layer_kib: Kibibytes = LAYER_BYTES // KIB,
    rounds: Rounds = 15,
    common: Common = COMMON,
) -> int:
    """How much of a transfer hides behind the compute that makes its bytes.

    Compute is simulated by timers, since a GPU does not use the CPU. Exposed is the
    time from the last mark to the outcome: streamed layer by layer, and sent whole at
    the end, in turns. The efficiency is what was hidden of what any schedule could
    hide: all but the last layer, and no more than there is compute.

    Args:
        transport: The transport.
        layers: Layers of a request; a request for each number.
        layer_kib: KiB of one layer, in blocks of 64 KiB.
        rounds: How often everything is measured.
        common: Options of every benchmark.
    """
    if layer_kib % 64:
        raise kvwire.UsageError(
            f"--layer-kib {layer_kib}: a multiple of 64, one block's KiB"
        )
    report.require_known([transport])
    options = {"transport": transport, "loop": common.loop, "by_link": 1}
    streamed = Contender(STREAMED, OverlapSide, ours=True, options=options)
    # What is exposed is judged by the efficiency, and the same bytes by this one.
    whole, at_once = (
        Contender(WHOLE, OverlapSide, ours=ours, beside=streamed, asks={"way": WHOLE})
        for ours in (True, False)
    )
    # How long a layer's bytes take: no compute lets the CPUs fall asleep before them.
    asks = {"way": ONE_LAYER, "compute_s": 0.0, "repeat": ALONE_REPEAT}
    alone = Contender(ONE_LAYER, OverlapSide, ours=True, beside=streamed, asks=asks)
    ways = {EXPOSED: [whole, alone], BULK: [at_once], CONTROL: []}
    benchmark = Benchmark(
        name="overlap",
        cases=[
            Case(
                name=name,
                work=work,
                unit=MILLISECONDS,
                contenders=[streamed, *ways[work.verb]],
                target=BULK_TARGET if work.verb == BULK else None,
                group=GROUPS[work.verb],
            )
            for name, work in works(streamed, layers, layer_kib * KIB, rounds).items()
        ],
        below=judged,
        more=lambda found: {"efficiencies": [asdict(e) for e in efficiencies(found)]},
    )
    return common.run(
        benchmark,
        transport=transport,
        layers=list(layers),
        layer_kib=layer_kib,
        rounds=rounds,
    )
