"""Processes of a soak, which are cut, stopped, continued and killed.

A soak is a module, ``transfers`` or ``windows``: the ways of its data, the roles of its
processes, and what one process does until it is told to stop. A process says what it
has seen as counts, in a line of JSON; the parent adds them up. What one process alone
cannot show:

* A side that was stopped goes on when its peer has given it up and has reused the
  blocks: a late write shows in the poison, and what has landed is not from there.
* Either side is gone without a word, and its successor uses the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import uvloop

import kvwire

# A peer is given up after 0.6 s; some stops are shorter than that and some longer.
PING_INTERVAL_S: Final = 0.2
STOP_S_MAX: Final = 1.5
EXIT_TIMEOUT_S: Final = 30.0
# A round takes milliseconds, and a lease of 2 s where it is cut; longer is a hang.
ROUND_TIMEOUT_S: Final = 60.0
# What makes a soak fail: wrong and late bytes, and producers that claim too much.
WRONGS: Final = ("wrong", "late", "false")
KEY: Final = "soak.key"


def named(what: str) -> Any:
    """The module of a soak."""
    return importlib.import_module(f"tests.programs.soak.{what}")


def say(what: Mapping[str, int]) -> None:
    """Tell the parent; one small write, so a killed process cuts no line in two."""
    os.write(1, f"{json.dumps(what)}\n".encode())


class Soak:
    """Starts all processes, and lets faults befall them until enough was seen.

    Attributes:
        counts: What the processes have said, added up.
    """

    def __init__(
        self,
        what: str,
        *,
        seed: int,
        goal: int,
        fault_s: float,
        way: str,
        folder: Path,
        plant: bool = False,
    ) -> None:
        self.counts = Counter[str]()
        self._module = named(what)
        self._what = what
        self._random = random.Random(seed)
        self._seed = seed
        self._goal = goal
        self._fault_s = fault_s
        self._way = way
        self._more = [str(folder), *(["plant"] if plant else [])]
        self._born = Counter[str]()
        self._lives: dict[str, _Life] = {}
        self._moved = asyncio.Event()
        self._module.prepare(folder)
        self._address = "inproc://soak"
        if way != "inproc":
            with socket.create_server(("127.0.0.1", 0)) as taken:
                self._address = f"127.0.0.1:{taken.getsockname()[1]}"

    @property
    def failed(self) -> bool:
        return any(self.counts[wrong] for wrong in WRONGS)

    @property
    def reached(self) -> int:
        """How much of the goal is done."""
        return sum(self.counts[what] for what in self._module.REACHED)

    async def run(self) -> None:
        """Run to the goal.

        Cancel safety: safe, the processes are killed.
        """
        roles = self._module.roles(self._way)
        try:
            for role in roles:
                self._lives[role] = await _Life.begin(self, role)
            while self.reached < self._goal and not self.failed:
                await self._fault(self._random.choice(roles))
            for role in roles:
                await self._lives[role].end()
        finally:
            for life in self._lives.values():
                await life.kill()

    def command(self, role: str) -> list[str]:
        """How to start a process; no two lives of a role have the same seed."""
        self._born[role] += 1
        seed = str(self._seed * 100 + self._born[role])
        where = (self._what, role, self._address, self._way)
        return [sys.executable, "-m", __name__, *where, seed, *self._more]

    def heard(self, said: dict[str, int]) -> None:
        """A process has seen something."""
        self.counts.update(said)
        self._moved.set()

    async def _fault(self, role: str) -> None:
        if not self._fault_s:
            self._moved.clear()
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                await self._moved.wait()
            for life in self._lives.values():
                life.check()
            return
        before = self.reached
        await asyncio.sleep(self._random.expovariate(1 / self._fault_s))
        what = self._random.choices(("cut", "stopped", "killed"), (6, 3, 1))[0]
        self.counts[f"{role} {what}"] += 1
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
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while self.reached == before and not self.failed:
                self._moved.clear()
                await self._moved.wait()
                life.check()


class _Life:
    """One process."""

    def __init__(self, role: str, process: Process, reader: asyncio.Task[None]) -> None:
        self._role = role
        self._process = process
        self._reader = reader

    @classmethod
    async def begin(cls, soak: Soak, role: str) -> Self:
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


async def _read(soak: Soak, process: Process) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        soak.heard(json.loads(line))
    soak.heard({})  # it has ended


async def _live(
    module: Any, role: str, address: str, way: str, seed: int, folder: Path
) -> None:
    loop, stop, key = asyncio.get_running_loop(), asyncio.Event(), folder / KEY
    proven: dict[str, Any] = {}
    if key.exists():
        proven = {"trust": "psk", "psk_file": str(key)}
    async with kvwire.open(
        name=f"soak-{role}",
        ping_interval_s=PING_INTERVAL_S,
        close_timeout_s=1.0,
        **module.options(way),
        **proven,
    ) as comm:

        def cut() -> None:
            for connection in comm.live_connections:
                connection.abort("soak: cut")

        loop.add_signal_handler(signal.SIGUSR1, cut)
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        if role in module.LISTENING:
            await comm.listen(address)
        say({})
        await module.live(role, comm, address, way, seed, stop, folder)


if __name__ == "__main__":
    _, _what, _role, _address, _way, _seed, _folder, *_planted = sys.argv
    _module = named(_what)
    if _planted:
        _module.plant(_way, Path(_folder))
    uvloop.run(_live(_module, _role, _address, _way, int(_seed), Path(_folder)))
