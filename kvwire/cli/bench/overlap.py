"""``kvwire bench overlap``: the share of a transfer that compute hides.

A prefill of L layers computes layer after layer. *Whole*: its KV is sent once the last
layer is computed, so the first token waits for the whole transfer, and all of it is
*exposed*. *Streamed*: each layer is sent while the next ones are computed, and only the
part after the last mark is exposed. Both are measured in turns, from the last
``ready()`` to the outcome at the consumer.

No schedule can hide the last layer, or more time than the compute takes. With t for one
layer's transfer, c for its compute and T for the whole transfer, the smallest possible
exposed time is

    ideal = max(t, T - (L - 1) c)

and the *efficiency* is the hidden time divided by the time that could be hidden:

    efficiency = (T - streamed) / (T - ideal)

1 is a perfect overlap, 0 is no better than sending it whole. If compute takes longer
than transfer, ideal is t.

Compute on the CPU has a price: a thread that computes in Python beside
:class:`kvwire.Engine` shares the GIL and the CPUs with it. *Taken* is how much longer
each marked layer makes such a thread's forward pass, compared with a pass without
marks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Final

from rich.console import RenderableType

import kvwire
from kvwire.cli.bench.operations import BenchMemory, Ends, OpsWork, joined, over
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import (
    COMMON,
    Common,
    Rounds,
    new_table,
    require_able,
    within,
)
from kvwire.cli.bench.side import HOST, Bench, digest
from kvwire.cli.bench.turns import MILLISECONDS, Benchmark, Case, CaseResult, Findings
from kvwire.limits import KIB, MIB

LAYERS: Final = (8, 32, 80)
LAYER_BYTES: Final = 4 * MIB
# The KV of 16 tokens of a current 8B model.
BLOCK_BYTES: Final = 64 * KIB
# A layer's compute as a multiple of its transfer.
FACTORS: Final = {"compute is longer": 2.0, "transfer is longer": 0.5}
# A prompt of one block: its prefill reads the weights once, 16 GB in about 8 ms.
SHORT_LAYERS: Final = 32
SHORT_COMPUTE_S: Final = 0.25e-3

# The measured times: from the last mark, or from the first one.
EXPOSED: Final = "exposed"
BULK: Final = "bulk"
TAKEN: Final = "taken"
GROUPS: Final = {
    EXPOSED: "exposed after the last mark",
    BULK: "from the first mark",
    TAKEN: "a forward pass in Python beside Engine",
}
# Ways to mark: each layer once it is computed; all after the last; or only the last.
STREAMED: Final = "streamed"
WHOLE: Final = "whole"
ONE_LAYER: Final = "one layer"
WAYS: Final = (STREAMED, WHOLE, ONE_LAYER)
# A forward pass in Python: its layers, their sizes, and about 0.5 ms for each.
PASS_LAYERS: Final = 80
PASS_KIB: Final = (16, 64, 256)
_PASS_STEPS: Final = 10_000
# Transfers before a single layer is measured, since the first is not typical.
ALONE_REPEAT: Final = 5
_GO: Final = 1
_NAME: Final = "forward pass"

Kibibytes = Annotated[int, within(64, 1_048_576)]
Layers = Annotated[tuple[int, ...], within(2, 4096, consume_multiple=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapWork(OpsWork):
    """Transfers of ``nbytes`` in ``layers``; ``verb`` is the time to measure."""

    spread: int = 1
    # The compute time of one layer.
    compute_s: float = 0.0


async def overlap(b: Bench) -> None:
    """Prefill on the right, decode on the left, with timers for compute.

    The option ``way`` chooses which layers are marked, and when.

    A GPU does not use the CPU while it computes, and neither does this program: a
    thread sleeps for a layer's compute time and then marks the layer. Both processes
    run on one machine and share its monotonic clock, so a time of one can be subtracted
    from a time of the other.
    """
    memory = OverlapMemory(b)
    way = b.options["way"]
    async with joined(b) as ends:
        async for work in b.works(OverlapWork):
            await asyncio.to_thread(memory.have, work)
            if b.checks:
                await memory.fill()
            seconds = []
            async with b.clock():
                for _ in range(ALONE_REPEAT if way == ONE_LAYER else work.count):
                    if b.left:
                        seconds.append(await _decode(b, ends, memory, work))
                    else:
                        await _prefill(b, ends, memory, work)
            await b.report(seconds, await memory.digested(b.checks))
    memory.close()


class OverlapMemory(BenchMemory):
    """The cache; for a single layer, a cache whose other layers were never sent."""

    def __init__(self, b: Bench) -> None:
        super().__init__(b)
        self._last_only = b.options["way"] == ONE_LAYER

    def lay_out(self, work: OverlapWork) -> None:
        super().lay_out(work)
        self._first = (work.nbytes - work.nbytes // work.layers) * self._last_only

    def digest(self) -> str:
        return digest(self.bytes[self._first :])


async def beside_engine(b: Bench) -> None:
    """A forward pass in Python on the right, on a thread beside an engine.

    With the ``way`` streamed, it marks each layer within the timed pass; otherwise it
    marks all layers after the pass.
    """
    memory = BenchMemory(b)
    async with AsyncExitStack() as stack:
        if b.left:
            ends = await stack.enter_async_context(joined(b))
        else:
            engine = stack.enter_context(kvwire.Engine(name="bench-right"))
            await b.send([str(engine.listen(f"tcp://{HOST}:0"))])
        async for work in b.works(OverlapWork):
            await asyncio.to_thread(memory.have, work)
            if b.checks:
                await memory.fill()
            assert memory.pool is not None
            seconds = []
            async with b.clock():
                if b.left:
                    await b.receive()
                    incoming = ends.connection.pull(_NAME, *memory.pool.chosen)
                    await over(incoming)
                    seconds.append(await b.receive())
                else:
                    outgoing = engine.publish(_NAME, *memory.pool.chosen)
                    await b.send()
                    streamed = b.options["way"] == STREAMED
                    ready = outgoing.ready if streamed else _nothing
                    took_s = await asyncio.to_thread(_pass, work.layers, ready)
                    if not streamed:
                        outgoing.ready()
                    outgoing.finish()
                    await asyncio.to_thread(outgoing.wait_drained)
                    await b.send(took_s)
            await b.report(seconds, await memory.digested(b.checks))
    memory.close()


def _pass(layers: int, ready: Callable[[int], None]) -> float:
    """Compute layers in Python, one after the other; return the seconds.

    Time for which the thread waits for a busy CPU is left out, if the system reports it
    (Linux).
    """
    began = time.monotonic() - _queued_s()
    for layer in range(layers):
        total = 0
        for step in range(_PASS_STEPS):
            total = (5 * total + step) & 0xFFFF
        ready(layer)
    return time.monotonic() - _queued_s() - began


def _queued_s() -> float:
    """Return the seconds for which this thread has waited for a CPU; 0 if unknown."""
    with suppress(OSError):
        queued = Path("/proc/thread-self/schedstat").read_text().split()[1]
        return int(queued) / 1e9
    return 0.0


def _nothing(layer: int) -> None:
    """Mark no layer: it is marked when all are computed."""


async def _decode(
    b: Bench, ends: Ends, room: OverlapMemory, work: OverlapWork
) -> float:
    """Pull a transfer; return the seconds from its last mark, or its first."""
    assert room.pool is not None
    incoming = ends.connection.pull(next(ends.ids), *room.pool.chosen)
    await ends.connection.send(_GO, b"")
    outcome = await incoming
    over = time.monotonic()
    if not (outcome.complete or b.options["way"] == ONE_LAYER):
        raise RuntimeError(f"the transfer failed: {outcome!r}")
    await incoming.drained()
    first, last = await b.receive()
    return float(over - (last if work.verb == EXPOSED else first))


async def _prefill(
    b: Bench, ends: Ends, room: OverlapMemory, work: OverlapWork
) -> None:
    """Publish a transfer, compute its layers and mark them."""
    assert room.pool is not None
    outgoing = ends.communicator.publish(next(ends.ids), *room.pool.chosen)
    # It follows on the same link, so the transfer's question has been answered.
    await ends.connection.recv(_GO)
    way = b.options["way"]
    # If one layer's transfer is timed, no sleep comes before it: the CPUs stay awake.
    if work.compute_s and way != ONE_LAYER:
        span = await asyncio.to_thread(_mark, outgoing, way, work, work.compute_s)
    else:
        span = _mark(outgoing, way, work)
    await outgoing
    await outgoing.drained()
    await b.send(span)


def _mark(
    outgoing: kvwire.Outgoing, way: str, work: OverlapWork, compute_s: float = 0.0
) -> tuple[float, float]:
    """Compute and mark layer by layer; return the times of the first and last mark."""
    began = time.monotonic()
    times = []
    for layer in range(work.layers):
        # Sleeps until fixed times, so that late wake-ups do not add up.
        left_s = began + (layer + 1) * compute_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        if way == STREAMED or layer == work.layers - 1:
            times.append(time.monotonic())
            outgoing.ready(layers=None if way == WHOLE else layer)
    outgoing.finish(partial=way == ONE_LAYER)
    return times[0], times[-1]


def work_of(verb: str, layers: int, layer_bytes: int) -> OverlapWork:
    """Return the work of one transfer."""
    return OverlapWork(
        verb=verb,
        nbytes=layers * layer_bytes,
        count=1,
        layers=layers,
        blocks=layer_bytes // BLOCK_BYTES,
    )


def works(
    one_layer: Contender, layers: Sequence[int], layer_bytes: int, rounds: int
) -> dict[str, OverlapWork]:
    """Return all works; compute times are multiples of one transfer's time."""
    found = {}
    with one_layer.start() as pair:
        for count in layers:
            work = work_of(EXPOSED, count, layer_bytes)
            alone = [pair.round(work).seconds[0] for _ in range(rounds + 1)]
            for name, factor in FACTORS.items():
                found[f"{count} layers, {name}"] = replace(
                    work, compute_s=factor * median(alone[1:])
                )
    short = work_of(EXPOSED, SHORT_LAYERS, BLOCK_BYTES)
    found["a short prompt"] = replace(short, compute_s=SHORT_COMPUTE_S)
    for count in layers:
        found[f"{count} layers, no compute"] = work_of(BULK, count, layer_bytes)
    return found


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The hidden part of a transfer, as a share of the largest possible one."""

    name: str
    compute_s: float
    ideal_s: float
    efficiency: float


def efficiency(finding: CaseResult) -> Efficiency:
    """Compare the exposed time with the least that any schedule can reach."""
    streamed_s, whole_s, alone_s = (finding.samples[way].median for way in WAYS)
    work = finding.case.work
    ideal_s = max(alone_s, whole_s - (work.layers - 1) * work.compute_s)
    hideable_s = whole_s - ideal_s
    found = (whole_s - streamed_s) / hideable_s if hideable_s > 0 else 0.0
    return Efficiency(finding.case.name, work.compute_s, ideal_s, found)


def efficiencies(findings: Findings) -> list[Efficiency]:
    """Return the efficiency of each finding that has one."""
    exposed = (f for f in findings if f.case.work.verb == EXPOSED)
    return [efficiency(f) for f in exposed if len(f.samples) == len(WAYS)]


def taken_s(findings: Findings) -> dict[str, float]:
    """Return the seconds that each layer adds to a pass, by the finding's name."""
    found = {}
    for one in findings:
        if one.case.work.verb == TAKEN and len(one.samples) > 1:
            streamed_s, alone_s = (one.samples[w].median for w in (STREAMED, WHOLE))
            found[one.case.name] = (streamed_s - alone_s) / one.case.work.layers
    return found


