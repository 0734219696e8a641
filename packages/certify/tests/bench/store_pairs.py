"""What stands beside a store server: a transfer of the same blocks.

It is kvwire without the store: the right cache's blocks into the left one's, or the
other way round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvwire_certify.bench import sides
from kvwire_certify.bench.line import Line
from kvwire_certify.bench.work import Work
from packages.certify.tests.bench.store import (
    ONE,
    transfer_of,
)


class _Transfers:
    """A line whose works are transfers: of a set, or of one block after the other."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.send = line.send

    async def receive(self) -> Any:
        asked = await self._line.receive()
        if isinstance(asked, dict):
            given = Work(**asked["work"])
            work = transfer_of(given)
            if given.verb == ONE:
                work = replace(work, nbytes=given.nbytes, blocks=1, count=given.count)
            asked["work"] = {
                name: getattr(work, name) for name in work.__dataclass_fields__
            }
        return asked


async def transfer_left(line: Line, options: dict[str, Any]) -> None:
    await sides.left(_Transfers(line), options)


async def transfer_right(line: Line, options: dict[str, Any]) -> None:
    await sides.right(_Transfers(line), options)
