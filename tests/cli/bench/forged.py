"""Rates of contenders who have never run, for claims, reports and plots."""

from __future__ import annotations

from typing import Final

from kvwire.cli.bench.case import Missing
from kvwire.cli.bench.fragment_work import work_of
from kvwire.cli.bench.fragments import TCP, VERBS, Fragments, Row
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


def plan(failing: str = "") -> Fragments:
    rows = [
        Row(TCP, work_of(verb, size, cross_layer=False, round_bytes=MIB), contenders)
        for verb in VERBS
        for size in (4 * KIB, 1 * MIB)
        if (
            contenders := [
                Scripted(n, [[r[size] * 1e9]], failing="round" if n == failing else "")
                for n, r in RATES.items()
            ]
        )
    ]
    rows += [
        Row(
            TCP,
            work_of(verb, 4 * KIB, cross_layer=True, round_bytes=MIB),
            [Scripted(name, [[rate * 1e9]]) for name, rate in ACROSS.items()],
        )
        for verb in VERBS
    ]
    return Fragments(rows, ["kvwire tcp"], [Missing("gloo", "pip install torch")])


def measured(benchmark: Fragments) -> Findings:
    return take_turns(benchmark, 2, lambda _: None)


def of_one_size(
    rates: dict[str, float], *, verb: str = "push", failing: str = ""
) -> Fragments:
    """GB/s of fragments of 4 KiB; kvwire tcp is ours."""
    work = work_of(verb, 4 * KIB, cross_layer=False, round_bytes=MIB)
    contenders = [
        Scripted(name, [[rate * 1e9]], failing="round" if name == failing else "")
        for name, rate in rates.items()
    ]
    return Fragments([Row(TCP, work, contenders)], ["kvwire tcp"])
