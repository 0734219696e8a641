"""Lanes of two processes: payloads both ways, each way, and peers that end badly."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvwire.backend import Landing
from kvwire.errors import BackendUnavailable, ConnectionLost, UsageError
from kvwire.limits import MIB
from kvwire.testing.conformance.content import CUTS, Memory, pattern
from kvwire.testing.conformance.rig import open_descriptors
from kvwire.types import Role
from kvwire_local.backend import LocalBackend
from kvwire_local.lane import LocalLane
from kvwire_local.received_payloads import ReceivedPayloads
from kvwire_local.wire import LocalWire
from tests.backends.kvwire_local.child import Child, child, open_lane
from tests.backends.lane_recorder import LaneRecorder

# A child takes a third of a second to start.
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
# `auto` takes the first; each alone is part of the matrix.
METHODS = (
    "auto",
    pytest.param("cma", marks=pytest.mark.matrix),
    pytest.param("arena", marks=pytest.mark.matrix),
)


async def assert_all_arrive(there: Child, memories: list[Memory]) -> None:
    """Wait for all payloads that were queued here, and compare them."""
    there.lane.flush()
    await there.handler.moved(received=len(memories))
    assert there.handler.closed == []
    for number, memory in enumerate(memories):
        assert memory.differs_at(pattern(number, memory.nbytes)) is None
        assert memory.gaps_are_whole()


# --- payloads -------------------------------------------------------------------------


@pytest.mark.parametrize("way", METHODS)
async def test_payloads_come_from_another_process(way: str) -> None:
    async with child() as there:
        await there.join(way=way)
        assert there.lane.description == (
            "arena (asked for)" if way == "arena" else "cma"
        )
        memories = [
            await there.send_here(number, nbytes, cut=cut, arena=arena, land=land)
            for number, (nbytes, cut, arena, land) in enumerate(
                [
                    (1, "view", False, "view"),
                    (MIB, "view", False, "pages"),
                    (MIB + 1, "pages", False, "uneven"),
                    (300_000, "thousands", False, "thousands"),
                    (300_000, "uneven", False, "view"),
                    (2 * MIB, "view", True, "odd-pages"),
                    (16 * MIB, "odd-pages", False, "view"),
                ]
            )
        ]
        await assert_all_arrive(there, memories)
        assert (await there.ask("sent", count=7))["sent"] == list(range(7))
        assert there.lane.received_bytes == sum(memory.nbytes for memory in memories)


@one_loop
@pytest.mark.parametrize("way", METHODS)
async def test_payloads_go_to_another_process(way: str) -> None:
    async with child(way=way) as there:
        await there.join()
        for number, cut in enumerate(CUTS):
            answer = await there.send_there(number, MIB + number, cut)
            assert answer == {"received": True, "wrong": None}
        await there.handler.moved(sent=len(CUTS))
        assert there.handler.sent == list(range(len(CUTS)))


async def test_acknowledgements_wait_for_a_peer_that_is_busy() -> None:
    left, right = open_lane(Role.CLIENT), open_lane(Role.SERVER)
    handlers = LaneRecorder(), LaneRecorder()
    await right.join(left.bootstrap, handlers[1])
    await left.join(right.bootstrap, handlers[0])
    assert isinstance(left, LocalLane)
    assert isinstance(right, LocalLane)
    await right._rendezvous_task  # type: ignore[misc]
    loop, wires = left._loop, (left._wire, right._wire)
    assert wires[0] is not None
    assert wires[1] is not None
    loop.remove_reader(wires[0].fileno())
    payload, count, full = memoryview(bytearray(100)), 0, False
    while not full:
        right.receive(left.send(payload, count), Landing(100, None))
        right.flush()
        count += 1
        full = wires[1].has_unsaid
    loop.add_reader(wires[0].fileno(), left._run, left._readable)
    await handlers[0].moved(sent=count)
    assert handlers[0].sent == list(range(count))
    assert not wires[1].has_unsaid
    left.abort()
    right.abort()
    for handler in handlers:
        await handler.end()


# --- who may be read ------------------------------------------------------------------


@one_loop
async def test_where_the_kernel_refuses_arenas_are_used() -> None:
    async with child("hidden") as there:
        await there.join()
        described = {there.lane.description, there.description}
        assert "cma" in described
        (refused,) = described - {"cma"}
        assert refused.startswith("arena (EPERM: ")
        assert "ptrace_scope" in refused
        memories = [
            await there.send_here(number, MIB, cut="pages") for number in range(12)
        ]
        await assert_all_arrive(there, memories)
        for number in range(12):
            answer = await there.send_there(number, MIB, "uneven")
            assert answer == {"received": True, "wrong": None}


@one_loop
async def test_a_way_that_is_asked_for_and_refused_is_unavailable() -> None:
    async with child("hidden", way="cma") as there:
        with pytest.raises(BackendUnavailable, match="way=cma is asked for") as caught:
            await there.join(way="cma")
        assert "cannot read" in str(caught.value) or "EPERM" in str(caught.value)


def _abstract_names() -> list[bytes]:
    """Of this process: the table has those of all."""
    ours = set(open_descriptors().values())
    table = Path("/proc/net/unix").read_text().splitlines()
    rows = [line.split() for line in table if "@kvwire-" in line]
    return [
        b"\0" + name[1:].encode()
        for *_, inode, name in rows
        if f"socket:[{inode}]" in ours
    ]


@one_loop
async def test_who_does_not_know_the_secret_is_refused() -> None:
    left, right = open_lane(Role.CLIENT), open_lane(Role.SERVER)
    assert isinstance(left, LocalLane)
    handler = LaneRecorder()
    await right.join(left.bootstrap, handler)
    left._rendezvous._name = lambda: _abstract_names()[0]  # type: ignore[method-assign]
    left._rendezvous._secret = hashlib.sha256(b"another").digest()
    with pytest.raises(BackendUnavailable):
        await left.join(right.bootstrap, LaneRecorder())
    right.abort()
    await handler.end()


@one_loop
@pytest.mark.parametrize("setting", ["way", "tracer"])
async def test_settings_are_checked(setting: str) -> None:
    with pytest.raises(UsageError, match=f"local: {setting}='fast'; "):
        LocalBackend.check_settings({setting: "fast"})


# --- the end --------------------------------------------------------------------------


@pytest.mark.parametrize("way", METHODS)
async def test_a_peer_that_dies_ends_the_lane(way: str) -> None:
    async with child() as there:
        await there.join(way=way)
        memories = [
            await there.send_here(number, MIB, cut="pages") for number in range(8)
        ]
        there.process.kill()
        await there.process.wait()
        there.lane.flush()
        await there.handler.end()
        assert isinstance(there.handler.closed[0], ConnectionLost)
        for landing, memory in zip(there.handler.received, memories, strict=False):
            assert landing.payload is memory.payload
            assert memory.differs_at(pattern(memories.index(memory), MIB)) is None


@one_loop
@pytest.mark.parametrize("way", METHODS)
async def test_memory_that_is_reused_in_the_middle_is_noticed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race of the module's docstring, with each step where it hurts most."""
    async with child() as there:
        torn, landed = await _torn(there, way, monkeypatch)
        assert torn, "the payload was not overwritten in time, so nothing was shown"
        await there.handler.end()
        assert isinstance(there.handler.closed[0], ConnectionLost)
        assert landed == []


