"""Contenders that are one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvwire.cli.bench.case import Contender, Sample, Work
from kvwire.cli.bench.errors import BenchError
from kvwire.cli.bench.pair import SideProcess


class SoloContender(Contender):
    """One process of our own that does both sides' work.

    Args:
        name: As it is shown.
        role: What it plays.
        options: For that role.
        program: What is run with role and options; None for our own sides.

    Attributes:
        options: For that role.
        environment: Variables that its process gets besides those of this one.
    """

    _side: SideProcess

    def __init__(
        self,
        name: str,
        role: str,
        options: Sequence[str] = (),
        program: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self._program = program
        self.options = options
        self.environment: Mapping[str, str] = {}
        self._role = role
        self._facts: dict[str, Any] = {}

    def start(self) -> None:
        """See Contender."""
        self._side = SideProcess(
            self._role,
            self.options,
            program=self._program,
            environment=self.environment,
        )
        self._facts = self._side.call("start")

    def check(self, work: Work) -> None:
        """See Contender."""
        found = self._side.call("check", work=asdict(work))
        if found["sent"] != found["arrived"]:
            raise BenchError(
                f"{self.name}, {work.nbytes} bytes: what arrived "
                f"({found['arrived']}) is not what was sent ({found['sent']})"
            )

    def round(self, work: Work) -> Sample:
        """See Contender."""
        self.prepare(work)
        before_s = self.cpu_s()
        values = self._side.call("drive", work=asdict(work))["values"]
        after_s = self.cpu_s()
        self._side.call("verify", work=asdict(work))
        return Sample(values, work.nbytes * work.count, after_s - before_s)

    def prepare(self, work: Work) -> None:
        """Have it get ready; neither its time nor its CPU counts."""
        self._side.call("prepare", work=asdict(work))

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return float(self._side.call("cpu")["cpu_s"])

    def stop(self) -> None:
        """See Contender."""
        if hasattr(self, "_side"):
            self._side.stop()

    def facts(self) -> dict[str, Any]:
        """See Contender."""
        return self._facts
