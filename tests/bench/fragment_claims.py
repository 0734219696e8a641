"""What kvwire aims at with fragments, as ratios of medians of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from kvwire.cli.bench.fragments import VERBS
from kvwire.cli.bench.report import new_table, short, size_name, verdict
from kvwire.cli.bench.turns import CaseResult, Samples
from kvwire.limits import KIB, MIB

SMALL: Final = 4 * KIB
LARGE: Final = 1 * MIB


@dataclass(frozen=True, slots=True)
class Claim:
    """Our median rate divided by the best of others', at least ``target``.

    Attributes:
        ours: Whose rate.
        layer_bytes: At which size.
        others: The best of them counts; those who did not take part do not.
        target: The ratio aimed at.
        others_bytes: At which size, if it is another.
    """

    ours: str
    layer_bytes: int
    others: Sequence[str]
    target: float
    others_bytes: int | None = None


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
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim as it came out for one verb.

    Attributes:
        claim: The claim.
        verb: Which way.
        best: Whose rate was the best beside ours.
        ratio: Of the medians.
        cpu_ratio: CPU seconds of both sides for a GiB, theirs divided by ours. Where
            others use the machine as well, it says more than the rate.
    """

    claim: Claim
    verb: str
    best: str
    ratio: float
    cpu_ratio: float

    @property
    def met(self) -> bool:
        """Whether it is what was aimed at."""
        return self.ratio >= self.claim.target


class Rates:
    """Samples by who, which way, which size and which layout."""

    def __init__(self, findings: Sequence[CaseResult]) -> None:
        self._samples: dict[tuple[str, str, int, bool], Samples] = {}
        for finding in findings:
            work = finding.case.work
            for name, samples in finding.samples.items():
                key = (name, work.verb, work.layer_bytes, work.cross_layer)
                self._samples[key] = samples

    def samples(
        self, name: str, verb: str, layer_bytes: int, *, cross_layer: bool = False
    ) -> Samples | None:
        """What was measured; None if it was not."""
        return self._samples.get((name, verb, layer_bytes, cross_layer))

    def median(
        self, name: str, verb: str, layer_bytes: int, *, cross_layer: bool = False
    ) -> float | None:
        """Bytes a second."""
        found = self.samples(name, verb, layer_bytes, cross_layer=cross_layer)
        return None if found is None else found.median

    def best(
        self, names: Sequence[str], verb: str, layer_bytes: int
    ) -> tuple[str, float] | None:
        """The fastest of those that took part."""
        known = [
            (name, rate)
            for name in names
            if (rate := self.median(name, verb, layer_bytes)) is not None
        ]
        return max(known, key=lambda pair: pair[1], default=None)


def judge(rates: Rates) -> list[Verdict]:
    """Every claim whose contenders took part."""
    found = []
    for claim in CLAIMS:
        for verb in VERBS:
            ours = rates.samples(claim.ours, verb, claim.layer_bytes)
            size = claim.others_bytes or claim.layer_bytes
            best = rates.best(claim.others, verb, size)
            theirs = best and rates.samples(best[0], verb, size)
            if ours is None or best is None or theirs is None:
                continue
            ratio = ours.median / best[1]
            cpu_ratio = theirs.cpu_s_per_gib / ours.cpu_s_per_gib
            found.append(Verdict(claim, verb, best[0], ratio, cpu_ratio))
    return found


def targets(verdicts: Sequence[Verdict]) -> Iterator[RenderableType]:
    """Show what was aimed at, and how it came out."""
    if not verdicts:
        return
    yield Text(
        "targets: kvwire's median rate divided by the best of these; their CPU s/GiB "
        "divided by kvwire's",
        style="italic",
    )
    table = new_table("", "size", "beside", "verb", "ratio", "target", "CPU")
    for found in verdicts:
        claim, others = found.claim, found.best
        if claim.others_bytes:
            others = f"{others}, {size_name(claim.others_bytes)}"
        table.add_row(
            claim.ours,
            size_name(claim.layer_bytes),
            others,
            found.verb,
            short(found.ratio),
            Text(f">= {claim.target:g} ") + verdict(found.met),
            short(found.cpu_ratio),
        )
    yield table
