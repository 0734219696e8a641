"""A process that takes part in one transfer and is killed before it writes frame k.

``python -m tests.fault.kill_victim`` is the nursery: it imports everything once, reads
orders as lines of JSON and forks a child for each, which takes 20 ms instead of 500. It
has no loop and no thread, so a fork is harmless. Lines that come back, each with the
order's number:

* ``port``: where the child listens, if it does;
* ``frames``: it was not killed; it has written so many frames in all;
* ``status``: it has ended; -9 is SIGKILL.

A child dies at a boundary between frames: what it has written before is handed to the
kernel, and of frame k comes not one byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

import uvloop

import kvwire
from kvwire.backend import Link
from kvwire_tcp.link import TcpLink
from tests.support.caches import Memory

LAYERS: Final = 8
BLOCKS: Final = 8
EVERY: Final = list(range(BLOCKS))
# 16 KiB in a block, so a layer is two chunks of the smallest size that is allowed.
SPEC: Final = kvwire.KVSpec(
    layers=LAYERS, kv_heads=2, head_dim=64, block_tokens=16, dtype="float32"
)
CHUNK_BYTES: Final = 64 * 1024
NEXT: Final = 1
NEVER: Final = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a child is to do; ``frame`` is the first that it must not write."""

    number: int = 0
    produces: bool = True
    pull: bool = True
    listens: bool = True
    address: str = "inproc://"
    id: int = 1
    salt: int = 1
    frame: int = NEVER


async def take_part(
    order: Order,
    comm: kvwire.Communicator,
    conn: kvwire.Connection,
    memory: Memory,
    *,
    lease_s: float,
) -> kvwire.Outgoing | kvwire.Incoming:
    """Play one end; the result is that end, which need not be over.

    The consumer asks for each next layer when it has one, so that acknowledgements and
    marks take turns and there are as many boundaries as there can be.
    """
    end: kvwire.Outgoing | kvwire.Incoming
    if order.produces:
        memory.stamp(EVERY, order.salt)
        verb = comm.publish if order.pull else conn.push
        end = verb(order.id, memory.cache, EVERY, lease_s=lease_s, group_bytes=1)
        await _produce(end, conn)
    else:
        ask = conn.pull if order.pull else comm.expect
        end = ask(order.id, memory.cache, EVERY, lease_s=lease_s)
        await _consume(end, conn)
    return end


async def _produce(out: kvwire.Outgoing, conn: kvwire.Connection) -> None:
    try:
        for layer in range(LAYERS):
            out.ready(layers=layer)
            await conn.recv(NEXT)
    except kvwire.ConnectionClosed:
        return  # whoever asks for layers is gone; the outcome will say so
    out.finish()


async def _consume(inc: kvwire.Incoming, conn: kvwire.Connection) -> None:
    try:
        for layer in range(LAYERS):
            await inc.layer(layer)
            await conn.send(NEXT, b"")
    except (kvwire.ConnectionClosed, kvwire.RequestError):
        return


# --- the child ------------------------------------------------------------------------


async def _live(order: Order) -> None:
    async with kvwire.open(name="victim", chunk_bytes=CHUNK_BYTES) as comm:
        if order.listens:
            where = await comm.listen(order.address)
            _say(order.number, port=where.port)
            conn = await comm.accept()
        else:
            conn = await comm.connect(order.address)
        memory = Memory(SPEC, BLOCKS)
        end = await take_part(order, comm, conn, memory, lease_s=5.0)
        outcome = await end
        if not outcome.complete:
            raise RuntimeError(f"the transfer failed: {outcome!r}")
        await end.drained()
        # Whoever connected closes; the other one waits for that.
        if order.listens:
            await conn.wait_closed()


