"""kvwire's two sides: the left one times operations, the right one answers."""

from __future__ import annotations

import asyncio
import itertools
import platform
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import kvwire
from kvwire.backend import registry
from kvwire_certify.bench.line import HOST, Line, Seconds, Turn, each_timed, turns
from kvwire_certify.bench.work import (
    CONNECT,
    GET,
    LEFT,
    PULL,
    PUT,
    READY,
    RIGHT,
    SEND,
    BenchMemory,
    Work,
)

# What an offer has in hexadecimal: a grant for a region, or a window's ticket.
_Reach = Sequence[kvwire.Grant] | tuple[kvwire.RemoteWindow, bytes]
_End = kvwire.Incoming | kvwire.Outgoing

_DATA: Final = 3
_BACK: Final = 4
# The name of the window that the left side reads.
_WINDOW: Final = "bench"
# How many ends the right side prepares before the left side needs them.
_AHEAD: Final = 2
# The time between two layers, so that each travels by itself.
_GAP_S: Final = 1e-3


async def left(line: Line, options: dict[str, Any]) -> None:
    """Connect to the right side at ``address``, and do each round's work."""
    async with opened("bench-left") as communicator:
        where = options["address"]
        transport = options["transport"]
        connection = await communicator.connect(where, transport=transport)
        side = Left(communicator, connection, options)
        try:
            await line.send({"facts": facts(connection)})
            async for turn in turns(line):
                await line.send(await side.round(turn))
        finally:
            side.memory.close()


async def right(line: Line, options: dict[str, Any]) -> None:
    """Listen, by a link of the ``transport`` if ``by_link``, and answer each round."""
    async with opened("bench-right") as communicator:
        by_link = (
            options.get("by_link")
            and registry.load(options["transport"]).capabilities.links
        )
        scheme = options["transport"] if by_link else "tcp"
        where = await communicator.listen(f"{scheme}://{HOST}:0")
        await line.send({"address": str(where), "facts": {}})
        side = Right(communicator, await communicator.accept(), options)
        try:
            async for turn in turns(line):
                await side.round(turn, line)
        finally:
            side.memory.close()


@asynccontextmanager
async def opened(
    name: str, profile: Mapping[str, str] | None = None
) -> AsyncIterator[kvwire.Communicator]:
    """Open a communicator that does not wait for its peers at the end."""
    communicator = await kvwire.open(name=name, profile=profile or {})
    try:
        yield communicator
    finally:
        communicator.abort()
        await communicator.close()


def facts(connection: kvwire.Connection) -> dict[str, Any]:
    """Return the parts of a contender, for the JSON document."""
    loop = type(asyncio.get_running_loop()).__module__
    return {
        "kvwire": kvwire.__version__,
        "python": platform.python_version(),
        "loop": loop.partition(".")[0],
        "transport": str(connection.transport_report),
    }


