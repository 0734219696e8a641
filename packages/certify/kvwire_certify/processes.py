"""The processes of a run: the right end, which may be stopped or killed, and messages.

Both ends map one file with both memories. The left process writes and checks both
memories, and the right process only passes its part to the transport. So a dead
process's memory can still be examined, and a broken transport cannot change the
expected content.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError
from kvwire_certify.schedule import Schedule
from kvwire_certify.transport import failure_text, load

MEMORY_BYTES: Final = 16 << 20
START_S: Final = 600.0
"""The time limit of the start of a process, which imports the adapter: libraries of
hundreds of MB, from a cold disk, while other programs use the cores.
"""
_LINE_BYTES_MAX: Final = 1 << 20


class Started(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first message of a process: it has imported the adapter, or why not.

    Attributes:
        version: The target's version.
        error: The kind of the error: the target is wrong, or a module or a shared
            library is missing.
        text: The error's text.
        library: The module that is missing or cannot be loaded.
    """

    version: str = ""
    error: Literal["", "usage", "missing", "library"] = ""
    text: str = ""
    library: str = ""


class Usage(msgspec.Struct, frozen=True):
    """The system resources that a process uses.

    Attributes:
        memory: The bytes of private memory.
        descriptor: The number of open descriptors.
        thread: The number of threads.
        ran_s: The seconds that its threads ran.
        wanted_s: The seconds that they ran or waited for a core.
        sleeps: How often they waited for anything else.
    """

    memory: int
    descriptor: int
    thread: int
    ran_s: float
    wanted_s: float
    sleeps: int


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of a method of the right end, with its arguments."""

    verb: str
    schedule: Schedule | None = None
    start: int = 0
    stop: int = 0
    data: bytes = b""
    tidy: bool = False


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of an order; ``failed`` is the error's text."""

    data: bytes = b""
    usage: Usage | None = None
    failed: str = ""


