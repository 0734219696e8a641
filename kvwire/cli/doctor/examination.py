"""One host as the doctor sees it: everything that is shown, and sent as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvwire.backend import Finding
from kvwire.cli.doctor import findings, machine, process, requirements, transports
from kvwire.cli.doctor.machine import Machine
from kvwire.cli.doctor.process import Process
from kvwire.cli.doctor.transports import Transport
from kvwire.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found on one host.

    Attributes:
        machine: The facts of the machine.
        process: Those of the process that was looked at.
        transports: Every installed backend.
        findings: What follows from the facts.
        asked: What the configuration asks for.
    """

    machine: Machine
    process: Process
    transports: tuple[Transport, ...]
    findings: tuple[Finding, ...]
    asked: tuple[Finding, ...]

    @property
    def well(self) -> bool:
        """Nothing is missing that the configuration asks for."""
        return not any(self.missing())

    def missing(self) -> Iterator[Finding]:
        """What the configuration asks for and is not here."""
        return (finding for finding in self.asked if finding.state == "missing")


def examine(config: Config, pid: int = 0) -> Examination:
    """Look at this host.

    Args:
        config: What is asked for.
        pid: The process to look at; 0 for this one.
    """
    # First: it loads the libraries that the process is then seen to have.
    backends = transports.installed()
    host, seen = machine.look_at(), process.look_at(pid)
    return Examination(
        machine=host,
        process=seen,
        transports=backends,
        findings=findings.judged(host, seen),
        asked=requirements.asked(config, backends),
    )
