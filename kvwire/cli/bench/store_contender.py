"""A store of kvwire as a contender: one process, or two where a server is its tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvwire.cli.bench.case import Work
from kvwire.cli.bench.pair import SideProcess
from kvwire.cli.bench.solo import SoloContender


class StoreContender(SoloContender):
    """One process with a store; every byte that it gets is compared, in each round."""

    def check(self, work: Work) -> None:
        """See Contender."""
        self.prepare(work)
        super().check(work)


class ServedContender(StoreContender):
    """A store whose tier is a server in a process of its own.

    Args:
        name: As it is shown.
        options: Of the process that has the store.
        transport: The only one that both may use.
    """

    _server: SideProcess

    def __init__(self, name: str, options: Sequence[str], transport: str) -> None:
        super().__init__(name, "store", options)
        self.environment: dict[str, str] = {"KVWIRE_REQUIRE": transport}

    def start(self) -> None:
        """See Contender."""
        options = [o for o in self.options if o.startswith("loop=")]
        self._server = SideProcess(
            "store-server", options, environment=self.environment
        )
        self._server.call("start")
        super().start()

    def prepare(self, work: Work) -> None:
        """See SoloContender."""
        said = asdict(work)
        address = self._server.call("prepare", work=said)["address"]
        self._side.call("prepare", work=said, address=address)

    def cpu_s(self) -> float:
        """See SoloContender: of both processes."""
        return super().cpu_s() + float(self._server.call("cpu")["cpu_s"])

    def stop(self) -> None:
        """See Contender."""
        super().stop()
        if hasattr(self, "_server"):
            self._server.stop()

    def facts(self) -> dict[str, Any]:
        """See Contender."""
        return {**super().facts(), **self.environment}
