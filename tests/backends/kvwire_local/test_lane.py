"""Lanes of two processes, who may read whom, and peers that end badly."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvwire
from kvwire.backend import Landing
from kvwire.errors import BackendUnavailable, ConnectionLost, UsageError
from kvwire.limits import MIB
from kvwire.memory.arena import Arena
from kvwire.types import Role
from kvwire_certify.conformance.content import CUTS, Memory, pattern
from kvwire_certify.conformance.rig import open_descriptors
from kvwire_local.backend import LocalBackend
from kvwire_local.lane import LocalLane
from kvwire_local.peer import PeerMemory
from kvwire_local.received_payloads import ReceivedPayloads
from kvwire_local.wire import LocalWire
from tests.backends.kvwire_local.halves import Halves, halves, open_lane
from tests.backends.recorders import LaneRecorder
from tests.support.child import GRANTED_BYTES, REPORT_TAG, Child, child, granted

# A child takes a third of a second to start.
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
# `auto` takes the first; each alone is part of the matrix.
METHODS = (
    "auto",
    pytest.param("cma", marks=pytest.mark.matrix),
    pytest.param("arena", marks=pytest.mark.matrix),
)


# --- another process ------------------------------------------------------------------


@asynccontextmanager
async def peer(way: str = "auto", *, hidden: bool = False) -> AsyncIterator[Child]:
    """A process that reads this one's memory, and is read."""
    async with (
        kvwire.open(require=("local",), backends={"local": {"way": way}}) as comm,
        child(comm, hidden=hidden) as there,
    ):
        assert there.connection.transport == "local"
        yield there


async def expect_both_are_read(there: Child) -> None:
    """Its memory by this process, and this one's by it."""
    back, other = bytearray(GRANTED_BYTES), os.urandom(GRANTED_BYTES)
    assert await there.connection.get(there.grant, back) == GRANTED_BYTES
    assert back == granted()
    assert await there.connection.put(other, there.grant) == GRANTED_BYTES
    assert await there.connection.get(there.grant, back) == GRANTED_BYTES
    assert back == other


@pytest.mark.parametrize("way", METHODS)
async def test_memory_of_another_process(way: str) -> None:
    async with peer(way) as there:
        said = "arena (asked for)" if way == "arena" else "cma"
        assert f"local: taken, {said}" in str(there.connection.transport_report)
        await expect_both_are_read(there)


@one_loop
async def test_where_the_kernel_refuses_arenas_are_used() -> None:
    async with peer(hidden=True) as there:
        reports = [
            str(there.connection.transport_report),
            (await there.connection.recv(REPORT_TAG)).decode(),
        ]
        (refused,) = [text for text in reports if "local: taken, cma" not in text]
        assert "local: taken, arena (EPERM: " in refused
        assert "ptrace_scope" in refused
        await expect_both_are_read(there)


@pytest.mark.parametrize("way", METHODS)
async def test_nothing_torn_is_taken_of_a_peer_that_dies(way: str) -> None:
    async with peer(way) as there:
        into = [bytearray(GRANTED_BYTES) for _ in range(4)]
        gets = [there.connection.get(there.grant, each) for each in into]
        await gets[0]
        there.signal(signal.SIGKILL)
        ends = await asyncio.gather(*gets, return_exceptions=True)
        for end, each in zip(ends, into, strict=True):
            assert isinstance(end, ConnectionLost) or each == granted()
        for request in gets:
            await request.released()


# --- both halves in this process ------------------------------------------------------


async def test_acknowledgements_wait_for_a_peer_that_is_busy() -> None:
    async with halves() as (client, server, at_client, _):
        loop, wires = client._loop, (client._wire, server._wire)
        assert wires[0] is not None
        assert wires[1] is not None
        loop.remove_reader(wires[0].fileno())
        payload, count, full = memoryview(bytearray(100)), 0, False
        while not full:
            server.receive(client.send(payload, count), Landing(100, None))
            server.flush()
            count += 1
            full = wires[1].has_unsent
        loop.add_reader(wires[0].fileno(), client._run, client._readable)
        await at_client.moved(sent=count)
        assert at_client.sent == list(range(count))
        assert not wires[1].has_unsent


async def test_a_way_that_is_asked_for_and_refused_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PeerMemory, "refusal", lambda self: "EPERM: not by this one")
    with pytest.raises(BackendUnavailable, match=r"way=cma is configured, but .*EPERM"):
        async with halves("cma"):
            pass


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


# --- memory that is reused while it is read -------------------------------------------


@one_loop
@pytest.mark.parametrize("way", METHODS)
async def test_memory_that_is_reused_in_the_middle_is_noticed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race of the module's docstring, with each step where it hurts most."""
    async with halves(way) as both:
        assert await _torn(both, monkeypatch), "it was not overwritten in time"
        assert isinstance(await both.at_client.end(), ConnectionLost)
        assert both.at_client.received == []


@one_loop
async def test_without_the_guard_the_same_payload_arrives_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the test before tests can fail."""
    receive = LocalWire.receive
    monkeypatch.setattr(
        LocalWire, "receive", lambda self, **how: (receive(self, **how)[0], True)
    )
    async with halves("cma") as both:
        assert await _torn(both, monkeypatch)
        assert len(both.at_client.received) == 1


async def _torn(both: Halves, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Read half a payload; let its owner abort and overwrite; read the other half."""
    reader, sender = both.client, both.server
    target = Memory(2 * MIB, CUTS["odd-pages"])
    read = ReceivedPayloads.read
    halves_read: list[int] = []

    def half(self: ReceivedPayloads) -> list[Landing]:
        if self is not reader._incoming or halves_read:
            return read(self)
        halves_read.append(1)
        assert self._is_ready(self._arrivals[0])
        reading = self._arrivals[0].reading
        assert reading is not None
        reading.step(MIB)
        return []

    monkeypatch.setattr(ReceivedPayloads, "read", half)
    # Not in staging, where only the lane itself could overwrite it.
    with Arena(2 * MIB) as arena:
        memory = arena.buffer(2 * MIB)
        memory[:] = pattern(0, 2 * MIB)
        descriptor = sender.send(memory.data, "token")
        assert reader._peer_is_there()  # and has told of its arena
        reader.receive(descriptor, Landing(2 * MIB, target.payload))
        with monkeypatch.context() as deaf:
            # The event loop would tell of the end of the stream; a race does not wait.
            deaf.setattr(LocalLane, "_readable", lambda self: None)
            deaf.setattr(reader, "_go_on", lambda: None)
            assert reader._wire is not None
            reader._loop.remove_reader(reader._wire.fileno())
            reader.flush()
            sender.abort()
            await both.at_server.end()
            memory[:] = 0xEE
        del memory
        reader.flush()
        return target.differs_at(pattern(0, 2 * MIB)) is not None
