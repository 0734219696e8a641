"""The round trip of a small message over UCX alone, and what it costs to wait for one.

    python -m tests.bench.ucx_ping --bytes 64 --count 3000

Two processes with a worker and an endpoint each, as a lane has them, and no connection
around them. *Eager* messages are how a lane says hello. *Payload* is how it sends what
the core gives it, by rendezvous: the receiver's answer is in it. Neither side polls, so
a round trip has the kernel's wake-ups in it; those of a pipe are shown beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from kvwire_ucx.binding import OK
from kvwire_ucx.bootstrap import UcxBootstrap
from kvwire_ucx.context import Context
from kvwire_ucx.library import Version
from kvwire_ucx.requests import MemoryHandles
from kvwire_ucx.worker import UcxEndpoint, Worker

WAYS: Final = ("eager", "payload", "pipe")
WIRES: Final = {"tcp": "tcp", "shm": "self,sm,tcp"}
_TAG: Final = 7
_LENGTH: Final = struct.Struct("<I")
# A lane's rendezvous begins at 64 bytes, for every kind of send.
_NEVER: Final = "inf"


class Player:
    """One of two: sends to the other, and waits for what that sends."""

    def __init__(self, sock: socket.socket, way: str, wire: str, nbytes: int) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._out = memoryview(bytearray(nbytes))
        self._in = memoryview(bytearray(nbytes))
        self._way = way
        self._came: asyncio.Future[None] = self._loop.create_future()
        if way == "pipe":
            sock.setblocking(False)
            self._loop.add_reader(sock, self._readable)
            return
        given = {"TLS": WIRES[wire]}
        if way == "eager":
            given["RNDV_THRESH"] = _NEVER
        self._context = Context(given)
        self._worker = Worker(self._context, self._loop)
        address = self._worker.address
        sock.sendall(_LENGTH.pack(len(address)) + address)
        (length,) = _LENGTH.unpack(sock.recv(_LENGTH.size, socket.MSG_WAITALL))
        theirs = sock.recv(length, socket.MSG_WAITALL)
        there = UcxBootstrap(lane=0, version=Version(0, 0, 0), address=theirs)
        self._endpoint = UcxEndpoint(self._worker, there, self._failed)

    def send(self) -> None:
        """Send a message."""
        if self._way == "pipe":
            self._sock.send(self._out)
            return
        self._worker.send(
            self._endpoint.handle,
            MemoryHandles(self._out),
            _TAG,
            _nothing,
            eager=self._way != "payload",
        )

    def receive(self) -> asyncio.Future[None]:
        """Post the receive of the next message; done when it is there."""
        self._came = self._loop.create_future()
        if self._way != "pipe":
            self._worker.receive(MemoryHandles(self._in), _TAG, self._received)
        return self._came

    async def close(self) -> None:
        """End it."""
        if self._way == "pipe":
            self._loop.remove_reader(self._sock)
            return
        # Whoever is first would take the other's last message away.
        self._sock.setblocking(False)
        await self._loop.sock_sendall(self._sock, b"!")
        await self._loop.sock_recv(self._sock, 1)
        gone, idle = asyncio.Event(), asyncio.Event()
        self._endpoint.close(gone.set)
        await gone.wait()
        self._worker.when_idle(idle.set)
        await idle.wait()
        self._worker.close()
        self._context.close()

    def _readable(self) -> None:
        self._sock.recv_into(self._in)
        self._came.set_result(None)

    def _received(self, status: int, _nbytes: int) -> None:
        if status == OK:
            self._came.set_result(None)

    def _failed(self, status: int) -> None:
        """The other one has broken, or it has finished first."""
        if not self._came.done():
            self._came.set_exception(RuntimeError(f"the endpoint failed: {status}"))


def _nothing(_status: int, _nbytes: int) -> None:
    return


async def answer(player: Player, count: int) -> None:
    """Send back what comes, but for the last one."""
    for _ in range(count):
        await player.receive()
        player.send()
    await player.receive()
    await player.close()


async def ask(player: Player, count: int, idle_s: float) -> dict[str, float]:
    """Seconds of a round trip, and the CPU share of a pending receive."""
    taken = np.empty(count)
    for number in range(count):
        receive = player.receive()
        began = time.perf_counter()
        player.send()
        await receive
        taken[number] = time.perf_counter() - began
    pending = player.receive()
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.wait({pending}, timeout=idle_s)
    idle = (time.process_time() - cpu) / (time.perf_counter() - wall)
    player.send()
    await player.close()
    median, tail = np.percentile(taken[count // 10 :], [50, 99])
    return {"median_s": float(median), "p99_s": float(tail), "idle_cpu": idle}


def measure(way: str, wire: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Fork two processes; UCX must not have been used in this one."""
    here, there = socket.socketpair()
    children = []
    read, write = os.pipe()
    for sock, role in ((here, "ask"), (there, "answer")):
        child = os.fork()
        if child == 0:
            _play(sock, role, write, way, wire, chosen)
        children.append(child)
    for descriptor in (here.detach(), there.detach(), write):
        os.close(descriptor)
    with os.fdopen(read) as answers:
        text = answers.read()
    for child in children:
        os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text)
    return {"way": way, "wire": wire, **found}


def _play(
    sock: socket.socket,
    role: str,
    write: int,
    way: str,
    wire: str,
    chosen: argparse.Namespace,
) -> None:
    """In the child: be one of the two, and never return."""

    async def play() -> None:
        player = Player(sock, way, wire, chosen.bytes)
        if role == "answer":
            await answer(player, chosen.count)
        else:
            found = await ask(player, chosen.count, chosen.idle_s)
            os.write(write, json.dumps(found).encode())

    try:
        _runner(chosen.loop)(play())
    except BaseException:  # noqa: BLE001 - what is left of the parent must not run
        traceback.print_exc()
    os._exit(0)


def _runner(loop: str) -> Callable[[Any], None]:
    if loop == "asyncio":
        return asyncio.run
    import uvloop

    return uvloop.run


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=64)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--idle-s", type=float, default=2.0)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--json", action="store_true", help="a line of JSON each")
    chosen = parser.parse_args(given)
    cases = [("eager", wire) for wire in WIRES] + [("payload", wire) for wire in WIRES]
    for way, wire in [*cases, ("pipe", "")]:
        found = measure(way, wire, chosen)
        if chosen.json:
            print(json.dumps(found), flush=True)
        else:
            median, tail = 1e6 * found["median_s"], 1e6 * found["p99_s"]
            idle = 100 * found["idle_cpu"]
            print(
                f"{way:>8} {wire:>4} {median:8.1f} us, p99 {tail:8.1f}; "
                f"idle {idle:.3f} % of a CPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
