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
# Each layer is marked when it is computed, all when the last one is, or that one alone.
STREAMED: Final = "streamed"
WHOLE: Final = "whole"
ONE_LAYER: Final = "one layer"
WAYS: Final = (STREAMED, WHOLE, ONE_LAYER)
# Of one layer alone, since the first is not that of a socket in use.
ALONE_REPEAT: Final = 5
_GO: Final = 1
_MARKED: Final = 2
# When the last mark was made.
_INSTANT: Final = struct.Struct("<d")

Kibibytes = Annotated[int, Parameter(validator=Number(gte=64, lte=1_048_576))]
Layers = Annotated[
    tuple[int, ...],
    Parameter(
        validator=Number(gte=2, lte=4096), consume_multiple=True, negative_iterable=()
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapWork(Work):
    """``count`` layers of ``nbytes`` bytes; ``verb`` is what is marked when."""

    # Of one layer.
    compute_s: float = 0.0
    # Transfers of a round.
    repeat: int = 1


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
        return digest(memory[-work.nbytes :] if work.verb == ONE_LAYER else memory)

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
        """Return the seconds from the last mark to the outcome."""
        _, cache, blocks = self._cache(work)
        incoming = self.connection.pull(self.next_id(), cache, blocks)
        await self.connection.send(_GO, b"")
        outcome = await incoming
        over_s = time.monotonic()
        if not (outcome.complete or work.verb == ONE_LAYER):
            raise RuntimeError(f"the transfer did not end well: {outcome!r}")
        await incoming.drained()
        (marked_s,) = _INSTANT.unpack(await self.connection.recv(_MARKED))
        return float(over_s - marked_s)

    async def _compute(self, work: OverlapWork) -> None:
        _, cache, blocks = self._cache(work)
        outgoing = self.communicator.publish(self.next_id(), cache, blocks)
        # Behind it on the same link: the question for the transfer has been answered.
        await self.connection.recv(_GO)
        marked_s = await asyncio.to_thread(self._mark, outgoing, work)
        await outgoing
        await outgoing.drained()
        await self.connection.send(_MARKED, _INSTANT.pack(marked_s))

    def _mark(self, outgoing: kvwire.Outgoing, work: OverlapWork) -> float:
        """Compute and mark layer by layer; when the last mark was made."""
        began = marked_s = time.monotonic()
        for layer in range(work.count):
            # Until a fixed instant, so that what a sleep is late does not add up.
            left_s = began + (layer + 1) * work.compute_s - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
            if work.verb == STREAMED or layer == work.count - 1:
                marked_s = time.monotonic()
                outgoing.ready(layers=None if work.verb == WHOLE else layer)
        outgoing.finish(partial=work.verb == ONE_LAYER)
        return marked_s


def works(
    contender: Contender, layers: Sequence[int], layer_bytes: int, rounds: int
) -> dict[str, OverlapWork]:
    """Return everything that is measured; computes are multiples of one transfer."""
    found = {}
    with contender.start() as pair:
        for count in layers:
            work = OverlapWork(verb=ONE_LAYER, nbytes=layer_bytes, count=count)
            alone = [pair.round(work).values[0] for _ in range(rounds + 1)]
            for name, factor in FACTORS.items():
                found[f"{count} layers, {name}"] = replace(
                    work, verb=STREAMED, compute_s=factor * median(alone[1:])
                )
    found["a short prompt"] = OverlapWork(
        verb=STREAMED,
        nbytes=BLOCK_BYTES,
        count=SHORT_LAYERS,
        compute_s=SHORT_COMPUTE_S,
    )
    return found


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
    """Judge everything that everybody has done."""
    return [efficiency(f) for f in findings if len(f.samples) == len(WAYS)]


def judged(findings: Findings) -> list[RenderableType]:
    """Make the table of efficiencies."""
    table = report.new_table("", "compute, ms", "ideal, ms", "efficiency", "targets")
    for one in efficiencies(findings):
        table.add_row(
            one.name,
            f"{one.compute_s * 1e3:.2f}",
            f"{one.ideal_s * 1e3:.2f}",
            f"{one.efficiency:.3f}",
            report.verdict(one.met),
        )
    targets = Text(
        f"Targets: streamed <= what no schedule can hide + {SLACK_S * 1e3:g} ms, "
        f"efficiency >= {EFFICIENCY_TARGET}."
    )
    return [table, targets]


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
    whole = Contender(
        WHOLE, OverlapSide, ours=True, beside=streamed, asks={"verb": WHOLE}
    )
    alone = Contender(
        ONE_LAYER,
        OverlapSide,
        ours=True,
        beside=streamed,
        # How long its bytes take: no compute lets the CPUs fall asleep before them.
        asks={"verb": ONE_LAYER, "compute_s": 0.0, "repeat": ALONE_REPEAT},
    )
    benchmark = Benchmark(
        name="overlap",
        cases=[
            Case(
                name=name,
                work=work,
                unit=MILLISECONDS,
                contenders=[streamed, whole, alone],
                group="exposed after the last mark",
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
