"""Rates of contenders who have never run, for claims, reports and plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvwire.cli.bench.case import (
    GIGABYTES_PER_SECOND,
    Benchmark,
    Case,
    Contender,
    Missing,
)
from kvwire.cli.bench.fragment_work import FragmentWork, work_of
from kvwire.cli.bench.fragments import TCP, VERBS, size_name
from kvwire.cli.bench.fragments_report import Findings
from kvwire.cli.bench.turns import take_turns
from kvwire.limits import KIB, MIB
from tests.cli.bench.contenders import Scripted

# GB/s by size, and across layers.
RATES: Final = {
    "kvwire tcp": {4 * KIB: 3.0, 1 * MIB: 4.0},
    "nixl tcp": {4 * KIB: 0.5, 1 * MIB: 2.0},
    "iperf3": {4 * KIB: 0.25, 1 * MIB: 1.0},
}
ACROSS: Final = {"kvwire tcp": 3.6, "nixl tcp": 2.5}


def case(wire: str, work: FragmentWork, contenders: Sequence[Contender]) -> Case:
    return Case(
        name=f"{size_name(work.layer_bytes)} {work.verb}, {work.layout}, {wire}",
        work=work,
        unit=GIGABYTES_PER_SECOND,
        ours=contenders[0],
        beside=contenders[1:],
        group=wire,
        essential=False,
    )


def forged(*cases: Case, missing: Sequence[Missing] = ()) -> Benchmark:
    ours = [cases[0].ours.name]
    return Benchmark(name="fragments", cases=cases, missing=missing, ours=ours)


def plan(failing: str = "") -> Benchmark:
    def work(verb: str, size: int, *, cross_layer: bool) -> FragmentWork:
        return work_of(verb, size, cross_layer=cross_layer, round_bytes=MIB)

    layered = [
        case(
            TCP,
            work(verb, size, cross_layer=False),
            [
                Scripted(n, [[r[size] * 1e9]], failing="round" if n == failing else "")
                for n, r in RATES.items()
            ],
        )
        for verb in VERBS
        for size in (4 * KIB, 1 * MIB)
    ]
    across = [
        case(
            TCP,
            work(verb, 4 * KIB, cross_layer=True),
            [Scripted(name, [[rate * 1e9]]) for name, rate in ACROSS.items()],
        )
        for verb in VERBS
    ]
    return forged(*layered, *across, missing=[Missing("gloo", "pip install torch")])


def measured(benchmark: Benchmark) -> Findings:
    return take_turns(benchmark, 2, lambda _: None)


def of_one_size(
    rates: dict[str, float], *, verb: str = "push", failing: str = ""
) -> Benchmark:
    """GB/s of fragments of 4 KiB; kvwire tcp is ours."""
    work = work_of(verb, 4 * KIB, cross_layer=False, round_bytes=MIB)
    contenders = [
        Scripted(name, [[rate * 1e9]], failing="round" if name == failing else "")
        for name, rate in rates.items()
    ]
    return forged(case(TCP, work, contenders))
