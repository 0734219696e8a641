"""What kvwire aims at beside others, as ratios of medians of ``bench fragments``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from kvwire.cli.bench.report import new_table, short
from kvwire.cli.bench.turns import Findings
from kvwire.cli.bench.work import GET, PULL, PUSH
from kvwire.limits import KIB, MIB
from kvwire.types import in_bytes

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
    Claim("kvwire ucx tcp", SMALL, ("nixl tcp",), 5.0),
    Claim("kvwire local arena", MIDDLE, ("memcpy",), 0.8, verbs=(GET,)),
    Claim("kvwire local arena", LARGE, ("memcpy",), 0.8, verbs=(GET,)),
    Claim("kvwire local", LARGE, ("nixl shm",), 1.1, verbs=(GET,)),
    Claim("kvwire ucx shm", LARGE, ("nixl shm",), 0.95, verbs=(GET,)),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim as it came out for one verb and place, beside the best.

    The ratio of CPU seconds of both sides for a GiB is theirs divided by ours. Where
    others use the machine as well, it says more than the rate.
    """

    claim: Claim
    placement: str
    verb: str
    best: str
    ratio: float
    cpu_ratio: float
    met: bool


def judge(findings: Findings) -> Iterator[Verdict]:
    """Judge every claim whose contenders took part, by caches with a tensor a layer."""
    places = dict.fromkeys(one.case.placement for one in findings)
    measured = {
        (name, one.case.placement, one.case.work.verb, one.case.work.layer_bytes): of
        for one in findings
        if not one.case.work.cross_layer
        for name, of in one.samples.items()
    }
    for claim in CLAIMS:
        size = claim.others_bytes or claim.layer_bytes
        for at in ((place, verb) for place in places for verb in claim.verbs):
            ours = measured.get((claim.ours, *at, claim.layer_bytes))
            others = {
                name: found
                for name in claim.others
                if (found := measured.get((name, *at, size)))
            }
            if ours is None or not others:
                continue
            best, theirs = max(others.items(), key=lambda item: item[1].median)
            ratio = ours.median / theirs.median
            cpu_ratio = theirs.cpu_s_per_gib / ours.cpu_s_per_gib
            yield Verdict(claim, *at, best, ratio, cpu_ratio, ratio >= claim.target)


def verdict(met: bool) -> Text:
    """Met or missed."""
    return Text("met", style="green") if met else Text("missed", style="red")


def render(verdicts: Sequence[Verdict]) -> RenderableType:
    """Show what was aimed at, and how it came out."""
    columns = ("size", "beside", "verb", "place", "ratio", "target", "CPU")
    table = new_table("", *columns)
    for found in verdicts:
        claim, others = found.claim, found.best
        if claim.others_bytes:
            others = f"{others}, {in_bytes(claim.others_bytes)}"
        table.add_row(
            claim.ours,
            in_bytes(claim.layer_bytes),
            others,
            found.verb,
            found.placement.rpartition("on ")[2],
            short(found.ratio),
            Text(f">= {claim.target:g} ") + verdict(found.met),
            short(found.cpu_ratio),
        )
    head = (
        "targets: kvwire's median rate divided by the best of these; their CPU s/GiB "
        "divided by kvwire's"
    )
    return Group(Text(head, style="italic"), table)


def document(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {"targets": [asdict(one) for one in verdicts]}
