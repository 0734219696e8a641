"""A producer and a consumer with stamped caches, on a link that can be stopped."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec

import pytest
import uvloop

import kvwire
from tests.support import inside, virtual_time
from tests.support.caches import BLOCKS, LARGE, Memory, same
from tests.support.pairs import join
from tests.support.waiting import PATIENCE_S

# What most scenarios move, and where to.
LIST, DEST = [3, 1, 4, 5, 9], [10, 11, 12, 13, 14]
TURNS_MAX = 100_000
Ends = tuple[kvwire.Outgoing, kvwire.Incoming]


def held(communicator: kvwire.Communicator) -> bool:
    """Whether some transport may touch memory of a communicator's users now."""
    return any(inside.buffers(communicator).holds._counts.values())


class World:
    """A producer p that listens and a consumer d that connects, with a cache each."""

    def __init__(
        self,
        p: kvwire.Communicator,
        d: kvwire.Communicator,
        pull_side: kvwire.Connection,
        push_side: kvwire.Connection,
        address: kvwire.Address,
    ) -> None:
        self.p, self.d = p, d
        self.pull_side, self.push_side = pull_side, push_side
        self.address = address
        self.source, self.target = Memory(), Memory()
        self.source.stamp(range(BLOCKS))

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop run until something holds that no event announces."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                moment = asyncio.Event()
                asyncio.get_running_loop().call_later(0.001, moment.set)
                await moment.wait()

    async def turns_until(self, condition: Callable[[], object]) -> None:
        """The same turn by turn, so that what passes quickly is seen."""
        for _ in range(TURNS_MAX):
            if condition():
                return
            await asyncio.sleep(0)
        raise TimeoutError

    async def stays_open(
        self, end: kvwire.Outgoing | kvwire.Incoming, seconds: float
    ) -> bool:
        """Whether a transfer goes on for so long at least."""
        try:
            async with asyncio.timeout(seconds):
                await end
        except TimeoutError:
            return True
        return False

    def freeze(self, connection: kvwire.Connection) -> Callable[[], None]:
        """Stop one end from reading; call the result to let it go on."""
        link: Any = inside.link(connection)
        if connection.transport == "tcp":
            link._loop.remove_reader(link._sock)
            return lambda: link._loop.add_reader(link._sock, link._on_readable)
        link._receive = lambda handler: None

        def thaw() -> None:
            del link._receive
            link.wake()

        return thaw

    def cut(self) -> None:
        """Break every connection between the two, as a reset on the way would."""
        for connection in self.p.live_connections:
            connection.abort("cut by the test")

    def begin(
        self,
        mine: Mapping[str, Any] = {},
        theirs: Mapping[str, Any] = {},
        *,
        push: bool = False,
    ) -> Ends:
        """Publish a few blocks and pull them, or expect them and push them.

        Some options are the producer's, others its consumer's.
        """
        if push:
            inc = self.d.expect("t", self.target.cache, DEST, **theirs)
            return self.push_side.push("t", self.source.cache, LIST, **mine), inc
        out = self.p.publish("t", self.source.cache, LIST, **mine)
        return out, self.pull_side.pull("t", self.target.cache, DEST, **theirs)

    def begin_large(self, blocks: int) -> Ends:
        """Publish blocks of which one layer of each is 1 MiB, and pull them."""
        self.source, self.target = Memory(LARGE, blocks), Memory(LARGE, blocks)
        self.source.stamp(range(blocks))
        out = self.p.publish("t", self.source.cache, range(blocks))
        return out, self.pull_side.pull("t", self.target.cache, range(blocks))

    async def moves(self, id: str, source: list[int], target: list[int]) -> bool:
        """Whether a whole transfer works, and brings the right bytes."""
        out = self.p.publish(id, self.source.cache, source)
        inc = self.pull_side.pull(id, self.target.cache, target)
        out.ready()
        out.finish()
        outcomes = [await inc, await out]
        await inc.drained()
        await out.drained()
        right = same(self.source, source, self.target, target)
        return right and all(outcome.complete for outcome in outcomes)


Scenario = Callable[[World], Coroutine[Any, Any, None]]


@asynccontextmanager
async def world(transport: str, **config: Any) -> AsyncIterator[World]:
    """A connected world; at its end nothing may be left in it."""
    async with (
        kvwire.open(name="prefill", **config) as p,
        kvwire.open(name="decode", **config) as d,
    ):
        pair = await join(d, p, transport)
        yield World(p, d, pair.left, pair.right, pair.address)
    assert not inside.registry(p).live
    assert not inside.registry(d).live
    assert not len(inside.buffers(p))
    assert not len(inside.buffers(d))


def play(scenario: Scenario, transport: str, **config: Any) -> None:
    """Run a scenario: in virtual time over ``inproc``, in real time over ``tcp``."""

    async def main() -> None:
        async with world(transport, **config) as made:
            await scenario(made)

    if transport == "tcp":
        uvloop.run(main())
    else:
        virtual_time.run(main())


P = ParamSpec("P")


def scenario(
    *transports: str, **config: Any
) -> Callable[
    [Callable[Concatenate[World, P], Coroutine[Any, Any, None]]], Callable[..., None]
]:
    """Make a test of a coroutine function; it is played over these transports.

    Without any it is played over both, each in a world of its own.
    """

    def made(
        body: Callable[Concatenate[World, P], Coroutine[Any, Any, None]],
    ) -> Callable[..., None]:
        def test(transport: str, **arguments: Any) -> None:
            play(functools.partial(body, **arguments), transport, **config)

        _, *others = inspect.signature(body).parameters.values()
        transport = inspect.signature(test).parameters["transport"]
        test.__signature__ = inspect.Signature([transport, *others])  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        test.__module__ = body.__module__
        names = transports or ("inproc", "tcp")
        played: Callable[..., None] = pytest.mark.parametrize("transport", names)(test)
        return played

    return made
