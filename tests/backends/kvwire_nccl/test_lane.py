"""Lanes over communicators that hang, fail, abort late, or do their work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvwire.backend import Landing
from kvwire.backend.lane import LaneContext
from kvwire.errors import BackendUnavailable
from kvwire.types import MemoryKind, Role
from kvwire_nccl.lane import NcclBootstrap, NcclLane
from tests.backends.kvwire_nccl.fake import FakeLibrary, Faults
from tests.backends.recorders import LaneRecorder
from tests.support.pairs import turns, until


class Pair:
    """Both halves of a lane, over libraries whose faults the test chooses."""

    def __init__(self, **timeouts: float) -> None:
        self.faults = Faults(), Faults()
        self.notes = LaneRecorder(), LaneRecorder()
        libraries = [FakeLibrary(faults) for faults in self.faults]
        for library in libraries:
            library.start_timeout_s = timeouts.get("start", 20)
            library.move_timeout_s = timeouts.get("move", 30)
        self.client, self.server = (
            NcclLane(context(role), library)
            for role, library in zip((Role.CLIENT, Role.SERVER), libraries, strict=True)
        )

    async def join(self) -> None:
        await self.server.join(self.client.bootstrap, self.notes[1])
        await self.client.join(self.server.bootstrap, self.notes[0])

    def move(self, nbytes: int = 1000) -> bytearray:
        """A payload from the client to the server; where it goes."""
        into = bytearray(nbytes)
        descriptor = self.client.send(
            memoryview(bytes(range(250)) * (nbytes // 250)), 7
        )
        self.client.flush()
        self.server.receive(descriptor, Landing(nbytes, memoryview(into)))
        self.server.flush()
        return into

    async def end(self) -> None:
        self.client.abort()
        self.server.abort()
        await until(lambda: all(notes.closed for notes in self.notes))


def context(role: Role) -> LaneContext:
    return LaneContext(role=role, number=1, secret=bytes(32))


async def test_a_movement_that_hangs_ends_by_itself() -> None:
    """The receive that the peer never posts: NCCL would wait for ever."""
    pair = Pair(move=0.01)
    await pair.join()
    pair.client.send(memoryview(bytes(1000)), 7)
    pair.client.flush()
    await until(lambda: pair.notes[0].closed)
    (error,) = pair.notes[0].closed
    assert "moved nothing for 0.01 s" in str(error)
    assert not pair.notes[0].sent
    await pair.end()


@pytest.mark.parametrize("call", ["begin", "is_up", "move", "check"])
async def test_a_library_that_fails_ends_the_lane_with_its_reason(call: str) -> None:
    """Only once the communicator is aborted: until then it may touch memory."""
    pair = Pair()
    faults, notes = pair.faults[0], pair.notes[0]
    faults.failing = call
    faults.moves.clear()
    await pair.join()
    pair.move()
    await until(lambda: notes.closed)
    assert f"{call}: remote process exited" in str(notes.closed[0])
    assert faults.aborts
    assert not notes.sent
    await pair.end()


async def test_an_abort_that_fails_leaves_the_memory_in_quarantine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody is told that it is free, for nobody knows; the log says why."""
    pair = Pair()
    faults, notes = pair.faults[0], pair.notes[0]
    faults.failing = "abort"
    await pair.join()
    pair.client.abort()
    drivers: list[Any] = [pair.client._outbound, pair.client._inbound]
    await until(lambda: not any(driver._thread.is_alive() for driver in drivers))
    await turns(50)
    assert faults.aborts == 2
    assert not notes.closed
    assert "stays in quarantine" in caplog.text
    pair.server.abort()
    await until(lambda: pair.notes[1].closed)


def test_a_loop_that_is_gone_is_nobody_to_tell() -> None:
    """The threads end all the same, and take their communicators with them."""
    pairs: list[Pair] = []

    async def leave() -> None:
        pairs.append(Pair())
        await pairs[0].join()
        pairs[0].move()

    asyncio.run(leave())
    pairs[0].client.abort()
    pairs[0].server.abort()
    for lane in (pairs[0].client, pairs[0].server):
        drivers: list[Any] = [lane._outbound, lane._inbound]
        for driver in drivers:
            driver._thread.join(10)
            assert not driver._thread.is_alive()
    assert [faults.aborts for faults in pairs[0].faults] == [2, 2]


async def test_quarantine_until_the_abort_is_through() -> None:
    """The core holds the memory of all that is under way until lane_closed."""
    pair = Pair()
    faults, notes = pair.faults[0], pair.notes[0]
    faults.moves.clear()
    faults.abort.clear()
    await pair.join()
    pair.move()
    pair.client.abort()
    await until(lambda: faults.aborts == 2)
    await turns(50)
    assert not notes.closed
    assert pair.client.send(memoryview(b"late"), 8) == b""
    faults.abort.set()
    await until(lambda: notes.closed)
    assert not notes.sent
    await pair.end()


async def test_other_memory_ends_it_with_the_reason() -> None:
    """The core then takes the control link, where that is allowed."""
    pair = Pair()
    pair.client.memory_kinds = frozenset({MemoryKind.CUDA})
    await pair.join()
    pair.client.send(memoryview(b"host"), 7)
    await until(lambda: pair.notes[0].closed)
    error = pair.notes[0].closed[0]
    assert isinstance(error, BackendUnavailable)
    assert "it moves cuda memory only, and this is host" in str(error)
    pair.server.memory_kinds = frozenset({MemoryKind.CUDA})
    pair.server.receive(b"", Landing(4, memoryview(bytearray(4))))
    await until(lambda: pair.notes[1].closed)
    assert "this is host" in str(pair.notes[1].closed[0])


async def test_another_version_is_named_before_anything_begins() -> None:
    client = NcclLane(context(Role.CLIENT), FakeLibrary(version="NCCL 2.28.9"))
    server = NcclLane(context(Role.SERVER), FakeLibrary(version="NCCL 2.30.4"))
    with pytest.raises(BackendUnavailable, match=r"NCCL 2\.30\.4 .* 'NCCL 2\.28\.9'"):
        await server.join(client.bootstrap, LaneRecorder())
    assert threading.active_count() == 1


async def test_a_server_cannot_name_the_directions() -> None:
    client = NcclLane(context(Role.CLIENT), FakeLibrary())
    server = NcclLane(context(Role.SERVER), FakeLibrary())
    with pytest.raises(BackendUnavailable, match="names no directions"):
        await server.join(NcclBootstrap("fake 1").encode(), LaneRecorder())
    with pytest.raises(BackendUnavailable, match="the lane was aborted"):
        await server.join(client.bootstrap, LaneRecorder())


@pytest.fixture(autouse=True)
def _no_wire_is_left() -> Iterator[None]:
    from tests.backends.kvwire_nccl import fake

    yield
    fake._wires.clear()


def test_a_name_that_is_no_text() -> None:
    raw = NcclBootstrap("x", b"", b"").encode()[:-1] + b"\xff"
    with pytest.raises(BackendUnavailable, match="a name that is not text"):
        NcclBootstrap.decode(raw)