class Left:
    """Begins and times the operations of a connection.

    Args:
        communicator: The connection's communicator.
        connection: The connection.
        options: ``memory``, and for connects the ``address`` and ``transport``.
    """

    def __init__(
        self,
        communicator: kvwire.Communicator,
        connection: kvwire.Connection,
        options: dict[str, Any],
    ) -> None:
        self._communicator = communicator
        self._connection = connection
        self._options = options
        self.memory = BenchMemory(LEFT, options)
        # A number for each transfer; both sides count in the same way.
        self._ids = itertools.count()

    async def round(self, turn: Turn) -> dict[str, Any]:
        """Do a round's work; return its seconds, CPU seconds, and a digest."""
        work = turn.work
        await asyncio.to_thread(self.memory.have, work, checks=turn.checks)
        async with self._reached(work, turn.offer) as reach:
            began_s = time.process_time()
            seconds = await self.move(work, reach)
            cpu_s = time.process_time() - began_s
        digest = await self.memory.digest() if turn.checks else ""
        return {"seconds": seconds, "cpu_s": cpu_s, "digest": digest}

    @asynccontextmanager
    async def _reached(self, work: Work, offer: Any) -> AsyncIterator[_Reach]:
        """Open the right side's offer: a grant for each operation in flight."""
        if not offer:
            yield ()
        elif work.verb == GET and work.layers:
            ticket = bytes.fromhex(offer)
            remote = await self._connection.window(_WINDOW)
            try:
                # The two caches are mapped onto each other once, not in each round.
                cache, blocks = self.memory.chosen
                await remote.get(ticket, into=cache, blocks=blocks[:1], positions=[0])
                yield remote, ticket
            finally:
                await remote.close()
        else:
            grant = kvwire.Grant.from_bytes(bytes.fromhex(offer))
            starts = range(0, len(grant), work.nbytes)
            yield [grant[at : at + work.nbytes] for at in starts]

    async def move(self, work: Work, reach: _Reach) -> Seconds:
        """Time each operation, or all in-flight operations together."""
        if work.verb == READY:
            return await self._mark_layers(work)
        if work.verb == CONNECT:
            return await each_timed(work.count, self._connect, lambda new: new.close())

        def begin(number: int) -> Awaitable[object]:
            return self._begin(work, number % work.in_flight, reach)

        if work.in_flight == 1:
            return await each_timed(work.count, begin)
        began = time.perf_counter()
        await _keep_busy(work, begin)
        if work.verb == SEND:
            await self._connection.recv(_BACK)  # all are there
        return [time.perf_counter() - began]

    def _begin(self, work: Work, at: int, reach: Any) -> Awaitable[object]:
        """Start an operation, one of several that may be in flight."""
        connection = self._connection
        match work.verb:
            case "pull":
                pulled = connection.pull(next(self._ids), *self.memory.chosen)
                return _over(pulled)
            case "push":
                pushed = connection.push(next(self._ids), *self.memory.chosen)
                return _over(_mark_all(pushed))
            case "get" if work.layers:
                return self._get_from(*reach)
            case "get":
                return connection.get(reach[at], into=self.memory.parts[at])
            case "put":
                pool = self.memory.pool
                source = self.memory.parts[0] if pool is None else pool.lent
                return connection.put(source, reach[at])
            case "send":
                return connection.send(_DATA, self.memory.parts[0])
            case _:
                return self._there_and_back()

    async def _connect(self, _: int) -> kvwire.Connection:
        where = self._options["address"]
        transport = self._options["transport"]
        return await self._communicator.connect(where, transport=transport)

    async def _get_from(self, remote: kvwire.RemoteWindow, ticket: bytes) -> None:
        cache, blocks = self.memory.chosen
        _require_complete(await remote.get(ticket, into=cache, blocks=blocks))

    async def _there_and_back(self) -> None:
        await self._connection.send(_DATA, self.memory.parts[0])
        await self._connection.recv(_BACK, self.memory.parts[0])

    async def _mark_layers(self, work: Work) -> Seconds:
        """Time each call of ``ready``, except for the first layer."""
        chosen = self.memory.chosen
        end = self._connection.push(next(self._ids), *chosen, group_bytes=1)
        clock = time.perf_counter
        seconds = []
        for layer in range(work.layers):
            began = clock()
            end.ready(layer)
            seconds.append(clock() - began)
            await asyncio.sleep(_GAP_S)
        end.finish()
        await _over(end)
        return seconds[1:]


