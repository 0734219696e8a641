"""Starts the three processes, sends the requests, and collects the events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import kvwire
from demo.lines import (
    LINE_BYTES_MAX,
    Connect,
    Event,
    NewToken,
    Order,
    Prefilled,
    Prompt,
    Single,
    Up,
    encode,
    events,
)
from demo.record import RequestTimes
from kvwire.limits import KIB

Said = TypeVar("Said", Up, Prefilled, NewToken, Single)
# A process that has lost its standard input ends by itself; this limit is for one that
# hangs.
_END_S: Final = 10.0
# On a quiet machine a run takes a few seconds.
_RUN_S: Final = 300.0
_READ_BYTES: Final = 64 * KIB
_ROLE: Final = (sys.executable, str(Path(__file__).parent), "role")
# Two processes that compute at the same time often share two cores.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class RoleFailed(kvwire.KVWireError):
    """A process has ended too early; its own message is on standard error."""


async def run(
    requests: list[Prompt],
    on_event: Callable[[Event], None],
    *,
    library: str = "numpy",
    wire_gbit: float | None = None,
) -> list[RequestTimes]:
    """Prefill in one process, decode in another, and compare with a third.

    Every event of the processes is passed to ``on_event`` as it arrives. The two are
    connected by a wire of this many gigabits per second, or by the plain loopback.
    """
    try:
        async with asyncio.timeout(_RUN_S):
            return await _run(requests, on_event, library, wire_gbit)
    except TimeoutError:
        raise RoleFailed(f"the run has not ended after {_RUN_S:g} s") from None


async def _run(
    requests: list[Prompt],
    on_event: Callable[[Event], None],
    library: str,
    wire_gbit: float | None,
) -> list[RequestTimes]:
    records = {request.name: RequestTimes(request.name) for request in requests}

    def note(event: Event) -> None:
        if not isinstance(event, Up):
            records[event.request].note(event)
        on_event(event)

    tokens = sum(request.new for request in requests)
    async with role("single", library) as single:
        async with (
            role("prefill", library) as prefill,
            role("decode", library) as decode,
        ):
            up = await prefill.until(Up, 1, note)
            async with wire(up.address, wire_gbit) as address:
                decode.give([Connect(address)])
                await decode.until(Up, 1, note)
                prefill.give(requests)
                decode.give(requests)
                try:
                    async with asyncio.TaskGroup() as group:
                        prefilled = prefill.until(Prefilled, len(requests), note)
                        group.create_task(prefilled)
                        group.create_task(decode.until(NewToken, tokens, note))
                # Not `except*`, because on 3.11.2 an exception raised there is put into
                # a group again.
                except ExceptionGroup as failed:
                    raise failed.exceptions[0] from None
        # It runs alone on the machine, after everything that is measured.
        await single.until(Up, 1, note)
        single.give(requests)
        await single.until(Single, len(requests), note)
    return list(records.values())


@contextlib.asynccontextmanager
async def wire(address: str, gbit: float | None) -> AsyncIterator[str]:
    """Yield an address that leads to the given one over a wire of this speed."""
    if gbit is None:
        yield address
        return
    there = kvwire.Address.parse(address)
    carriers: list[asyncio.Future[tuple[None, None]]] = []

    async def carry(near: StreamReader, to_near: StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(to_near):
            far, to_far = await asyncio.open_connection(there.host, there.port)
            # Decode connects, so KV flows to the side that connected.
            ways = _pass_on(near, to_far), _pass_on(far, to_near, gbit)
            carriers.append(asyncio.gather(*ways))
            await carriers[-1]

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    try:
        yield "tcp://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for carrier in carriers:
            carrier.cancel()


async def _pass_on(
    source: StreamReader, sink: StreamWriter, gbit: float | None = None
) -> None:
    """Forward bytes until their stream ends, at a limited rate."""
    with contextlib.closing(sink):
        while data := await source.read(_READ_BYTES):
            sink.write(data)
            await sink.drain()
            if gbit is not None:
                await asyncio.sleep(len(data) * 8 / (gbit * 1e9))


class RoleProcess:
    """A process that plays a role."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], said: StreamReader
    ) -> None:
        assert process.stdin is not None
        self._name = name
        self._process = process
        self._orders = process.stdin
        self._events = events(said)

    def give(self, orders: Iterable[Order]) -> None:
        """Send orders to the process; all orders of a run fit into the pipe."""
        # A process that has ended is detected when its events end.
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(b"".join(map(encode, orders)))

    async def until(
        self, kind: type[Said], count: int, note: Callable[[Event], None]
    ) -> Said:
        """Pass on its events until ``count`` of a kind have come; return the last."""
        async for event in self._events:
            note(event)
            if isinstance(event, kind):
                count -= 1
                if not count:
                    return event
        status = self._process.wait()
        raise RoleFailed(f"the {self._name} process ended with exit status {status}")

    async def end(self) -> None:
        """Wait until the process ends by itself, within a limit."""
        self._orders.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                async for _ in self._events:
                    pass


@contextlib.asynccontextmanager
async def role(name: str, library: str) -> AsyncIterator[RoleProcess]:
    """Run a process in a role while the context is open."""
    # asyncio's own function logs a warning if the process ends while it is being
    # started.
    process = subprocess.Popen(  # noqa: S603, ASYNC220 - our own program; a millisecond
        (*_ROLE, name, library),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=_ONE_THREAD | os.environ,
        # Ctrl-C is meant for this process, which then ends the others.
        process_group=0,
    )
    with process:
        try:
            said = StreamReader(limit=LINE_BYTES_MAX)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(said), process.stdout
            )
            with contextlib.closing(transport):
                running = RoleProcess(name, process, said)
                yield running
                await running.end()
        finally:
            process.kill()
