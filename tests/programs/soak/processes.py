"""The soak: two processes that are cut, stopped, continued and killed.

``python -m tests.programs.soak`` starts a producer and a consumer and does this to
them. The consumer asks for transfers by messages, pulls them or has them pushed, and
checks every byte by the stamps of :mod:`tests.programs.soak.stamps`. What one process
alone cannot show:

* A producer that was stopped goes on when its consumer has given it up and has reused
  the blocks: a late write shows in the poison.
* A consumer that was stopped goes on when its producer has given it up and has
  overwritten the blocks: what it then says has landed must not be from there.
* Either of them is gone without a word, and its successor uses the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import uvloop
from rich.progress import Progress

import kvwire
from tests.programs.soak import stamps
from tests.support.caches import StampedCache

ASK_TAG: Final = 1
CLAIM_TAG: Final = 2
LEASE_S: Final = 1.5
DEADLINE_S: Final = 8.0
# A peer is given up after 0.6 s; some stops are shorter than that and some longer.
PING_INTERVAL_S: Final = 0.2
STOP_S_MAX: Final = 1.5
RETRY_S: Final = 0.05
# Numbers of transfers are not used again by a successor.
NUMBERS_EACH: Final = 2**16
EXIT_TIMEOUT_S: Final = 30.0


class Way(NamedTuple):
    """What carries the data of a soak, and how large its blocks are."""

    transport: str
    settings: Mapping[str, str] = MappingProxyType({})
    spec: kvwire.KVSpec = stamps.SPEC


WAYS: Final = {name: Way(name) for name in ("tcp", "local", "ucx", "nixl")}


class Ask(NamedTuple):
    """What a consumer wants from the producer."""

    number: int
    blocks: int
    push: bool


class Claim(NamedTuple):
    """What the producer says of a transfer that is over."""

    number: int
    complete: bool


# --- the producer ---------------------------------------------------------------------


class Producer:
    """Answers what consumers ask for."""

    def __init__(self, comm: kvwire.Communicator, way: Way, seed: int) -> None:
        self._comm = comm
        self._random = random.Random(seed)
        self._stamped = StampedCache(way.spec, stamps.NUM_BLOCKS)
        self._free = list(range(stamps.NUM_BLOCKS))
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, address: str) -> None:
        """Serve until the communicator is closed.

        Cancel safety: safe, what was begun goes on.
        """
        await self._comm.listen(address)
        say({})
        async for connection in self._comm.connections():
            self._start(self._serve(connection))

    async def _serve(self, connection: kvwire.Connection) -> None:
        with contextlib.suppress(kvwire.ConnectionClosed):
            while True:
                ask = Ask(*json.loads(await connection.recv(ASK_TAG)))
                if ask.blocks <= len(self._free):
                    source = stamps.take_blocks(self._free, ask.blocks, self._random)
                    self._start(self._produce(connection, ask, source))

    async def _produce(
        self, connection: kvwire.Connection, ask: Ask, source: list[int]
    ) -> None:
        try:
            verb = connection.push if ask.push else self._comm.publish
            out = verb(ask.number, self._stamped.cache, source, deadline=DEADLINE_S)
        except kvwire.ConnectionClosed:
            self._free += source
            return
        if await stamps.prefill(out, self._stamped, ask.number, source, self._random):
            say({"in several chunks": 1})
        outcome = await out
        await out.drained()
        # Whoever reads it from here on reads what was never sent.
        self._stamped.poison(source)
        self._free += source
        claim = json.dumps(Claim(ask.number, outcome.complete)).encode()
        for other in self._comm.live_connections:
            if other.peer.origin == connection.peer.origin:
                with contextlib.suppress(kvwire.KVWireError):
                    await other.send(CLAIM_TAG, claim)

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# --- the consumer ---------------------------------------------------------------------


class Consumer:
    """Asks for transfers and checks what comes."""

    def __init__(self, comm: kvwire.Communicator, way: Way, seed: int) -> None:
        self._comm = comm
        self._random = random.Random(seed)
        self._transport = way.transport
        self._number = seed * NUMBERS_EACH
        self._stamped = StampedCache(way.spec, stamps.NUM_BLOCKS)
        self._free = list(range(stamps.NUM_BLOCKS))
        # Of each transfer that is over on one side: whether it was complete there.
        self._outcomes: dict[int, bool] = {}
        self._claims: dict[int, bool] = {}

    async def run(self, address: str, stop: asyncio.Event) -> None:
        """Move blocks until told to stop, then look at all memory once more.

        Cancel safety: safe, but what is under way is not checked.
        """
        while not stop.is_set():
            connection = await self._connected(address, stop)
            if connection is None:
                break
            claims = asyncio.create_task(self._hear(connection))
            async with asyncio.TaskGroup() as group:
                for _ in range(stamps.TRANSFERS_AT_ONCE):
                    group.create_task(self._transfers(connection, stop))
            claims.cancel()
            await asyncio.wait([claims])
        say({"late": self._stamped.late(self._free)})

    async def _connected(
        self, address: str, stop: asyncio.Event
    ) -> kvwire.Connection | None:
        while not stop.is_set():
            try:
                found = await self._comm.connect(address, transport=self._transport)
                say({f"connections, {_taken(found)}": 1})
                return found
            except (kvwire.KVWireError, OSError):
                await asyncio.sleep(RETRY_S)
        return None

    async def _transfers(
        self, connection: kvwire.Connection, stop: asyncio.Event
    ) -> None:
        while not (connection.closed or stop.is_set()):
            with contextlib.suppress(kvwire.ConnectionClosed):
                await self._transfer(connection)

    async def _transfer(self, connection: kvwire.Connection) -> None:
        self._number += 1
        ask = Ask(
            self._number,
            self._random.randint(1, stamps.BLOCKS_EACH_MAX),
            self._random.random() < 0.5,
        )
        target = stamps.take_blocks(self._free, ask.blocks, self._random)
        late = self._stamped.late(target)
        try:
            verb = self._comm.expect if ask.push else connection.pull
            inc = verb(ask.number, self._stamped.cache, target, deadline=DEADLINE_S)
        except kvwire.ConnectionClosed:
            self._free += target
            raise
        try:
            await connection.send(ASK_TAG, json.dumps(ask).encode())
        except kvwire.ConnectionClosed:
            inc.abort("soak: not asked for")
        outcome = await inc
        tally = stamps.Tally()
        tally.check(self._stamped, ask.number, target, outcome)
        await inc.drained()
        self._stamped.poison(target)
        self._free += target
        self._outcomes[ask.number] = outcome.complete
        word = "complete" if outcome.complete else "partial"
        say({"bytes": tally.nbytes, "wrong": tally.wrong_bytes, "late": late, word: 1})
        self._compare(ask.number)

    async def _hear(self, connection: kvwire.Connection) -> None:
        with contextlib.suppress(kvwire.ConnectionClosed):
            while True:
                claim = Claim(*json.loads(await connection.recv(CLAIM_TAG)))
                self._claims[claim.number] = claim.complete
                self._compare(claim.number)

    def _compare(self, number: int) -> None:
        if number in self._claims and number in self._outcomes:
            claims, landed = self._claims.pop(number), self._outcomes.pop(number)
            say({"false": int(claims and not landed), "compared": 1})


def _taken(connection: kvwire.Connection) -> str:
    return next(str(each) for each in connection.transport_report if each.taken)


def say(what: dict[str, Any]) -> None:
    """Tell the parent; one small write, so a killed process cuts no line in two."""
    os.write(1, f"{json.dumps(what)}\n".encode())


async def _live(role: str, address: str, way: Way, seed: int, psk_file: str) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    async with kvwire.open(
        name=f"soak-{role}",
        lease_s=LEASE_S,
        ping_interval_s=PING_INTERVAL_S,
        close_timeout_s=1.0,
        trust="psk" if psk_file else "loopback",
        psk_file=psk_file,
        backends={way.transport: way.settings},
    ) as comm:

        def cut() -> None:
            for connection in comm.live_connections:
                connection.abort("soak: cut")

        loop.add_signal_handler(signal.SIGUSR1, cut)
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        if role == "consumer":
            say({})
            await Consumer(comm, way, seed).run(address, stop)
        else:
            serving = asyncio.create_task(Producer(comm, way, seed).run(address))
            await stop.wait()
            serving.cancel()
            await asyncio.wait([serving])


# --- the parent -----------------------------------------------------------------------


class ProcessSoak:
    """Starts both processes, and lets faults befall them until enough has landed."""

    roles: tuple[str, ...] = ("producer", "consumer")

    def __init__(
        self,
        *,
        seed: int,
        goal: int,
        fault_s: float,
        way: str,
        psk_file: str = "",
    ) -> None:
        self.tally = stamps.Tally()
        self._random = random.Random(seed)
        self._seed = seed
        self._goal = goal
        self._fault_s = fault_s
        self._way = way
        self._psk_file = psk_file
        self._born = Counter[str]()
        self._lives: dict[str, _Life] = {}
        self._moved = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self._address = f"127.0.0.1:{taken.getsockname()[1]}"

    async def run(self, progress: Progress | None = None) -> stamps.Tally:
        """Run to the goal.

        Cancel safety: safe, the processes are killed.
        """
        bar = None
        if progress is not None:
            bar = progress.add_task("soak", total=self._goal)
        roles = self.roles
        try:
            for role in roles:
                self._lives[role] = await _Life.begin(self, role)
            while self.reached < self._goal and not self.tally.failed:
                await self._fault(self._random.choice(roles))
                if progress is not None and bar is not None:
                    progress.update(bar, completed=self.reached)
            for role in roles:
                await self._lives[role].end()
        finally:
            for life in self._lives.values():
                await life.kill()
        return self.tally

    def command(self, role: str) -> list[str]:
        """How to start a side; no two of its lives have the same seed."""
        self._born[role] += 1
        seed = self._seed * 100 + self._born[role]
        return [sys.executable, *self.arguments(role, seed)]

    def arguments(self, role: str, seed: int) -> list[str]:
        """What Python is called with for that."""
        where = (self._address, self._way)
        return ["-m", __name__, role, *where, str(seed), self._psk_file]

    @property
    def reached(self) -> int:
        """How much of the goal is done: bytes checked."""
        return self.tally.nbytes

    def heard(self, said: dict[str, int]) -> None:
        """A side has seen something."""
        tally = self.tally
        tally.nbytes += said.pop("bytes", 0)
        tally.wrong_bytes += said.pop("wrong", 0)
        tally.late_bytes += said.pop("late", 0)
        tally.false_reports += said.pop("false", 0)
        tally.counts.update(said)
        self._moved.set()

    async def _fault(self, role: str) -> None:
        if not self._fault_s:
            self._moved.clear()
            async with asyncio.timeout(stamps.ROUND_TIMEOUT_S):
                await self._moved.wait()
            for life in self._lives.values():
                life.check()
            return
        before = self.reached
        await asyncio.sleep(self._random.expovariate(1 / self._fault_s))
        what = self._random.choices(("cut", "stopped", "killed"), (6, 3, 1))[0]
        self.tally.counts[f"{role} {what}"] += 1
        life = self._lives[role]
        if what == "cut":
            life.signal(signal.SIGUSR1)
        elif what == "stopped":
            life.signal(signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(0, STOP_S_MAX))
            life.signal(signal.SIGCONT)
        else:
            await life.kill()
            life = self._lives[role] = await _Life.begin(self, role)
        async with asyncio.timeout(stamps.ROUND_TIMEOUT_S):
            while self.reached == before and not self.tally.failed:
                self._moved.clear()
                await self._moved.wait()
                life.check()


class _Life:
    """One process of one of the two."""

    def __init__(self, role: str, process: Process, reader: asyncio.Task[None]) -> None:
        self._role = role
        self._process = process
        self._reader = reader

    @classmethod
    async def begin(cls, soak: ProcessSoak, role: str) -> Self:
        process = await asyncio.create_subprocess_exec(*soak.command(role), stdout=PIPE)
        assert process.stdout is not None
        # A signal that comes before its handler would end the process.
        await process.stdout.readline()
        return cls(role, process, asyncio.create_task(_read(soak, process)))

    def check(self) -> None:
        if self._reader.done():
            raise RuntimeError(
                f"the {self._role} has ended by itself; see its traceback"
            )

    def signal(self, number: signal.Signals) -> None:
        self.check()
        self._process.send_signal(number)

    async def end(self) -> None:
        """Ask it to end, and wait until it has, with all it had to say."""
        self.signal(signal.SIGTERM)
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            status = await self._process.wait()
        if status:
            raise RuntimeError(f"the {self._role} has ended with status {status}")

    async def kill(self) -> None:
        """End it at once, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reader


async def _read(soak: ProcessSoak, process: Process) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        soak.heard(json.loads(line))
    soak.heard({})  # it has ended


if __name__ == "__main__":
    _, _role, _address, _way, _seed, _key = sys.argv
    uvloop.run(_live(_role, _address, WAYS[_way], int(_seed), _key))