def usage(*, tidy: bool) -> Usage:
    """Measure this process; ``tidy`` collects garbage first."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if tidy:
        gc.collect()
    if tidy and trim is not None:
        trim(0)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    rows = dict(line.split(":", 1) for line in status.splitlines())
    ran_s = 0.0
    wanted_s = 0.0
    sleeps = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            ran, waited, _ = (thread / "schedstat").read_text().split()
            ran_s += int(ran) / 1e9
            wanted_s += (int(ran) + int(waited)) / 1e9
            state = (thread / "status").read_text()
            sleeps += int(state.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return Usage(
        memory=int(rows["RssAnon"].split()[0]) << 10,
        descriptor=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - only a count
        thread=int(rows["Threads"]),
        ran_s=ran_s,
        wanted_s=wanted_s,
        sleeps=sleeps,
    )


def memories(path: str) -> dict[str, npt.NDArray[np.uint64]]:
    """Map the file with both memories; return them by end."""
    with Path(path).open("r+b") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint64)
    left, right = np.split(whole, 2)
    return {"left": left, "right": right}


def part(memory: npt.NDArray[np.uint64], schedule: Schedule) -> memoryview:
    """Return the bytes of a memory that a schedule uses."""
    return memory.view(np.uint8)[: schedule.slots * schedule.slot_bytes].data


class MessageSocket:
    """Exchanges messages with another process, one JSON document per line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, message: object) -> None:
        """Send a message.

        Cancel safety: safe, the message is sent.
        """
        await self._streams()
        assert self._writer is not None
        self._writer.write(msgspec.json.encode(message) + b"\n")
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next message, or None once the other process has ended.

        Cancel safety: a partly received message is lost.
        """
        await self._streams()
        assert self._reader is not None
        try:
            line = await self._reader.readline()
        except ConnectionError:
            return b""
        return line if line.endswith(b"\n") else b""

    def close(self) -> None:
        """Close the socket."""
        if self._writer is not None:
            self._writer.close()
        else:
            self._sock.close()

    async def _streams(self) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                sock=self._sock, limit=_LINE_BYTES_MAX
            )


class Gone(Exception):
    """The other process has ended unexpectedly."""


class OrderFailed(Exception):
    """A call of the right end has failed."""


class Process:
    """A child process at the other end of a channel.

    Args:
        role: The end that it runs.
        arguments: The arguments of that end.
        folder: The folder for its temporary files; None for that of this process.
        log: The descriptor for its output; None for the output of this process.
    """

    def __init__(
        self,
        role: str,
        *arguments: str,
        folder: str | None = None,
        log: int | None = None,
        start_s: float = START_S,
    ) -> None:
        self._start_s = start_s
        self._command = (sys.executable, "-m", "kvwire_certify", role)
        self._arguments = arguments
        self._environment = {**os.environ, "TMPDIR": folder} if folder else None
        self._log = log
        # The right end is a child of the left one, and may be in a stopped state when
        # the left one ends.
        self._leads = role == "left"
        self._process: asyncio.subprocess.Process | None = None
        self.channel: MessageSocket | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Started:
        """Start it, and wait until its imports are done.

        Raises:
            Gone: It ended instead, or its imports took too long.
            UsageError: There is no such target.
            ImportError: A library that the target needs is not installed.

        Cancel safety: not safe, the process may keep running.
        """
        mine, its = socket.socketpair()
        with its:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(its.fileno()),
                *self._arguments,
                pass_fds=[its.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=self._environment,
                start_new_session=self._leads,
            )
        self.channel = MessageSocket(mine)
        try:
            # The left end starts the right one as well.
            async with asyncio.timeout((1 + self._leads) * self._start_s):
                line = await self.channel.receive()
        except TimeoutError:
            await self.kill()
            text = f"a process has not started within {self._start_s:g} s"
            raise Gone(text) from None
        if not line:
            raise Gone(f"a process has not started: {await self.ended()}")
        started = msgspec.json.decode(line, type=Started)
        match started.error:
            case "usage":
                raise UsageError(started.text)
            case "missing":
                raise ModuleNotFoundError(started.text, name=started.library)
            case "library":
                raise ImportError(started.text, name=started.library)
        return started

    async def ask(self, message: Order) -> Reply:
        """Send it an order, and wait for the reply.

        Raises:
            Gone: It has ended.
            OrderFailed: The call failed there.

        Cancel safety: not safe, the next call would get this reply.
        """
        assert self.channel is not None
        line = b""
        with contextlib.suppress(ConnectionError):
            await self.channel.send(message)
            line = await self.channel.receive()
        if not line:
            raise Gone(f"the right process has ended: {await self.ended()}")
        answer = msgspec.json.decode(line, type=Reply)
        if answer.failed:
            raise OrderFailed(f"in the right process: {answer.failed}")
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal.

        The kernel is asked directly: ``Popen.send_signal`` may take the exit status,
        which is then lost to asyncio.
        """
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def ended(self) -> str:
        """Wait until it has ended; return its exit status.

        Cancel safety: safe.
        """
        assert self._process is not None
        code = await self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    async def kill(self) -> None:
        """Kill it, and the left end's child with it.

        Cancel safety: safe, it is killed.
        """
        if self._process is not None:
            if self._leads:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            self.signal(signal.SIGKILL)
            await self._process.wait()
        if self.channel is not None:
            self.channel.close()


async def right_end(channel: MessageSocket, target: str, path: str) -> None:
    """Run the right end until the left process has ended.

    Cancel safety: never cancelled.
    """
    memory = memories(path)["right"]
    end = load(target)
    await channel.send(Started(end.version))
    while line := await channel.receive():
        order = msgspec.json.decode(line, type=Order)
        answer = Reply()
        try:
            if order.schedule is not None:
                end = load(target)
                view = part(memory, order.schedule)
            if order.verb == "usage":
                answer = Reply(usage=usage(tidy=order.tidy))
            else:
                arguments: dict[str, tuple[Any, ...]] = {
                    "open": (view,),
                    "connect": (order.data,),
                    "offer": (view[order.start : order.stop],),
                    "withdraw": (order.data,),
                    "close": (),
                }
                done = await getattr(end, order.verb)(*arguments[order.verb])
                answer = Reply(data=done or b"")
        except Exception as exc:  # noqa: BLE001 - a transport may raise anything
            answer = Reply(failed=failure_text(exc, end))
        await channel.send(answer)