def judged(findings: Findings) -> list[RenderableType]:
    """Return tables of the efficiencies, and of the time that layers add to a pass."""
    table = new_table("", "compute, ms", "ideal, ms", "efficiency")
    for one in efficiencies(findings):
        table.add_row(
            one.name,
            f"{one.compute_s * 1e3:.2f}",
            f"{one.ideal_s * 1e3:.2f}",
            f"{one.efficiency:.3f}",
        )
    taken = new_table("", "taken from a pass by each layer, us")
    for name, each_s in taken_s(findings).items():
        taken.add_row(name, f"{each_s * 1e6:.0f}")
    return [table, taken]


def command(
    *,
    transport: str = "tcp",
    layers: Layers = LAYERS,
    layer_kib: Kibibytes = LAYER_BYTES // KIB,
    rounds: Rounds = 15,
    common: Common = COMMON,
) -> int:
    """Measure how much of a transfer is hidden by the compute that makes its bytes.

    Compute is simulated by timers, since a GPU does not use the CPU. Exposed is the
    time from the last mark to the outcome; streaming layer by layer and sending all at
    the end are measured in turns. The efficiency is the hidden time divided by the most
    that can be hidden: all layers but the last, at most the compute time. Another table
    shows how much longer marks make a forward pass in Python beside Engine.

    Args:
        transport: The transport.
        layers: Layers of a request; several numbers make several requests, such as
            --layers 8 80.
        layer_kib: KiB of one layer, in blocks of 64 KiB.
        rounds: The number of rounds; more rounds give firmer medians.
        common: Options of every benchmark.
    """
    if layer_kib % 64:
        raise kvwire.UsageError(
            f"--layer-kib {layer_kib}: pass a multiple of 64 (a block has 64 KiB)"
        )
    require_able([transport])
    options = {"transport": transport, "loop": common.loop, "by_link": 1}
    streamed, whole, alone = (
        Contender(way, overlap, options={**options, "way": way}) for way in WAYS
    )
    passing, alone_passing = (
        Contender(way, beside_engine, options={**options, "way": way})
        for way in (STREAMED, WHOLE)
    )
    passes = [
        Case(
            name=f"{PASS_LAYERS} layers of {kib} KiB",
            work=replace(work_of(TAKEN, PASS_LAYERS, kib * KIB), blocks=1),
            unit=MILLISECONDS,
            ours=[passing],
            beside=[alone_passing],
            group=GROUPS[TAKEN],
        )
        for kib in PASS_KIB
    ]
    # Exposed times are judged by the efficiency; transfers of equal bytes by the ratio.
    benchmark = Benchmark(
        name="overlap",
        cases=[
            Case(
                name=name,
                work=work,
                unit=MILLISECONDS,
                ours=[streamed] if work.verb == BULK else [streamed, whole, alone],
                beside=[whole] if work.verb == BULK else [],
                group=GROUPS[work.verb],
            )
            for name, work in works(alone, layers, layer_kib * KIB, rounds).items()
        ]
        + passes,
        notes=["A pass in Python excludes the time that it waits for a CPU."],
        below=judged,
        more=lambda found: {
            "efficiencies": [asdict(e) for e in efficiencies(found)],
            "taken_s": taken_s(found),
        },
    )
    settings = {"layers": list(layers), "layer_kib": layer_kib, "rounds": rounds}
    return common.run(benchmark, transport=transport, **settings)