@one_loop
async def test_without_the_guard_the_same_payload_arrives_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the test before tests can fail."""
    hear = LocalWire.hear
    monkeypatch.setattr(
        LocalWire, "hear", lambda self, **how: (hear(self, **how)[0], True)
    )
    async with child() as there:
        torn, landed = await _torn(there, "cma", monkeypatch)
        assert torn
        assert len(landed) == 1


async def _torn(
    there: Child, way: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[bool, list[Landing]]:
    """Read half a payload; let the child abort and overwrite; read the other half."""
    await there.join(way=way)
    # Not in staging, where only the lane itself could overwrite it.
    memory = await there.send_here(0, 2 * MIB, arena=way != "cma", land="odd-pages")
    lane = there.lane
    assert isinstance(lane, LocalLane)
    read = ReceivedPayloads.read
    halves: list[int] = []

    def half(self: ReceivedPayloads) -> list[Landing]:
        halves.append(len(halves))
        if len(halves) > 1:
            return read(self)
        assert self._is_ready(self._arrivals[0])
        reading = self._arrivals[0].reading
        assert reading is not None
        reading.step(MIB)
        return []

    monkeypatch.setattr(ReceivedPayloads, "read", half)
    with monkeypatch.context() as deaf:
        # The event loop would tell of the end of the stream; a race would not wait.
        deaf.setattr(LocalLane, "_readable", lambda self: None)
        deaf.setattr(lane, "_go_on", lambda: None)
        lane._loop.remove_reader(lane._wire.fileno())  # type: ignore[union-attr]
        lane.flush()
        await there.ask("abort")
    lane.flush()
    torn = memory.differs_at(pattern(0, 2 * MIB)) is not None
    return torn, there.handler.received
