"""Memory of connections and transfers, stalls of the loop, CPU.

What a transport takes from the process that uses it, at each side. Nobody stands
beside it: what counts are the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from kvwire.cli.bench.fragments import FragmentWork, work_of
from kvwire.cli.bench.pair import BenchError, Contender
from kvwire.cli.bench.report import head, new_table, size_name, verdict
from kvwire.limits import GIB, KIB
from tests.bench.cost_side import (
    CPU,
    IDLE,
    OPEN,
    PEAK,
    STALLS,
    CostSide,
    CostWork,
)

CONNECTIONS: Final = 128
TRANSFERS: Final = 256
MOVED_TRANSFERS: Final = 8
LAYER_BYTES: Final = 4 * KIB
# One idle connection, and one callback while bytes move.
IDLE_TARGET_BYTES: Final = 64 * KIB
STALL_TARGET_S: Final = 10e-3
# In the order in which they are done, with how many of each.
MEASURES: Final = {
    IDLE: CONNECTIONS,
    OPEN: TRANSFERS,
    PEAK: 1,
    CPU: MOVED_TRANSFERS,
    STALLS: MOVED_TRANSFERS,
}

Both: TypeAlias = tuple[float, float]


@dataclass(slots=True)
class Cost:
    """What one transport costs.

    Attributes:
        name: As it is shown.
        work: What its transfers move.
        answers: By measure, what the left and the right side said, by round.
        failure: Why there is no more of it; "" if there is.
        facts: For the JSON document.
    """

    name: str
    work: FragmentWork
    answers: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = field(
        default_factory=lambda: {measure: [] for measure in MEASURES}
    )
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def median(self, measure: str, key: str) -> Both | None:
        """Of all rounds, at the left and at the right side; None if it failed."""
        answers = self.answers[measure]
        if not answers:
            return None
        left, right = (median(a[side][key] for a in answers) for side in (0, 1))
        return left, right


def steps(transports: Sequence[str], rounds: int) -> int:
    """How often :func:`cost` reports progress, unless somebody fails."""
    return len(transports) * rounds * len(MEASURES)


def cost(
    transports: Sequence[str],
    round_bytes: int,
    rounds: int,
    progress: Callable[[str], None],
) -> list[Cost]:
    """Measure every transport, in a new pair of processes in each round.

    Raises:
        KeyboardInterrupt: Nothing has been measured yet. Later it ends the benchmark
            with what there is.
    """
    work = work_of("pull", LAYER_BYTES, cross_layer=False, round_bytes=round_bytes)
    found = [Cost(f"kvwire {name}", work) for name in transports]
    try:
        for _ in range(rounds):
            for transport, result in zip(transports, found, strict=True):
                if not result.failure:
                    _round(transport, result, progress)
    except KeyboardInterrupt:
        if not any(answers for result in found for answers in result.answers.values()):
            raise
    return found


def render(found: Sequence[Cost]) -> RenderableType:
    """A row for each transport and measure; both sides, and what is aimed at."""
    table = new_table("cost: medians", "measure", "left", "right")
    table.add_column("target", no_wrap=True)
    for result in found:
        for name, values, unit, bound in _rows(result):
            shown = [f"{value:.2f} {unit}" for value in values]
            target = Text()
            if bound is not None:
                target = Text(f"<= {bound:g} ")
                target += verdict(max(values) <= bound)
            table.add_row(result.name, name, *shown, target)
    work = found[0].work
    size, fragment = size_name(work.moved_bytes), size_name(work.nbytes)
    lines = [
        f"Left pulls, right publishes: {size} in fragments of {fragment}.",
        "Callbacks are those of asyncio; wall time has others' work in it.",
    ]
    lines += [f"{r.name} failed: {r.failure}" for r in found if r.failure]
    return Group(table, Text(), *map(Text, lines))


def document(found: Sequence[Cost], settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: bytes and seconds, left and right, by round."""
    return {
        **head("cost", settings),
        "transports": {
            result.name: {
                "work": asdict(result.work),
                "measures": result.answers,
                "failure": result.failure,
                "facts": result.facts,
            }
            for result in found
        },
    }


def _round(transport: str, result: Cost, progress: Callable[[str], None]) -> None:
    contender = Contender(
        result.name,
        CostSide,
        options={"transport": transport, "pool_bytes": result.work.pool_bytes},
    )
    try:
        with contender.start() as pair:
            result.facts = pair.facts
            for measure, count in MEASURES.items():
                progress(f"{result.name}: {measure}")
                said = {**asdict(result.work), "measure": measure, "repeat": count}
                left, right = pair.move(CostWork(**said))
                result.answers[measure].append((left, right))
    except BenchError as exc:
        result.failure = str(exc)


def _rows(result: Cost) -> Iterator[tuple[str, Both, str, float | None]]:
    """Name, left and right, unit, and the bound in that unit."""
    moved_gib = result.work.moved_bytes * MOVED_TRANSFERS / GIB
    for name, measure, key, scale, unit, bound in (
        ("idle connection", IDLE, "bytes", KIB, "KiB", IDLE_TARGET_BYTES),
        ("open transfer", OPEN, "bytes", KIB, "KiB", None),
        ("peak of a transfer", PEAK, "bytes", KIB, "KiB", None),
        ("CPU for a GiB", CPU, "cpu_s", moved_gib, "s", None),
        ("callback, CPU, p99.9", STALLS, "cpu_p999_s", 1e-3, "ms", STALL_TARGET_S),
        ("callback, CPU, longest", STALLS, "cpu_max_s", 1e-3, "ms", None),
        ("callback, wall, p99.9", STALLS, "wall_p999_s", 1e-3, "ms", STALL_TARGET_S),
    ):
        values = result.median(measure, key)
        if values is not None:
            scaled = (values[0] / scale, values[1] / scale)
            yield name, scaled, unit, None if bound is None else bound / scale
