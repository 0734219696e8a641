"""A benchmark between two hosts: one listens, the other one measures with it.

Both run the same command with the same options, so both know every work; the one that
measures says which is next. What they say goes over the measured connection, outside of
what is timed, so nobody takes part who has not been authenticated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from rich.console import Console

import kvwire
from kvwire.config import converted
from kvwire.limits import MIB
from kvwire_certify.bench.line import Line, Turn, turns
from kvwire_certify.bench.sides import Left, Right, facts, opened
from kvwire_certify.bench.work import Work

_TAG: Final = 100
# An offer has a grant with an address for each fragment, or a ticket with each block.
_MESSAGE_BYTES_MAX: Final = 16 * MIB
PROFILE: Final = "kvwire.bench"


class ConnectionLine:
    """A line over the measured connection."""

    def __init__(self, connection: kvwire.Connection) -> None:
        self._connection = connection
        self._buffer = bytearray(_MESSAGE_BYTES_MAX)

    async def send(self, value: object) -> None:
        """Send a value."""
        await self._connection.send(_TAG, msgspec.json.encode(value))

    async def receive(self) -> Any:
        """Return the next value.

        Raises:
            EOFError: The peer has gone.
        """
        try:
            count = await self._connection.recv(_TAG, into=self._buffer)
        except kvwire.ConnectionClosed as exc:
            raise EOFError(str(exc)) from exc
        return msgspec.json.decode(memoryview(self._buffer)[:count])


async def ask(
    line: Line, side: Left, works: Sequence[Work], turn: Turn
) -> dict[str, Any]:
    """Do a round with the peer; return this side's answer, with the ``other`` in it."""
    await line.send({"at": works.index(turn.work), "checks": turn.checks})
    offered = await line.receive()
    found = await side.round(replace(turn, offer=offered["offer"]))
    await line.send("over")
    return {**found, "other": await line.receive()}


async def attend(
    communicator: kvwire.Communicator,
    works: Sequence[Work],
    hello: object,
) -> None:
    """Serve connections until the communicator is closed, one round at a time.

    Args:
        communicator: The communicator, which listens.
        works: What peers may ask for.
        hello: The first value that each peer gets.
    """
    turn = asyncio.Lock()
    show = Console(stderr=True, highlight=False, markup=False).print

    async def answer(connection: kvwire.Connection) -> None:
        side = Right(communicator, connection, {})
        line = ConnectionLine(connection)
        try:
            await line.send(hello)
            while True:
                asked = await line.receive()
                async with turn:
                    work = works[asked["at"]]
                    await side.round(Turn(work, bool(asked["checks"])), line)
        except EOFError:
            show(f"served {connection.peer} over {connection.transport}")
        # The end of one peer is not that of the others.
        except Exception as exc:  # noqa: BLE001
            show(f"{connection.peer}: {type(exc).__name__}: {exc}")
        finally:
            side.memory.close()
            await connection.close()

    async with asyncio.TaskGroup() as serving:
        async for connection in communicator.connections():
            serving.create_task(answer(connection))


async def left(line: Line, options: dict[str, Any]) -> None:
    """Do each round's work with the peer at ``address``."""
    works = converted(options["works"], list[Work])
    profile = {PROFILE: options["profile"]}
    async with opened("bench-left", profile) as communicator:
        where = options["address"]
        transport = options["transport"]
        connection = await communicator.connect(where, transport=transport)
        side = Left(communicator, connection, options)
        try:
            remote = ConnectionLine(connection)
            there = await remote.receive()
            await line.send({"facts": {**facts(connection), "peer": there}})
            async for turn in turns(line):
                await line.send(await ask(remote, side, works, turn))
        finally:
            side.memory.close()


async def serve(listen: str, works: Sequence[Work], profile: str) -> None:
    """Be the other side for other hosts until Ctrl-C."""
    async with opened("bench-right", {PROFILE: profile}) as communicator:
        where = await communicator.listen(listen)
        Console(stderr=True).print(f"listening on {where}; Ctrl-C ends")
        await attend(communicator, works, {"kvwire": kvwire.__version__})
