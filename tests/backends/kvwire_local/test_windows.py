"""Windows over a lane: what is read and what is refused, mapped and by system call."""

from __future__ import annotations

import asyncio
import gc
import os
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvwire.backend import Landing, WindowMemory, WindowReader
from kvwire.errors import BackendUnavailable, ConnectionLost, ProtocolError
from kvwire.limits import KIB, MIB
from kvwire.memory.arena import Arena
from kvwire.types import OneSidedWindows, Role
from kvwire_local.descriptor import PlaceKind, decode
from kvwire_local.wire import (
    ARENAS_MAX,
    WINDOWS_MAX,
    LocalMessageType,
    LocalWire,
    PeerProcess,
)
from tests.backends.kvwire_local.halves import Halves, halves, open_lane
from tests.backends.kvwire_local.window_rig import (
    OwnersCache,
    ReadersCache,
    tickets,
)
from tests.backends.recorders import LaneRecorder
from tests.support import inside
from tests.support.compiled import need_compiled, without_compiled
from tests.support.pairs import until

WAYS = {"mapped": True, "process_vm_readv": False}


@pytest.fixture(params=[True, False], ids=["compiled", "python"], autouse=True)
def _compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        need_compiled()
    else:
        without_compiled(monkeypatch)


@pytest.fixture(params=WAYS)
def owner(request: pytest.FixtureRequest) -> Iterator[OwnersCache]:
    cache = OwnersCache(3, 20, 4 * KIB, in_arena=WAYS[request.param])
    yield cache
    cache.close()


@pytest.fixture
def in_arena() -> Iterator[OwnersCache]:
    cache = OwnersCache(3, 20, 4 * KIB, in_arena=True)
    yield cache
    cache.close()


async def opened(both: Halves, owner: OwnersCache) -> WindowReader:
    """The client's reader of a window of the server."""
    description = both.server.expose(owner.memory)
    reader = both.client.window(description, owner.memory)
    await reader.ready()
    return reader


def expect_landed(reader: WindowReader, owner: OwnersCache, ids: list[int]) -> None:
    cache = ReadersCache(owner)
    landed = reader.read(cache.batch(ids, tickets(owner, ids), ids))
    assert not isinstance(landed, asyncio.Future)
    assert landed.all()
    assert all(cache.has(owner, block, block) for block in ids)


async def test_ids_and_addresses_beyond_the_window_do_not_land(
    owner: OwnersCache,
) -> None:
    """Whatever the ticket says, its block is missing, and the others are not."""
    async with halves() as both:
        reader = await opened(both, owner)
        cache = ReadersCache(owner)
        ids = [2, 7, 5]
        good = tickets(owner, ids)
        run = cache.run
        for entry, offset in (
            (20, 0),
            (2**64 - 1, 0),
            (2**61, 0),
            (7, 20 * run),  # the block behind the last
            (7, 2**64 - 1),  # one byte before the first
            (7, 19 * run + 1),
            (7, 2**63),
        ):
            batch = cache.batch(ids, good, ids)
            batch.entries[1] = entry
            batch.offsets_from[1] = offset
            landed = reader.read(batch)
            assert list(landed) == [True, False, True], (entry, offset)
            assert not any(layer[7].any() for layer in cache.layers)
        reader.close()


async def test_a_tensor_that_no_arena_has_is_refused(in_arena: OwnersCache) -> None:
    """Nor one that begins in the arena, and ends behind it."""
    async with halves() as both:
        description = both.server.expose(in_arena.memory)
        await (reader := both.client.window(description, in_arena.memory)).ready()
        reader.close()
        assert in_arena.arena is not None
        mapped_bytes = in_arena.arena.nbytes + 4 * KIB
        first = in_arena.arena.address
        for span in ((first + 64, mapped_bytes), (first - 64, 128), (4096, 64)):
            forged = WindowMemory(spans=(span,), table=in_arena.memory.table)
            with pytest.raises(BackendUnavailable, match="in no arena that the peer"):
                both.client.window(description, forged)
        for table in ((first - 8, 64), (first + mapped_bytes - 8, 16)):
            forged = WindowMemory(spans=in_arena.memory.spans, table=table)
            with pytest.raises(BackendUnavailable, match="in no arena that the peer"):
                both.client.window(description, forged)


@pytest.mark.parametrize(
    ("spans", "table", "said"),
    [
        (((4096, 0),), (4096, 8), "no exposed memory contains 0 bytes at 0x1000"),
        (((2**63, 1),), (4096, 8), "no exposed memory contains 1 bytes"),
        (((4096, 2**64),), (4096, 8), "no exposed memory contains"),
        (((-4096, 64),), (4096, 8), "no exposed memory contains"),
        (((4096, 64),), (4097, 8), "generations must be aligned 8-byte numbers"),
        (((4096, 64),), (4096, 12), "generations must be aligned 8-byte numbers"),
        (((4096, 64),), (4096, 0), "no exposed memory contains 0 bytes"),
    ],
)
async def test_memory_that_no_process_has_is_refused(
    owner: OwnersCache,
    spans: tuple[tuple[int, int], ...],
    table: tuple[int, int],
    said: str,
) -> None:
    async with halves() as both:
        description = both.server.expose(owner.memory)
        await (reader := both.client.window(description, owner.memory)).ready()
        reader.close()
        if spans == ((4096, 64),) and owner.arena is not None:
            spans = owner.memory.spans
        with pytest.raises(ProtocolError, match=said):
            both.client.window(description, WindowMemory(spans=spans, table=table))


