"""Ways of reading another process's memory, by the size of fragments.

    python -m tests.bench.local_ways --mib 128 --rounds 5

Raw lanes of `local` between two processes, without a connection around them: 1 MiB
payloads of scattered fragments, four under way. Each way and one memcpy of the same
bytes take turns. Printed are medians in GB for each second of the wall clock, and for
each second of processor time of the reader and of the writer: on a busy machine only
the latter two say anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import struct
import time
from collections import deque
from unittest import mock

import numpy as np
import numpy.typing as npt

from kvwire.backend import Landing
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.memory.arena import Arena
from kvwire.types import Role
from kvwire_local import LocalBackend, sent_payloads

WAYS = ("in place", "gathered", "arena")
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 65536, MIB)
_UNDER_WAY = 4
_LENGTH = struct.Struct("<I")
_SECONDS = struct.Struct("<d")

Bytes = npt.NDArray[np.uint8]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def scattered(memory: Bytes, size: int, seed: int) -> deque[Fragments]:
    """All of the memory as payloads of 1 MiB, cut into fragments in no order."""
    order = np.random.default_rng(seed).permutation(memory.size // size)
    addresses = memory.ctypes.data + order.astype(np.uint64) * np.uint64(size)
    lengths = np.full(MIB // size, size, np.uint64)
    return deque(
        Fragments(part, lengths, owner=memory, writable=True)
        for part in addresses.reshape(-1, lengths.size)
    )


class Writer(LaneHandler):
    """Sends, and keeps so many payloads under way."""

    def __init__(self, lane: Lane, streams: Streams) -> None:
        self.lane = lane
        self.payloads: deque[Fragments] = deque()
        self._streams = streams

    def send(self) -> None:
        """Send the next payload; its descriptor takes the place of the control link."""
        if self.payloads:
            descriptor = self.lane.send(self.payloads.popleft(), None)
            self._streams[1].write(_LENGTH.pack(len(descriptor)) + descriptor)
            self.lane.flush()

    def payload_sent(self, lane: Lane, token: object) -> None:
        self.send()

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        return

    def lane_writable(self, lane: Lane) -> None:
        return

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        return


class Reader(LaneHandler):
    """Receives, and says when everything is there."""

    def __init__(self, lane: Lane, streams: Streams) -> None:
        self.lane = lane
        self._streams = streams
        self._left = 0
        self._done = asyncio.Event()

    async def receive(self, payloads: deque[Fragments]) -> None:
        """Receive as many as there are places."""
        self._left = len(payloads)
        self._done.clear()
        for payload in payloads:
            (length,) = _LENGTH.unpack(await self._read(_LENGTH.size))
            landing = Landing(payload.nbytes, payload)
            self.lane.receive(await self._read(length), landing)
            self.lane.flush()
        await self._done.wait()

    async def _read(self, count: int) -> bytes:
        return await self._streams[0].readexactly(count)

    def payload_sent(self, lane: Lane, token: object) -> None:
        return

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()

    def lane_writable(self, lane: Lane) -> None:
        return

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        self._done.set()


def _lane(role: Role) -> Lane:
    context = LaneContext(role=role, number=1, secret=bytes(32))
    return LocalBackend().open_lane(context)


async def write(sock: socket.socket, nbytes: int) -> None:
    """The process whose memory is read."""
    streams = await asyncio.open_connection(sock=sock)
    writer = Writer(_lane(Role.SERVER), streams)
    bootstrap = writer.lane.bootstrap
    await writer.lane.join(await streams[0].readexactly(len(bootstrap)), writer)
    streams[1].write(bootstrap)
    arena = Arena(nbytes)
    memories = {"arena": arena.buffer(nbytes)}
    memories["in place"] = memories["gathered"] = np.zeros(nbytes, np.uint8)
    for memory in memories.values():
        memory[:] = 1
    while line := await streams[0].readline():
        way, size = json.loads(line)
        knee = 0 if way == "in place" else 2 * MIB
        with mock.patch.object(sent_payloads, "_GATHER_BELOW_BYTES", knee):
            began = time.process_time()
            writer.payloads = scattered(memories[way], size, 1)
            for _ in range(_UNDER_WAY):
                writer.send()
            await streams[0].readline()
            streams[1].write(_SECONDS.pack(time.process_time() - began))
    writer.lane.abort()


async def read(sock: socket.socket, nbytes: int, rounds: int) -> None:
    """The process that reads, measures and prints."""
    streams = await asyncio.open_connection(sock=sock)
    reader = Reader(_lane(Role.CLIENT), streams)
    streams[1].write(reader.lane.bootstrap)
    bootstrap = await streams[0].readexactly(len(reader.lane.bootstrap))
    await reader.lane.join(bootstrap, reader)
    target, source = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    print(f"{'fragment':>8}", *(f"{way:>22}" for way in ("memcpy", *WAYS)))
    for size in SIZES:
        taken: dict[str, list[tuple[float, float, float]]] = {}
        for _ in range(rounds):
            wall, cpu = time.perf_counter(), time.process_time()
            target[:] = source
            took = time.perf_counter() - wall, time.process_time() - cpu, np.inf
            taken.setdefault("memcpy", []).append(took)
            for way in WAYS:
                streams[1].write(json.dumps([way, size]).encode() + b"\n")
                wall, cpu = time.perf_counter(), time.process_time()
                await reader.receive(scattered(target, size, 2))
                mine = time.perf_counter() - wall, time.process_time() - cpu
                streams[1].write(b"\n")
                (theirs,) = _SECONDS.unpack(await streams[0].readexactly(8))
                taken.setdefault(way, []).append((*mine, theirs))
        rates = {
            way: nbytes / 1e9 / np.median(np.array(all_), axis=0)
            for way, all_ in taken.items()
        }
        cells = (f"{w:6.2f} ({r:5.2f} / {v:5.2f})" for w, r, v in rates.values())
        print(f"{size:8}", *(f"{cell:>22}" for cell in cells), flush=True)
    reader.lane.abort()
    streams[1].close()


def main() -> None:
    """Fork, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    nbytes = chosen.mib * MIB
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        asyncio.run(write(there, nbytes))
        os._exit(0)
    there.close()
    asyncio.run(read(here, nbytes, chosen.rounds))
    os.wait()


if __name__ == "__main__":
    main()
