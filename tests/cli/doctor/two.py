"""Two doctors in this process: one attends, the other one probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import kvwire
from kvwire import Address, Communicator, Connection
from kvwire.cli.doctor.examination import Examination
from kvwire.cli.doctor.peer import PROFILE, SEED, PeerReport, ProbeMemory, attend
from kvwire.limits import MIB
from tests.cli.doctor.trees import examination, machine

THERE: Examination = examination(machine(system="the other host"))


@dataclass(slots=True)
class Ward:
    """An attendant, and whoever wants to be served by it."""

    # A communicator with the doctor's profile.
    prober: Communicator
    # Where the attendant listens.
    address: Address
    # The reports that it was given; None for a visit without.
    heard: list[PeerReport | None] = field(default_factory=list)


@asynccontextmanager
async def ward(
    pass_bytes: int = MIB, kind: type[ProbeMemory] = ProbeMemory
) -> AsyncIterator[Ward]:
    """An attendant that lends ``pass_bytes`` of a kind of memory."""
    async with (
        kvwire.open(profile=PROFILE, require=("tcp",)) as there,
        kvwire.open(profile=PROFILE, require=("tcp",)) as here,
    ):
        found = Ward(here, await there.listen("127.0.0.1:0"))

        def heard(_: Connection, report: PeerReport | None) -> None:
            found.heard.append(report)

        serving = asyncio.create_task(
            attend(there, THERE, heard, lend=lambda: kind(pass_bytes, SEED))
        )
        yield found
        await there.close()
        await serving