class _Executioner:
    """Counts the frames of this process, and ends it before one of them."""

    def __init__(self, frame: int) -> None:
        self.written = 0
        self._frame = frame
        self._send = TcpLink.send

    def send(self, link: TcpLink, *frame: Any) -> None:
        """Instead of :meth:`TcpLink.send`."""
        if self.written < self._frame:
            self.written += 1
            self._send(link, *frame)
            return
        # It does nothing more but hand the kernel what came before.
        link._loop.remove_reader(link._sock)
        self._end(link)

    def _end(self, link: TcpLink) -> None:
        link.flush()
        if link.queued_bytes:
            link._loop.call_soon(self._end, link)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def _child(order: Order) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    executioner = _Executioner(order.frame)

    def send(link: TcpLink, *frame: Any) -> None:
        executioner.send(link, *frame)

    TcpLink.send = send  # type: ignore[method-assign,assignment]
    TcpLink.send_now = Link.send_now  # type: ignore[method-assign]
    try:
        uvloop.run(_live(order))
        _say(order.number, frames=executioner.written)
    except BaseException:  # noqa: BLE001 - it is printed, and the status tells
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


# --- the nursery ----------------------------------------------------------------------


async def _warm_up() -> None:
    """A transfer here, so that no child has to import what it takes.

    In process, since looking up an address would start threads.
    """
    order = Order()
    async with kvwire.open() as one, kvwire.open() as other:
        asking = await other.connect(await one.listen(order.address))
        ends = await asyncio.gather(
            take_part(
                order, one, await one.accept(), Memory(SPEC, BLOCKS), lease_s=5.0
            ),
            take_part(
                replace(order, produces=False),
                other,
                asking,
                Memory(SPEC, BLOCKS),
                lease_s=5.0,
            ),
        )
        await asyncio.gather(*ends)


def _say(number: int, **what: int) -> None:
    # One small write, so that lines of several processes do not mix.
    os.write(1, f"{json.dumps({'number': number, **what})}\n".encode())


def main() -> None:
    """Fork a child for each order; at the end of the input all of them are killed."""
    children: dict[int, int] = {}

    def reap(*_: object) -> None:
        while children:
            # Handlers nest: the outer one may have reaped the last, and not noted it.
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            _say(children.pop(pid), status=os.waitstatus_to_exitcode(status))

    uvloop.run(_warm_up())
    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if not pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            _child(order)
        children[pid] = order.number
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for pid in list(children):
        os.kill(pid, signal.SIGKILL)


class Nursery:
    """The nursery, from the test's side."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Queue[dict[str, int]]] = {}
        self._numbers = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Threads of a numerical library would not survive a fork.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reader

    async def bear(self, order: Order) -> Child:
        """Have a child do something."""
        answers: asyncio.Queue[dict[str, int]] = asyncio.Queue()
        self._answers[order.number] = answers
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(asdict(order))}\n".encode())
        await self._process.stdin.drain()
        return Child(answers)

    def number(self) -> int:
        """A new number for an order."""
        self._numbers += 1
        return self._numbers

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            self._answers[said.pop("number")].put_nowait(said)


class Child:
    """One victim, from the test's side."""

    def __init__(self, answers: asyncio.Queue[dict[str, int]]) -> None:
        self._answers = answers
        self._status: int | None = None
        self.frames: int | None = None

    async def port(self) -> int | None:
        """Where it listens; None if it was killed before it did."""
        said = await self._answers.get()
        if "port" in said:
            return said["port"]
        self._answers.put_nowait(said)
        return None

    async def ended(self) -> int:
        """Its status once it has ended; ``frames`` is set if it was not killed."""
        while self._status is None:
            said = await self._answers.get()
            self.frames = said.get("frames", self.frames)
            self._status = said.get("status")
        return self._status

    async def ended_before(self, task: asyncio.Task[Any]) -> None:
        """Wait until it has ended or a task is done, whichever comes first."""
        ending = asyncio.create_task(self.ended())
        await asyncio.wait([ending, task], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()


if __name__ == "__main__":
    main()
