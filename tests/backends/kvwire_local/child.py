"""The other half of a lane, in a process of its own.

The parent is the client. It talks with the child over standard input and output, one
JSON object a line, as the control link of a connection would: bootstraps and
descriptors. Payloads are those of the conformance kit, so either side can tell what is
torn.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvwire.backend import Landing
from kvwire.backend.lane import Lane, LaneContext
from kvwire.memory.arena import Arena
from kvwire.testing.conformance.content import CUTS, Memory, pattern
from kvwire.types import Role
from kvwire_local import LocalBackend
from tests.backends.lane_recorder import LaneRecorder

_ROOT = Path(__file__).resolve().parents[3]
SECRET = hashlib.sha256(b"the parent and its child").digest()
_POISON = 0xEE
_NOBODY = 65534
_PR_SET_DUMPABLE = 4


def open_lane(role: Role, **settings: str) -> Lane:
    """Half of the lane between the two."""
    context = LaneContext(role=role, number=1, secret=SECRET, settings=settings)
    return LocalBackend().open_lane(context)


class Child:
    """The parent's side of it."""

    lane: Lane
    handler: LaneRecorder
    description: str

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Have the child do something; returns what it answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
        answer = await self.process.stdout.readline()
        assert answer, "the child has died"
        found: dict[str, Any] = json.loads(answer)
        return found

    async def join(self, **settings: str) -> None:
        """Bring a new lane up; the child's settings are those it was started with."""
        self.lane, self.handler = open_lane(Role.CLIENT, **settings), LaneRecorder()
        answer = await self.ask("join", bootstrap=self.lane.bootstrap.hex())
        try:
            await self.lane.join(bytes.fromhex(answer["bootstrap"]), self.handler)
        except BaseException:
            await self.ask("abort")
            raise
        self.description = (await self.ask("describe"))["description"]

    async def send_here(self, number: int, nbytes: int, **how: Any) -> Memory:
        """Let the child send a payload, and queue its arrival here."""
        answer = await self.ask("send", number=number, nbytes=nbytes, **how)
        memory = Memory(nbytes, CUTS[how.get("land", "view")])
        landing = Landing(nbytes, memory.payload)
        self.lane.receive(bytes.fromhex(answer["descriptor"]), landing)
        return memory

    async def send_there(self, number: int, nbytes: int, cut: str) -> dict[str, Any]:
        """Send a payload to the child; returns what it says of it."""
        memory = Memory(nbytes, CUTS[cut])
        memory.fill(pattern(number, nbytes))
        descriptor = self.lane.send(memory.payload, number)
        self.lane.flush()
        return await self.ask(
            "receive", number=number, nbytes=nbytes, descriptor=descriptor.hex()
        )


@contextlib.asynccontextmanager
async def child(*options: str, **settings: str) -> AsyncIterator[Child]:
    """Start a child; its half of each lane has these settings.

    ``"hidden"`` makes that one of the two cannot read the other's memory.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.backends.kvwire_local.child"),
        *(json.dumps(settings), *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
    )
    found = Child(process)
    try:
        await found.ask("nothing")
        yield found
    finally:
        if hasattr(found, "lane"):
            found.lane.abort()
        if process.returncode is None:
            process.kill()
        await process.communicate()


# --- in the child ---------------------------------------------------------------------


class _Half:
    """The child's half of one lane after another."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._settings = settings
        self._memories: list[Memory] = []
        self._arena = Arena(256 << 20)
        self._places: list[npt.NDArray[np.uint8]] = []

    async def join(self, bootstrap: str) -> dict[str, Any]:
        self._memories.clear()
        self._places.clear()
        self.lane, self.handler = (
            open_lane(Role.SERVER, **self._settings),
            LaneRecorder(),
        )
        await self.lane.join(bytes.fromhex(bootstrap), self.handler)
        return {"bootstrap": self.lane.bootstrap.hex()}

    async def describe(self) -> dict[str, Any]:
        return {"description": self.lane.description}

    async def nothing(self) -> dict[str, Any]:
        return {}

    async def send(
        self,
        number: int,
        nbytes: int,
        cut: str = "view",
        arena: bool = False,
        land: str = "",
    ) -> dict[str, Any]:
        data = pattern(number, nbytes)
        if arena:
            place = self._arena.buffer(nbytes)
            place[:] = data
            self._places.append(place)
            descriptor = self.lane.send(place.data, number)
        else:
            memory = Memory(nbytes, CUTS[cut])
            memory.fill(data)
            self._memories.append(memory)
            descriptor = self.lane.send(memory.payload, number)
        self.lane.flush()
        return {"descriptor": descriptor.hex()}

    async def receive(
        self, number: int, nbytes: int, descriptor: str
    ) -> dict[str, Any]:
        memory = Memory(nbytes, CUTS["odd-pages"])
        count = len(self.handler.received) + 1
        self.lane.receive(bytes.fromhex(descriptor), Landing(nbytes, memory.payload))
        self.lane.flush()
        await self.handler.moved(received=count)
        return {
            "received": len(self.handler.received) == count,
            "wrong": memory.differs_at(pattern(number, nbytes)),
        }

    async def sent(self, count: int) -> dict[str, Any]:
        await self.handler.moved(sent=count)
        return {"sent": self.handler.sent}

    async def abort(self) -> dict[str, Any]:
        """Abort, and overwrite all memory at the moment it may be reused."""
        self.lane.abort()
        if self.lane.description != "not up":
            await self.handler.end()
        for memory in self._memories:
            memory.poison()
        for place in self._places:
            place[:] = _POISON
        return {}


def _hide() -> None:
    """Make that one of the two processes cannot read the other."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    else:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


async def _main(settings: str, *options: str) -> None:
    half = _Half(json.loads(settings))
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    if "hidden" in options:
        _hide()
    while line := await reader.readline():
        asked = json.loads(line)
        answer = await getattr(half, asked.pop("do"))(**asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
