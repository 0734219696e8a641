"""Requests spread over workers by load: three workers, one of them five times as slow.

    python examples/spread_load.py

Each worker announces itself in a directory with its load, and again when the load
changes. For each request the client lists the workers and takes the one with the most
room. A load is as old as its record, so the client adds what it has sent itself and has
no answer to.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import tempfile

import kvwire
from kvwire.directory import Record, open_directory

REQUESTS = 1
FIRST_REPLY = 1000
SLOTS = 4  # requests that a worker does at once
WORK_S = {"quick-0": 0.02, "quick-1": 0.02, "slow": 0.1}


class Worker:
    """Answers requests, a few at a time."""

    def __init__(self, comm: kvwire.Communicator) -> None:
        self._comm = comm
        self._slots = asyncio.Semaphore(SLOTS)
        self._open = 0
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Take connections until the communicator is closed."""
        await self._comm.listen("127.0.0.1:0")
        self._announce()
        async with self._tasks:
            async for connection in self._comm.connections():
                self._tasks.create_task(self._serve(connection))

    async def _serve(self, connection: kvwire.Connection) -> None:
        with contextlib.suppress(kvwire.ConnectionClosed):
            while True:
                reply = int.from_bytes(await connection.recv(REQUESTS), "little")
                self._tasks.create_task(self._answer(connection, reply))

    async def _answer(self, connection: kvwire.Connection, reply: int) -> None:
        self._open += 1
        self._announce()
        async with self._slots:
            await asyncio.sleep(WORK_S[self._comm.name])  # here the work would be
        self._open -= 1
        self._announce()
        with contextlib.suppress(kvwire.KVWireError):
            await connection.send(reply, self._comm.name.encode())

    def _announce(self) -> None:
        with contextlib.suppress(kvwire.ClosedOK):
            self._comm.announce(role="worker", load=self._open / SLOTS)


class Client:
    """Sends each request where there is room."""

    def __init__(self, comm: kvwire.Communicator) -> None:
        self._comm = comm
        self._replies = itertools.count(FIRST_REPLY)
        self._sent = collections.Counter[str]()  # without an answer, by member

    async def ask(self) -> str:
        """Ask the least busy worker; return its name."""
        members = await self._comm.members("role=worker")
        member = min(members, key=self._load)
        peer = self._comm.peer(member)
        reply = next(self._replies)
        self._sent[member.key] += 1
        try:
            answer = peer.recv(reply)
            await peer.send(REQUESTS, reply.to_bytes(8, "little"))
            return (await answer).decode()
        finally:
            self._sent[member.key] -= 1

    def _load(self, member: Record) -> float:
        """Return a worker's load: as announced, or by the requests that we sent."""
        return max(member.load, self._sent[member.key] / SLOTS)


async def all_there(where: str) -> None:
    """Wait until every worker is in the directory."""
    there = set[str]()
    async with contextlib.aclosing(open_directory(where).watch()) as changes:
        async for change in changes:
            there.add(change.record.name)
            if there == WORK_S.keys():
                return


async def main() -> None:
    """Send 120 requests, 8 at a time."""
    with tempfile.TemporaryDirectory() as folder:
        where = f"file:{folder}?interval_s=0.02"
        async with contextlib.AsyncExitStack() as stack:
            running = []
            for name in WORK_S:
                comm = await stack.enter_async_context(
                    kvwire.open(name=name, directory=where)
                )
                running.append(asyncio.create_task(Worker(comm).run()))
            comm = await stack.enter_async_context(kvwire.open(directory=where))
            await all_there(where)
            client = Client(comm)
            at_once = asyncio.Semaphore(8)

            async def one() -> str:
                async with at_once:
                    return await client.ask()

            answers = await asyncio.gather(*(one() for _ in range(120)))
        await asyncio.gather(*running)
    for name, count in sorted(collections.Counter(answers).items()):
        print(f"{name} answered {count}")


if __name__ == "__main__":
    asyncio.run(main())