async def test_a_description_is_a_number(owner: OwnersCache) -> None:
    async with halves() as both:
        for description in (b"", b"123", b"12345"):
            with pytest.raises(ProtocolError, match="bytes are not a window number"):
                both.client.window(description, owner.memory)


async def test_a_window_is_concealed(owner: OwnersCache) -> None:
    """Its readers end, waiting ones too, and nobody opens it again."""
    async with halves() as both:
        reader = await opened(both, owner)
        description = both.server.expose(owner.memory)
        assert both.server.expose(owner.memory) == description
        second = both.client.window(description, owner.memory)
        await second.ready()
        both.server.conceal(owner.memory)
        both.server.conceal(owner.memory)
        # Exposed again, it is another window, whose record comes behind.
        third = await opened(both, owner)
        cache = ReadersCache(owner)
        batch = cache.batch([1], tickets(owner, [1]), [1])
        for ended in (reader, second):
            with pytest.raises(ConnectionLost, match="has concealed the window"):
                ended.read(batch)
        with pytest.raises(BackendUnavailable, match="has concealed the window"):
            both.client.window(description, owner.memory)
        expect_landed(third, owner, [5])
        third.close()


async def test_a_lane_that_this_side_ends_does_not_say_that_the_owner_left(
    owner: OwnersCache,
) -> None:
    async with halves() as both:
        reader = await opened(both, owner)
        waiting = both.client.window(struct.pack("<I", 7), owner.memory)
        both.client.abort()
        assert not reader.owner_gone
        with pytest.raises(ConnectionLost, match="the window's lane has ended"):
            await waiting.ready()
        for ended in (both.client, both.server):
            with pytest.raises(BackendUnavailable, match="the lane has ended"):
                both.client.window(bytes(4), owner.memory)
            with pytest.raises(BackendUnavailable, match="the lane has ended"):
                both.client.expose(owner.memory)
            ended.conceal(owner.memory)
        reader.close()


async def test_windows_exposed_before_the_lane_is_up(owner: OwnersCache) -> None:
    """They are announced when it is; one that was concealed meanwhile is refused."""
    client, server = open_lane(Role.CLIENT), open_lane(Role.SERVER)
    await server.join(client.bootstrap, LaneRecorder())
    other = OwnersCache(1, 2, KIB, in_arena=True)
    gone = server.expose(other.memory)
    description = server.expose(owner.memory)
    server.conceal(other.memory)
    other.close()
    await client.join(server.bootstrap, LaneRecorder())
    reader = client.window(description, owner.memory)
    await reader.ready()
    expect_landed(reader, owner, [9])
    with pytest.raises(BackendUnavailable, match="has concealed the window"):
        client.window(gone, other.memory)
    reader.close()
    client.abort()
    server.abort()


# --- who may read ---------------------------------------------------------------------


async def test_windows_that_are_off(owner: OwnersCache) -> None:
    async with halves(windows="off") as both:
        with pytest.raises(BackendUnavailable, match='one_sided_windows="off"'):
            both.server.expose(owner.memory)
        with pytest.raises(BackendUnavailable, match='one_sided_windows="off"'):
            both.client.window(bytes(4), owner.memory)


