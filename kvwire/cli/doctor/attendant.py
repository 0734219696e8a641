"""``kvwire doctor --listen``: serves the measurements of other doctors.

One at a time: two would measure each other. What a prober can make it do is bounded:
it chooses its own memory, and a prober that asks nothing for a while is shown out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvwire import Communicator, Connection, ConnectionClosed, KVWireError, Region
from kvwire.cli.doctor.arena import Arena
from kvwire.cli.doctor.examination import Examination
from kvwire.cli.doctor.trial import Report
from kvwire.cli.doctor.words import (
    ECHO_BYTES,
    ECHO_TAG,
    ECHOES_MAX,
    FRAGMENT_BYTES,
    PASS_BYTES,
    Answer,
    Ask,
    Digest,
    Digested,
    Done,
    Echo,
    Examine,
    Examined,
    Finish,
    Lend,
    Lent,
    Refused,
    answer,
    asked,
)

logger = logging.getLogger("kvwire")

# A prober that is alive asks again as soon as it has measured.
PATIENCE_S: Final = 120.0


async def attend(
    communicator: Communicator,
    examination: Examination,
    heard: Callable[[Connection, Report | None], None],
    *,
    pass_bytes: int = PASS_BYTES,
) -> None:
    """Serve one connection after the other, until the communicator is closed.

    Args:
        communicator: It listens already.
        examination: What to tell of this host.
        heard: Called with each connection that is over, and its report if it sent one.
        pass_bytes: Bytes to lend.
    """
    async for connection in communicator.connections():
        visit = _Visit(communicator, connection, examination, pass_bytes)
        try:
            await visit.serve()
        except (KVWireError, TimeoutError) as exc:
            if not isinstance(exc, ConnectionClosed):
                logger.warning("doctor: %s: %r", connection.peer, exc)
        finally:
            await visit.end()
        heard(connection, visit.report)


class _Visit:
    """One prober, and the memory that is lent to it."""

    def __init__(
        self,
        communicator: Communicator,
        connection: Connection,
        examination: Examination,
        pass_bytes: int,
    ) -> None:
        self.report: Report | None = None
        self._communicator = communicator
        self._connection = connection
        self._examination = examination
        self._pass_bytes = pass_bytes
        self._arena: Arena | None = None
        self._region: Region | None = None

    async def serve(self) -> None:
        while True:
            async with asyncio.timeout(PATIENCE_S):
                question = await asked(self._connection)
                await answer(self._connection, await self._answer(question))

    async def end(self) -> None:
        await self._connection.close()
        await self._take_back()

    async def _answer(self, question: Ask) -> Answer:
        match question:
            case Examine():
                return Examined(self._examination)
            case Echo(count):
                return await self._echo(count)
            case Lend(fragment_bytes, seed):
                return await self._lend(fragment_bytes, seed)
            case Digest():
                if self._arena is None:
                    return Refused("nothing is lent")
                return Digested(self._arena.digest(), self._arena.gaps_untouched)
            case Finish(report):
                self.report = report
                return Done()

    async def _echo(self, count: int) -> Answer:
        if not 0 <= count <= ECHOES_MAX:
            return Refused(f"count={count}: at most {ECHOES_MAX}")
        buffer = bytearray(ECHO_BYTES)
        for _ in range(count):
            await self._connection.recv(ECHO_TAG, into=buffer)
            await self._connection.send(ECHO_TAG, buffer)
        return Done()

    async def _lend(self, fragment_bytes: int, seed: int) -> Answer:
        if fragment_bytes not in FRAGMENT_BYTES:
            return Refused(f"fragment_bytes={fragment_bytes}: one of {FRAGMENT_BYTES}")
        if not 0 <= seed < 2**64:
            return Refused(f"seed={seed}: 64 bits")
        await self._take_back()
        self._arena = Arena(self._pass_bytes, fragment_bytes)
        self._arena.fill(seed)
        self._region = self._communicator.register(self._arena.fragments, "readwrite")
        return Lent(self._region.grant(self._connection).to_bytes())

    async def _take_back(self) -> None:
        if self._region is not None:
            await self._region.close()
        self._region = self._arena = None
