"""Libraries that do the work of ``kvwire bench fragments`` in the same run.

And what kvwire aims at beside them, as ratios of medians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from kvwire import UsageError
from kvwire.cli.bench import fragments
from kvwire.cli.bench.operations import GET, PULL, PUSH, OpsWork
from kvwire.cli.bench.report import new_table, short
from kvwire.cli.bench.turns import Benchmark, Findings
from kvwire.limits import KIB, MIB
from kvwire.types import in_bytes
from tests.programs.bench import iperf3
from tests.programs.bench.peer import PEERS

ALL_PEERS: Final = (*PEERS, "iperf3")
Beside = Callable[[Benchmark], Benchmark]


def joining(names: Sequence[str], interpreters: Sequence[str]) -> Beside:
    """Let each of these take part that is installed in one of the interpreters."""
    for name in names:
        if name not in (*ALL_PEERS, fragments.MEMCPY):
            raise UsageError(f"--peers {name}: there are {', '.join(ALL_PEERS)}")

    def join(benchmark: Benchmark) -> Benchmark:
        pool_bytes = max(case.work.memory_bytes for case in benchmark.cases)
        team: list[fragments.Member] = []
        streams: list[fragments.Member] = []
        notes = list(benchmark.notes)
        missing = list(benchmark.missing)
        for name in names:
            if name == "iperf3":
                if absent := iperf3.missing():
                    missing.append(absent)
                else:
                    streams.append((fragments.TCP, iperf3.contender()))
                    notes.append("iperf3 moves a stream of bytes, not fragments.")
            elif name in PEERS:
                peer = PEERS[name]
                found = peer.interpreter(interpreters)
                if found is None:
                    missing.append(peer.missing)
                for setting in peer.settings if found else ():
                    wire = fragments.SAME_HOST if setting == "shm" else fragments.TCP
                    one = peer.contender(setting, str(found), pool_bytes)
                    team.append((wire, one))
        return replace(
            fragments.joined(benchmark, team, streams),
            missing=missing,
            notes=notes,
            below=lambda found: list(targets(judge(found))),
            more=lambda found: {"targets": list(map(asdict, judge(found)))},
        )

    return join


def beside_transfers(transport: str, interpreters: Sequence[str]) -> Beside:
    """Let NIXL take part in transfers of ``kvwire bench ops``, over the same wire."""
    nixl, setting = PEERS["nixl"], "shm" if transport == "local" else "tcp"

    def join(benchmark: Benchmark) -> Benchmark:
        found = nixl.interpreter(interpreters)
        if found is None:
            return replace(benchmark, missing=[nixl.missing])
        works = [case.work for case in benchmark.cases]
        transfers = [
            work
            for work in works
            if isinstance(work, OpsWork)
            and work.layers
            and work.verb in fragments.VERBS
        ]
        pool_bytes = max(work.memory_bytes for work in transfers)
        one = nixl.contender(setting, found, pool_bytes)
        cases = [
            replace(case, beside=[one]) if case.work in transfers else case
            for case in benchmark.cases
        ]
        return replace(benchmark, cases=cases)

    return join


def verdict(met: bool) -> Text:
    """Met or missed."""
    return Text("met", style="green") if met else Text("missed", style="red")


# --- what is aimed at -----------------------------------------------------------------

SMALL: Final = 4 * KIB
MIDDLE: Final = 64 * KIB
LARGE: Final = 1 * MIB


@dataclass(frozen=True, slots=True)
class Claim:
    """Our median rate divided by the best of others', at least ``target``.

    Others that did not take part do not count; theirs is at ``others_bytes`` if that is
    another size.
    """

    ours: str
    layer_bytes: int
    others: Sequence[str]
    target: float
    others_bytes: int | None = None
    verbs: Sequence[str] = (PUSH, PULL)


CLAIMS: Final = (
    Claim("kvwire tcp", LARGE, ("iperf3", "nixl tcp"), 1.0),
    Claim("kvwire tcp", SMALL, ("nixl tcp",), 5.0),
    Claim("kvwire tcp", SMALL, ("kvwire tcp",), 0.6, LARGE),
    Claim("kvwire local", LARGE, ("memcpy",), 0.85),
    Claim("kvwire local", LARGE, ("nixl shm",), 1.0),
    Claim("kvwire local", SMALL, ("nixl shm",), 3.0),
    Claim("kvwire local arena", LARGE, ("memcpy",), 0.85),
    Claim("kvwire local arena", LARGE, ("nixl shm",), 1.0),
    Claim("kvwire local arena", SMALL, ("nixl shm",), 3.0),
    Claim("kvwire ucx shm", LARGE, ("nixl shm",), 0.85),
    Claim("kvwire ucx shm", SMALL, ("nixl shm",), 3.0),
    Claim("kvwire ucx tcp", LARGE, ("nixl tcp",), 1.0),
    Claim("kvwire ucx tcp", LARGE, ("ucxx tcp",), 3.0),
    Claim("kvwire ucx tcp", SMALL, ("nixl tcp",), 5.0),
    Claim("kvwire local arena", MIDDLE, ("memcpy",), 0.8, verbs=(GET,)),
    Claim("kvwire local arena", LARGE, ("memcpy",), 0.8, verbs=(GET,)),
    Claim("kvwire local", LARGE, ("nixl shm",), 1.1, verbs=(GET,)),
    Claim("kvwire ucx shm", LARGE, ("nixl shm",), 0.95, verbs=(GET,)),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim as it came out for one verb, beside the best.

    The ratio of CPU seconds of both sides for a GiB is theirs divided by ours. Where
    others use the machine as well, it says more than the rate.
    """

    claim: Claim
    verb: str
    best: str
    ratio: float
    cpu_ratio: float
    met: bool


def judge(findings: Findings) -> Iterator[Verdict]:
    """Judge every claim whose contenders took part, by caches with a tensor a layer."""
    measured = {
        (name, one.case.work.verb, one.case.work.layer_bytes): samples
        for one in findings
        if not one.case.work.cross_layer
        for name, samples in one.samples.items()
    }
    for claim in CLAIMS:
        size = claim.others_bytes or claim.layer_bytes
        for verb in claim.verbs:
            ours = measured.get((claim.ours, verb, claim.layer_bytes))
            others = [n for n in claim.others if (n, verb, size) in measured]
            if ours is None or not others:
                continue
            best = max(others, key=lambda name: measured[name, verb, size].median)
            theirs = measured[best, verb, size]
            ratio = ours.median / theirs.median
            cpu_ratio = theirs.cpu_s_per_gib / ours.cpu_s_per_gib
            met = ratio >= claim.target
            yield Verdict(claim, verb, best, ratio, cpu_ratio, met)


def targets(verdicts: Iterator[Verdict]) -> Iterator[RenderableType]:
    """Show what was aimed at, and how it came out."""
    table = new_table("", "size", "beside", "verb", "ratio", "target", "CPU")
    for found in verdicts:
        claim, others = found.claim, found.best
        if claim.others_bytes:
            others = f"{others}, {in_bytes(claim.others_bytes)}"
        table.add_row(
            claim.ours,
            in_bytes(claim.layer_bytes),
            others,
            found.verb,
            short(found.ratio),
            Text(f">= {claim.target:g} ") + verdict(found.met),
            short(found.cpu_ratio),
        )
    if table.row_count:
        yield Text(
            "targets: kvwire's median rate divided by the best of these; their CPU "
            "s/GiB divided by kvwire's",
            style="italic",
        )
        yield table
