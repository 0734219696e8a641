"""kvwire itself, through its public names and with its default configuration."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.sides.half import ConnectedHalf, digest, fill

PING: Final = 1
PONG: Final = 2
DATA: Final = 3
READY: Final = 4
DONE: Final = 5


class Room:
    """Memory for the operations in flight: a part for each of them.

    Attributes:
        parts: One for each operation in flight.
        region: The peer may put into it and get from it.
        grant: The right side's region, on the left side.
    """

    region: kvwire.Region
    grant: kvwire.Grant

    def __init__(self, work: Work) -> None:
        self.memory: bytearray = bytearray(work.nbytes * work.in_flight)
        whole = memoryview(self.memory)
        self.parts: list[memoryview] = [
            whole[i * work.nbytes : (i + 1) * work.nbytes]
            for i in range(work.in_flight)
        ]


class KvwireHalf(ConnectedHalf):
    """Messages, puts and gets over one connection."""

    by_link = True

    def __init__(self, transport: str) -> None:
        super().__init__(transport)
        # By the size of an operation: works of one size share their memory.
        self._rooms: dict[int, Room] = {}

    async def prepare(self, work: Work) -> dict[str, Any]:
        """See Half."""
        room = self._room(work)
        if not hasattr(room, "region"):
            room.region = self._communicator.register(room.memory, access="readwrite")
        grant = room.region.grant(self._connection)
        return {"grant": grant.to_bytes().hex()}

    async def use(self, work: Work, given: dict[str, Any]) -> dict[str, Any]:
        """See Half."""
        raw = bytes.fromhex(given["grant"])
        self._room(work).grant = kvwire.Grant.from_bytes(raw)
        return {}

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half."""
        connection, room = self._connection, self._room(work)
        part = room.parts[0]
        if work.verb == "get":
            await connection.recv(READY)
            await connection.get(room.grant[: work.nbytes], into=part)
            return {"digest": digest(part)}
        sent = fill(part)
        if work.verb == "put":
            await connection.put(part, room.grant[: work.nbytes])
            await connection.send(DONE, b"")
            return {"digest": sent}
        await connection.send(DATA, part)
        if work.verb == "round trip":
            await connection.recv(PONG, part)
            return {"digest": digest(part)}
        return {"digest": sent}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        connection, part = self._connection, self._room(work).parts[0]
        if work.verb == "get":
            sent = fill(part)
            await connection.send(READY, b"")
            return {"digest": sent}
        if work.verb == "put":
            await connection.recv(DONE)
        else:
            await connection.recv(DATA, part)
        if work.verb == "round trip":
            await connection.send(PONG, part)
        return {"digest": digest(part)}

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Half."""
        if work.verb == "round trip":
            return {"values": await self._play(work)}
        connection, room = self._connection, self._room(work)
        parts, grants = room.parts, self._grants(work, room)
        begin: dict[str, Callable[[int], kvwire.Request[int]]] = {
            "send": lambda i: connection.send(DATA, parts[0]),
            "put": lambda i: connection.put(parts[0], grants[i]),
            "get": lambda i: connection.get(grants[i], into=parts[i]),
        }
        await connection.recv(READY)
        began = time.perf_counter()
        await _keep_busy(work, begin[work.verb])
        if work.verb == "send":
            await connection.recv(DONE)
        elapsed_s = time.perf_counter() - began
        return {"values": [work.count * work.nbytes / elapsed_s]}

    async def serve(self, work: Work) -> dict[str, Any]:
        """See Half."""
        connection, parts = self._connection, self._room(work).parts
        if work.verb == "round trip":
            ball = self._room(work).memory
            for _ in range(work.count):
                await connection.recv(PING, ball)
                await connection.send(PONG, ball)
            return {}
        await connection.send(READY, b"")
        if work.verb == "send":
            await _keep_busy(work, lambda i: connection.recv(DATA, parts[i]))
            await connection.send(DONE, b"")
        return {}

    async def _play(self, work: Work) -> list[float]:
        connection, ball = self._connection, self._room(work).memory
        clock, values = time.perf_counter, []
        for _ in range(work.count):
            began = clock()
            await connection.send(PING, ball)
            await connection.recv(PONG, ball)
            values.append(clock() - began)
        return values

    def _room(self, work: Work) -> Room:
        room = self._rooms.get(work.nbytes)
        if room is None or len(room.parts) < work.in_flight:
            room = self._rooms[work.nbytes] = Room(work)
        return room

    @staticmethod
    def _grants(work: Work, room: Room) -> list[kvwire.Grant]:
        if work.verb == "send":
            return []
        return [
            room.grant[i * work.nbytes : (i + 1) * work.nbytes]
            for i in range(work.in_flight)
        ]


async def _keep_busy(work: Work, begin: Callable[[int], kvwire.Request[int]]) -> None:
    """Do the work with ``in_flight`` operations begun at any time."""
    pending: deque[kvwire.Request[int]] = deque()
    for number in range(work.count):
        if len(pending) == work.in_flight:
            await pending.popleft()
        pending.append(begin(number % work.in_flight))
    for request in pending:
        await request