@pytest.mark.parametrize(
    ("windows", "uid", "reads"),
    [
        ("user", None, True),
        ("user", 4321, False),
        ("user", 65534, False),
        ("peers", 4321, True),
    ],
)
async def test_the_user_of_the_peer_counts(
    owner: OwnersCache,
    windows: OneSidedWindows,
    uid: int | None,
    reads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the kernel names him; both sides ask."""
    me = os.geteuid()
    who = PeerProcess(os.getpid(), me if uid is None else uid)
    monkeypatch.setattr("kvwire_local.rendezvous.peer_process", lambda _: who)
    if uid == 65534:  # as this process would be in a namespace that knows no user
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    async with halves(windows=windows) as both:
        if reads:
            reader = await opened(both, owner)
            expect_landed(reader, owner, [1])
            reader.close()
            return
        with pytest.raises(BackendUnavailable, match=f"belongs to user {uid}, this"):
            both.server.expose(owner.memory)
        # A peer that exposes it all the same is not read.
        record = struct.pack("<II", 0, 2)
        wire_of(both).send(LocalMessageType.WINDOW, record)
        with pytest.raises(BackendUnavailable, match=f"belongs to user {uid}, this"):
            await both.client.window(struct.pack("<I", 0), owner.memory).ready()


@pytest.mark.parametrize(("way", "taken"), [("cma", "process_vm_readv"), ("arena", "")])
async def test_the_way_of_the_reader_is_respected(way: str, taken: str) -> None:
    """Arenas alone: memory elsewhere is refused. Memory alone: arenas are read so."""
    async with halves(way) as both:
        ordinary = OwnersCache(2, 4, KIB, in_arena=False)
        if taken:
            reader = await opened(both, ordinary)
            reader.close()
        else:
            with pytest.raises(BackendUnavailable, match="put the cache into an Arena"):
                both.server.expose(ordinary.memory)
        shared = OwnersCache(2, 4, KIB, in_arena=True)
        reader = await opened(both, shared)
        assert reader.way == (taken or "mapped")
        expect_landed(reader, shared, [3])
        reader.close()
        shared.close()
        ordinary.close()


async def test_a_lane_has_so_many_windows(in_arena: OwnersCache) -> None:
    async with halves() as both:
        (first, nbytes), *_ = in_arena.memory.spans
        windows = [
            WindowMemory(spans=((first + i, nbytes - i),), table=in_arena.memory.table)
            for i in range(WINDOWS_MAX + 1)
        ]
        for memory in windows[:-1]:
            both.server.expose(memory)
        with pytest.raises(BackendUnavailable, match="256 windows at most"):
            both.server.expose(windows[-1])
        both.server.conceal(windows[7])
        reader = both.client.window(both.server.expose(windows[-1]), windows[-1])
        await reader.ready()
        reader.close()


# --- a peer that lies -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (LocalMessageType.WINDOW, b""),
        (LocalMessageType.WINDOW, struct.pack("<II", 1, 2)),  # not the next number
        (LocalMessageType.WINDOW, struct.pack("<II", 0, 4)),  # of no kind
        (LocalMessageType.CONCEALED, struct.pack("<I", 0)),
        (LocalMessageType.CONCEALED, b"0"),
    ],
)
async def test_false_records_end_the_lane(kind: LocalMessageType, body: bytes) -> None:
    async with halves() as both:
        wire_of(both).send(kind, body)
        assert isinstance(await both.at_client.end(), ProtocolError)


@pytest.mark.parametrize("body", [struct.pack("<IIQ", 5, 0, 4096), b"123"])
async def test_arenas_that_were_never_shared(body: bytes) -> None:
    """The reader that waited has the error, and so has one that comes later."""
    cache = OwnersCache(1, 2, KIB, in_arena=True)
    async with halves() as both:
        waiting = both.client.window(bytes(4), cache.memory)
        assert not waiting.immediate
        wire_of(both).send(LocalMessageType.WINDOW, struct.pack("<II", 0, 1) + body)
        with pytest.raises(ProtocolError, match="arena"):
            await waiting.ready()
        with pytest.raises(ProtocolError, match="arena"):
            both.client.window(bytes(4), cache.memory)
    cache.close()


def wire_of(both: Halves) -> LocalWire:
    """The server's socket, on which a test says what no lane would."""
    wire = both.server._wire
    assert wire is not None
    return wire


@pytest.fixture
def mapped() -> Callable[[], int]:
    """How many arenas of payloads or windows a peer in this test has mapped."""

    def count() -> int:
        return inside.mapped("kvwire") + inside.mapped("kvwire-generations")

    gc.collect()
    before = count()
    return lambda: count() - before


async def test_an_arena_is_shared_once_for_payloads_and_windows(
    in_arena: OwnersCache, mapped: Callable[[], int]
) -> None:
    async with halves() as both:
        assert in_arena.arena is not None
        numbers = struct.unpack("<I", both.server.expose(in_arena.memory))
        assert numbers == (0,)
        payload = in_arena.layers[0].reshape(-1).data
        described = decode(both.server.send(payload, "token"), payload.nbytes)
        assert described.kind is PlaceKind.ARENA
        assert described.arena in (0, 1)  # as for the window: its memory and table
        await until(lambda: mapped() == 2)


async def test_arenas_are_unmapped_with_their_last_window(
    owner: OwnersCache, mapped: Callable[[], int]
) -> None:
    """As often as a window is closed and exposed again."""
    arenas = 2 if owner.arena is not None else 0
    async with halves("arena" if arenas else "auto") as both:
        for _ in range(ARENAS_MAX + 1):
            reader = await opened(both, owner)
            expect_landed(reader, owner, [1])
            assert mapped() == arenas
            reader.close()
            del reader
            both.server.conceal(owner.memory)
            await until(lambda: not mapped())


async def test_an_arena_with_payload_is_unmapped_when_it_is_closed(
    mapped: Callable[[], int],
) -> None:
    """Also if nothing else happens on the lane."""
    async with halves("arena") as both:
        with Arena(MIB) as arena:
            memory = arena.buffer(MIB)
            target = np.zeros_like(memory)
            descriptor = both.server.send(memory.data, "token")
            both.client.receive(descriptor, Landing(MIB, target.data))
            both.client.flush()
            await both.at_server.moved(sent=1)
            assert mapped() == 1
            del memory
        await until(lambda: not mapped())