class Right:
    """Answers the operations of a connection; see :class:`Left`."""

    def __init__(
        self,
        communicator: kvwire.Communicator,
        connection: kvwire.Connection,
        options: dict[str, Any],
    ) -> None:
        self._communicator = communicator
        self._connection = connection
        self.memory = BenchMemory(RIGHT, options)
        self._ids = itertools.count()

    async def round(self, turn: Turn, line: Line) -> None:
        """Offer the grants of a round to the left side, answer it, and report."""
        work = turn.work
        await asyncio.to_thread(self.memory.have, work, checks=turn.checks)
        async with self._offered(work) as offer:
            began_s = time.process_time()
            answering = asyncio.ensure_future(self._answer(work))
            await asyncio.sleep(0)  # its first ends are there
            await line.send({"offer": offer})
            over = asyncio.ensure_future(line.receive())
            try:
                done, _ = await asyncio.wait(
                    (answering, over), return_when="FIRST_EXCEPTION"
                )
                for task in done:
                    task.result()
            finally:
                over.cancel()
                answering.cancel()
                await asyncio.gather(over, answering, return_exceptions=True)
            cpu_s = time.process_time() - began_s
        digest = await self.memory.digest() if turn.checks else ""
        await line.send({"cpu_s": cpu_s, "digest": digest})

    @asynccontextmanager
    async def _offered(self, work: Work) -> AsyncIterator[str]:
        """Lend the memory that the left side reads or writes by itself."""
        pool = self.memory.pool
        if work.verb == GET and pool is not None:
            window = self._communicator.expose(_WINDOW, pool.cache)
            try:
                yield window.offer(pool.blocks).hex()
            finally:
                await window.close()
        elif work.verb in (PUT, GET):
            lent = self.memory.bytes if pool is None else pool.lent
            region = self._communicator.register(lent, access="readwrite")
            try:
                yield region.grant(self._connection).to_bytes().hex()
            finally:
                await region.close()
        else:
            yield ""

    async def _answer(self, work: Work) -> None:
        """Be the other end of the left side's operations."""
        connection = self._connection
        parts = self.memory.parts
        match work.verb:
            case "pull" | "push" | "ready":
                await self._offer_all(work)
            case "connect":
                for _ in range(work.count):
                    await self._communicator.accept()
            case "send":
                await _keep_busy(work, lambda at: connection.recv(_DATA, parts[at]))
                if work.in_flight > 1:
                    await connection.send(_BACK, b"")
            case "round trip":
                for _ in range(work.count):
                    await connection.recv(_DATA, parts[0])
                    await connection.send(_BACK, parts[0])

    async def _offer_all(self, work: Work) -> None:
        ends = [self._offer(work) for _ in range(min(_AHEAD, work.count))]
        try:
            for number in range(work.count):
                end = ends[0]
                if isinstance(end, kvwire.Incoming) and work.verb == READY:
                    for layer in range(work.layers):
                        await end.layer(layer)
                await _over(end)
                del ends[0]
                if number + _AHEAD < work.count:
                    ends.append(self._offer(work))
        finally:
            for end in ends:
                end.abort("the other side has gone")
                await end.drained()

    def _offer(self, work: Work) -> _End:
        number = next(self._ids)
        chosen = self.memory.chosen
        if work.verb == PULL:
            return _mark_all(self._communicator.publish(number, *chosen))
        return self._communicator.expect(number, *chosen)


async def _keep_busy(work: Work, begin: Callable[[int], Awaitable[object]]) -> None:
    """Do a work with ``in_flight`` operations at any time."""
    pending: deque[Awaitable[object]] = deque()
    for number in range(work.count):
        if len(pending) == work.in_flight:
            await pending.popleft()
        pending.append(begin(number % work.in_flight))
    for request in pending:
        await request


async def _over(end: _End) -> None:
    """Wait until a transfer is complete and its memory is free."""
    _require_complete(await end)
    await end.drained()


def _require_complete(outcome: kvwire.Outcome) -> None:
    if not outcome.complete:
        reasons = "; ".join(outcome.missing.reasons)
        raise RuntimeError(f"{len(outcome.missing)} blocks are missing: {reasons}")


def _mark_all(outgoing: kvwire.Outgoing) -> kvwire.Outgoing:
    """Mark all of a transfer as ready at once."""
    outgoing.ready()
    outgoing.finish()
    return outgoing
