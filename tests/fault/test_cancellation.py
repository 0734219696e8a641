"""Goal R10: every public coroutine interrupted at every suspension point.

Afterwards the pair is usable or cleanly closed, and nothing is left. "Late" is the
worst moment there is: what was awaited has arrived, and the task is cancelled before it
can look at it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvwire
import kvwire_store
from kvwire import Communicator, Connection, ConnectionClosed, KVWireError, Region
from kvwire.aio import run_to_completion
from kvwire.directory import open_directory
from kvwire.limits import EAGER_BYTES
from kvwire.types import AccessName
from kvwire_certify.conformance.rig import open_descriptors
from tests.directory.records import record
from tests.support import inside
from tests.support.cases import each
from tests.support.pairs import Pair, communicators, connected, until
from tests.support.scopes import in_scope

LARGE = bytes(range(256)) * (EAGER_BYTES // 64)
# No public coroutine suspends more often than this; without it a sweep might not end.
SUSPENSIONS_MAX = 60


class How(enum.Enum):
    """What happens at the suspension."""

    CANCEL = "cancel"
    LATE = "cancel once what is awaited is there"
    TWICE = "cancel, and cancel the clean-up as well"
    TIMEOUT = "a timeout"


class Interrupted:
    """Awaits something, and interrupts it when it suspends for the n-th time."""

    def __init__(
        self,
        awaited: Awaitable[Any],
        at: int,
        how: How,
        *,
        also: Callable[[], None] | None = None,
    ) -> None:
        self.hit = False
        self._awaited = awaited
        self._at = at
        self._how = how
        self._also = also
        self._timeout: asyncio.Timeout | None = None

    async def run(self) -> None:
        """Await it."""
        if self._how is not How.TIMEOUT:
            await self
            return
        async with asyncio.timeout(None) as self._timeout:
            await self

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._awaited.__await__()
        count, error = 0, None
        while True:
            try:
                yielded = inner.send(None) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value
            if count == self._at or (self.hit and self._how is How.TWICE):
                self._interrupt(yielded)
            count += 1
            error = None
            try:
                yield yielded
            except BaseException as exc:  # noqa: BLE001 - thrown on into the coroutine
                error = exc

    def _interrupt(self, yielded: Any) -> None:
        self.hit = True
        task = asyncio.current_task()
        assert task is not None
        if self._also is not None:
            self._also()
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        elif self._how is How.LATE and asyncio.isfuture(yielded):
            yielded.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()


class Scene:
    """A pair, and what else goes on while something of it is interrupted."""

    def __init__(self, pair: Pair) -> None:
        self.near, self.far = pair.near, pair.far
        self.left, self.right = pair.left, pair.right
        self.address = pair.address
        self._beside: list[asyncio.Future[Any]] = []

    def beside(self, other: Awaitable[Any], awaited: Awaitable[Any]) -> Awaitable[Any]:
        """Let the other side do its part."""
        self._beside.append(asyncio.ensure_future(other))
        return awaited

    async def end(self) -> None:
        """Stop what still goes on."""
        for future in self._beside:
            future.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)

    def region(self, access: AccessName) -> Region:
        """Memory of the far side."""
        return self.far.register(bytearray(len(LARGE)), access)

    def connect(self) -> Awaitable[Any]:
        """Another connection."""
        return self.near.connect(self.address)

    def released(self) -> Awaitable[Any]:
        """A message that is received, and its memory."""
        return self.beside(self.right.recv(1), self.left.send(1, LARGE).released())

    def close_region(self) -> Awaitable[Any]:
        """The end of memory that is written to."""
        region = self.region("write")
        put = self.left.put(LARGE, region.grant(self.right))
        return self.beside(put, region.close())

    def close(self, end: Communicator | Connection) -> Awaitable[Any]:
        """The end of what sends a message that is received."""
        received = self.right.recv(1)
        self.left.send(1, LARGE)
        return self.beside(received, end.close())


Call = Callable[[Scene], Awaitable[Any]]


async def interrupt(call: Call, at: int, how: How, *, death: bool) -> bool:
    """One case; False if the coroutine has no such suspension."""
    async with connected(close_timeout_s=0.5) as pair:
        scene = Scene(pair)
        peer_dies = pair.far.abort if death else None
        interrupted = Interrupted(call(scene), at, how, also=peer_dies)
        task = asyncio.create_task(interrupted.run())
        await asyncio.wait([task])
        if not interrupted.hit:
            task.result()
        with suppress(asyncio.CancelledError, KVWireError, TimeoutError, OSError):
            task.result()
        await scene.end()
        await expect_usable_or_closed(pair)
    for comm in (pair.near, pair.far):
        await until(lambda comm=comm: not inside.drivers(comm))  # type: ignore[misc]
        # Regions are still registered: their owner has not closed them.
        assert len(inside.buffers(comm)) == len(inside.links(comm).regions)
    return interrupted.hit


async def expect_usable_or_closed(pair: Pair) -> None:
    """Both directions carry a message, or both ends are over."""
    try:
        for sender, receiver in ((pair.left, pair.right), (pair.right, pair.left)):
            received = receiver.recv(77)
            await sender.send(77, b"alive")
            assert await received == b"alive"
    except ConnectionClosed:
        for end in (pair.left, pair.right):
            await end.wait_closed()


@each(
    "call",
    {
        "listen": lambda s: s.near.listen("localhost:0"),
        "connect": Scene.connect,
        "accept": lambda s: s.beside(s.connect(), s.far.accept()),
        "iterate": lambda s: s.beside(s.connect(), anext(s.far.connections())),
        "send": lambda s: s.beside(s.right.recv(1), s.left.send(1, LARGE)),
        "receive": lambda s: s.beside(s.left.send(1, LARGE), s.right.recv(1)),
        "receive into": lambda s: s.beside(
            s.left.send(1, b"small"), s.right.recv(1, bytearray(5))
        ),
        "put": lambda s: s.left.put(LARGE, s.region("write").grant(s.right)),
        "get": lambda s: s.left.get(
            s.region("read").grant(s.right), bytearray(len(LARGE))
        ),
        "released": Scene.released,
        "close a region": Scene.close_region,
        "close a connection": lambda s: s.close(s.left),
        "wait_closed": lambda s: s.beside(s.right.close(), s.left.wait_closed()),
        "close a communicator": lambda s: s.close(s.near),
    },
)
@pytest.mark.parametrize("how", [*How, None])
async def test_every_suspension(call: Call, how: How | None) -> None:
    """In every way, and the peer dies at the same moment."""
    for at in range(SUSPENSIONS_MAX):
        if not await interrupt(call, at, how or How.CANCEL, death=how is None):
            break
    else:
        pytest.fail("the sweep did not reach the end of the coroutine")


# --- scopes that cancel again and again, at every moment of a use: nothing stays ------


# Most uses take fewer. What waits for threads takes as many as a busy machine gives it.
TURNS_MAX = 2000


async def _announced(folder: Path) -> None:
    fleet, run = f"file:{folder}/fleet", f"{folder}/run"
    async with kvwire.open(directory=fleet, inspect=run) as comm:
        await comm.listen("127.0.0.1:0")
        comm.announce(role="decode")
        await until(lambda: any(folder.glob("fleet/*.json")))


async def _connected(_: Path) -> None:
    async with connected() as pair, pair.left, pair.right:
        await pair.left.send(1, b"x")
        await pair.right.recv(1)


async def _dialled(_: Path) -> None:
    async with communicators() as (a, b):
        peer = a.peer(str(await b.listen("127.0.0.1:0")))
        await peer.send(1, b"x")
        await (await b.accept()).recv(1)


async def _served(folder: Path) -> None:
    memory, disk = "memory:64KiB", f"disk:{folder}/kv?size=1MiB"
    async with (
        kvwire_store.BlockStore.open([memory, disk]) as store,
        kvwire_store.StoreServer(store, "127.0.0.1:0") as server,
        kvwire_store.BlockStore.open([memory, f"kvwire://{server.address}"]) as client,
    ):
        await client.flush()


async def _watched(folder: Path) -> None:
    directory = open_directory(f"file:{folder}/fleet?interval_s=0.001")
    try:
        await directory.announce(record(1))
        async for _ in directory.watch():
            break
        assert await directory.members()
    finally:
        await run_to_completion(directory.close())


@each(
    "use",
    {
        "announced": _announced,
        "connected": _connected,
        "dialled": _dialled,
        "served": _served,
        "watched": _watched,
    },
)
async def test_whatever_was_open_is_closed(
    use: Callable[[Path], Awaitable[None]], tmp_path: Path
) -> None:
    await use(tmp_path)
    before, tasks = open_descriptors(), asyncio.all_tasks()
    directory = open_directory(f"file:{tmp_path}/fleet")
    cancelled, turns = True, 0
    while cancelled and turns < TURNS_MAX:
        cancelled = await in_scope(turns, lambda: use(tmp_path))
        assert await directory.members() == ()
        turns += 1 + turns // 16
    assert turns > 10
    await until(lambda: asyncio.all_tasks() == tasks)
    assert open_descriptors() == before
    await use(tmp_path)
