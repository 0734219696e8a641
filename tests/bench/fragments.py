"""``kvwire bench fragments`` beside libraries that do the same work in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType

from kvwire import UsageError
from kvwire.cli.bench import document as documents
from kvwire.cli.bench import fragments_report
from kvwire.cli.bench.case import Benchmark
from kvwire.cli.bench.fragments import (
    MEMCPY,
    SAME_HOST,
    TCP,
    VERBS,
    FragmentsChoice,
    Team,
    fragments,
)
from tests.bench import iperf3
from tests.bench.fragment_claims import Rates, judge, targets
from tests.bench.peer import PEERS, PeerContender

ALL_PEERS: Final = (*PEERS, "iperf3")


@dataclass(frozen=True, slots=True)
class Peers:
    """Who stands beside kvwire, whose memcpy always does.

    Attributes:
        names: Of :data:`ALL_PEERS`.
        interpreters: Where libraries are looked for.
    """

    names: Sequence[str]
    interpreters: Sequence[str]

    def join(self, team: Team, pool_bytes: int) -> None:
        """Let each of them take part that is installed.

        Raises:
            UsageError: A peer that nobody knows.
        """
        for name in self.names:
            if name in PEERS:
                self._join(team, name, pool_bytes)
            elif name == "iperf3":
                absent = iperf3.missing()
                if absent:
                    team.missing.append(absent)
                else:
                    team.add(TCP, iperf3.Iperf3())
            elif name != MEMCPY:
                raise UsageError(f"--peers {name}: there are {', '.join(ALL_PEERS)}")

    def _join(self, team: Team, name: str, pool_bytes: int) -> None:
        peer = PEERS[name]
        interpreter = peer.interpreter(self.interpreters)
        if interpreter is None:
            team.missing.append(peer.missing)
            return
        for setting in peer.settings:
            wire = SAME_HOST if setting == "shm" else TCP
            team.add(wire, PeerContender(peer, setting, interpreter, pool_bytes))


def beside(choice: FragmentsChoice, peers: Peers) -> Benchmark:
    """The benchmark.

    Raises:
        UsageError: A transport or a peer that nobody knows.
    """
    return fragments(choice, peers.join)


def render(benchmark: Benchmark, findings: fragments_report.Findings) -> RenderableType:
    """Show what was found, and the targets."""
    verdicts = judge(Rates(findings), VERBS)
    below = targets(verdicts) if verdicts else ()
    return Group(fragments_report.render(benchmark, findings), *below)


def document(
    benchmark: Benchmark,
    findings: fragments_report.Findings,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON document, with the targets."""
    found = documents.document(benchmark, findings, dict(settings))
    verdicts = judge(Rates(findings), VERBS)
    return {**found, "targets": [{**asdict(v), "met": v.met} for v in verdicts]}
