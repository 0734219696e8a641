"""Reading blocks of any shape, in any number, of which some are stale or not there."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.backend import BlockRead, WindowMemory
from kvwire.errors import BackendUnavailable, ConnectionLost
from kvwire.limits import KIB, MIB
from kvwire.memory.arena import Arena, SharedMapping
from kvwire.memory.generations import Generations
from kvwire_local import blocks
from kvwire_local.blocks import MappedBlocks, ProcessBlocks
from kvwire_local.peer import PeerMemory
from kvwire_local.wire import PeerProcess
from tests.backends.kvwire_local.window_rig import (
    Bytes,
    address,
    column,
)
from tests.support.compiled import need_compiled, without_compiled

COOKIE = bytearray(b"0123456789abcdef")
_COOKIE_PLACE = ctypes.addressof(ctypes.c_char.from_buffer(COOKIE))
Opener = Callable[[WindowMemory, list[Arena]], MappedBlocks | ProcessBlocks]


@pytest.fixture(params=[True, False], ids=["compiled", "python"], autouse=True)
def _compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            need_compiled()
        else:
            without_compiled(patch)
        yield


def mapped(memory: WindowMemory, arenas: list[Arena]) -> MappedBlocks | ProcessBlocks:
    """This process's arenas, as a peer would have mapped them."""
    found = []
    for arena in arenas:
        nbytes = os.fstat(arena.fileno()).st_size
        mapping = SharedMapping(arena.fileno(), nbytes, writable=False)
        found.append((arena.address, mapping))
    return MappedBlocks(memory, found, os.getpid())


def myself(pid: int | None = None) -> PeerMemory:
    who = PeerProcess(os.getpid() if pid is None else pid, os.geteuid())
    return PeerMemory(who, _COOKIE_PLACE, bytes(COOKIE))


def by_system_call(
    memory: WindowMemory, arenas: list[Arena]
) -> MappedBlocks | ProcessBlocks:
    return ProcessBlocks(memory, myself())


both_ways = pytest.mark.parametrize("opener", [mapped, by_system_call])


# --- any shape ------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A cache of some tensors, each with pieces of a granule at some distance.

    Attributes:
        tensors: How many.
        pieces: Of a granule, in each tensor.
        run: Bytes of a piece.
        gap: Bytes between pieces; with none, they are side by side.
        per_block: Granules of a block.
        blocks: How many there are.
    """

    tensors: int
    pieces: int
    run: int
    gap: int
    per_block: int
    blocks: int

    @property
    def granule(self) -> int:
        return self.pieces * (self.run + self.gap)

    @property
    def nbytes(self) -> int:
        return self.granule * self.per_block * self.blocks

    def places(self, firsts: list[int]) -> npt.NDArray[np.uint64]:
        steps = np.arange(self.pieces, dtype=np.uint64) * np.uint64(self.run + self.gap)
        return np.concatenate([np.uint64(first) + steps for first in firsts])


SHAPES = st.builds(
    Shape,
    tensors=st.integers(1, 3),
    pieces=st.integers(1, 40),
    run=st.sampled_from([1, 7, 64, 100, 1024]),
    gap=st.sampled_from([0, 0, 24]),
    per_block=st.integers(1, 5),
    blocks=st.integers(1, 30),
)


@dataclass(frozen=True)
class Wish:
    """What is asked for: blocks, the granules of the last one, and which are stale."""

    ids: list[int]
    cut: int
    stale: list[bool]


@st.composite
def wishes(draw: st.DrawFn) -> tuple[Shape, Wish]:
    shape = draw(SHAPES)
    everything = list(range(shape.blocks))
    ids = draw(st.permutations(everything))[: draw(st.integers(0, shape.blocks))]
    cut = draw(st.integers(0, shape.per_block - 1)) if ids else 0
    stale = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return shape, Wish(ids, cut, stale)


@both_ways
@given(wishes())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape(opener: Opener, case: tuple[Shape, Wish]) -> None:
    """What has landed is right, what is stale is missing, nothing else is written."""
    expect_right(opener, *case)


@both_ways
@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (Shape(3, 40, 100, 24, 10, 4), 4),  # 1,200 pieces of one block
        (Shape(2, 1, 8, 8, 1, 1500), 1500),  # more generations than iovecs
        (Shape(2, 2, 256 * KIB, 64, 1, 12), 12),  # past the caches
        (Shape(1, 1, 3 * MIB, 0, 1, 4), 4),
    ],
)
def test_many_and_large_pieces(opener: Opener, shape: Shape, count: int) -> None:
    ids = np.random.default_rng(1).permutation(shape.blocks)[:count].tolist()
    expect_right(opener, shape, Wish(ids, 0, [i % 3 == 1 for i in range(count)]))


def expect_right(opener: Opener, shape: Shape, wish: Wish) -> None:
    rng = np.random.default_rng(7)
    arena = Arena(shape.tensors * (shape.nbytes + 64))
    theirs: list[Bytes] = [
        arena.numpy(shape.nbytes, np.uint8) for _ in range(shape.tensors)
    ]
    for tensor in theirs:
        tensor[:] = rng.integers(0, 256, tensor.size, np.uint8)
    mine = [np.zeros(shape.nbytes, np.uint8) for _ in theirs]
    table = Generations(shape.blocks)
    ids = np.array(wish.ids, np.int64)
    stale = np.array(wish.stale, np.bool_)
    tickets = table.current(ids)
    table.renew(ids[stale])
    memory = WindowMemory(
        spans=tuple((address(tensor), tensor.nbytes) for tensor in theirs),
        table=(table.address, table.nbytes),
    )
    # Block `i` of those asked for goes to place `i`.
    count = max(0, ids.size * shape.per_block - wish.cut)
    inner = np.arange(ids.size * shape.per_block)[:count] % shape.per_block
    granules = np.repeat(ids, shape.per_block)[:count] * shape.per_block + inner
    assert table.arena is not None
    found = opener(memory, [arena, table.arena])
    landed = found.read(
        BlockRead(
            pieces_from=shape.places([address(tensor) for tensor in theirs]),
            pieces_to=shape.places([address(tensor) for tensor in mine]),
            run=shape.run,
            offsets_from=granules.astype(np.uint64) * np.uint64(shape.granule),
            offsets_to=np.arange(count, dtype=np.uint64) * np.uint64(shape.granule),
            entries=ids.astype(np.uint64),
            generations=tickets,
            per_block=shape.per_block,
            owner=mine,
        )
    )
    assert landed.dtype == np.bool_
    assert np.array_equal(landed, ~stale)
    for its, my in zip(theirs, mine, strict=True):
        rows = (-1, shape.pieces, shape.run + shape.gap)
        pieces = its.reshape(rows)[granules, :, : shape.run]
        got = my.reshape(rows)[:count]
        good = np.repeat(landed, shape.per_block)[:count]
        assert np.array_equal(got[good, :, : shape.run], pieces[good])
        assert not got[:, :, shape.run :].any()
        assert not my.reshape(rows)[count:].any()
    found.close()
    del theirs, its, tensor, pieces
    table.close()
    arena.close()


# --- memory that is not there ---------------------------------------------------------


def test_blocks_in_memory_that_has_gone_are_missing() -> None:
    """The others are there, as long as the process is."""
    page = mmap.PAGESIZE
    table = Generations(8)
    memory = mmap.mmap(-1, 8 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = address(np.frombuffer(memory, np.uint8))
    memory[:] = b"".join(bytes([65 + block]) * page for block in range(8))
    found = ProcessBlocks(
        WindowMemory(spans=((first, 8 * page),), table=(table.address, table.nbytes)),
        myself(),
    )
    assert (
        ctypes.CDLL(None).mprotect(
            ctypes.c_void_p(first + 3 * page), ctypes.c_size_t(2 * page), 0
        )
        == 0
    )
    mine = np.zeros((8, page), np.uint8)
    ids = np.array([1, 3, 7, 4, 0])
    read = BlockRead(
        pieces_from=column([first]),
        pieces_to=column([address(mine)]),
        run=page,
        offsets_from=column(ids.tolist()) * np.uint64(page),
        offsets_to=column(ids.tolist()) * np.uint64(page),
        entries=column(ids.tolist()),
        generations=table.current(ids),
        per_block=1,
        owner=mine,
    )
    assert found.read(read).tolist() == [True, False, True, False, True]
    assert [chr(row[0]) for row in mine[[1, 7, 0]]] == ["B", "H", "A"]
    # The table, too: then nothing is known of any block.
    table_page = table.address & -page
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(table_page), ctypes.c_size_t(page), 0) == 0
    assert not found.read(read).any()
    access = mmap.PROT_READ | mmap.PROT_WRITE
    for place, pages in ((table_page, 1), (first + 3 * page, 2)):
        size = ctypes.c_size_t(pages * page)
        assert libc.mprotect(ctypes.c_void_p(place), size, access) == 0
    assert found.read(read).all()
    table.close()


def test_a_process_that_has_the_number_of_another() -> None:
    """It has no such cookie, or no such memory at all."""
    table = Generations(1)
    mine = np.zeros(64, np.uint8)
    theirs = np.arange(64, dtype=np.uint8)
    memory = WindowMemory(
        spans=((address(theirs), 64),), table=(table.address, table.nbytes)
    )
    read = BlockRead(
        pieces_from=column([address(theirs)]),
        pieces_to=column([address(mine)]),
        run=64,
        offsets_from=column([0]),
        offsets_to=column([0]),
        entries=column([0]),
        generations=table.current(np.array([0])),
        per_block=1,
        owner=mine,
    )
    peer = myself()
    found = ProcessBlocks(memory, peer)
    assert found.read(read).all()
    COOKIE[0] ^= 1
    try:
        with pytest.raises(ConnectionLost, match="owner has ended: ESRCH"):
            found.read(read)
        with pytest.raises(BackendUnavailable, match="is another process here"):
            ProcessBlocks(memory, peer)
    finally:
        COOKIE[0] ^= 1
    table.close()


def test_a_mapped_window_knows_when_its_owner_has_ended() -> None:
    """What the owner had offered is there for ever, so only its process says so."""
    memory = WindowMemory(spans=(), table=((table := Generations(1)).address, 8))
    assert table.arena is not None
    mapping = SharedMapping(table.arena.fileno(), mmap.PAGESIZE, writable=False)
    with subprocess.Popen(["sleep", "60"]) as owner:
        arenas = [(table.arena.address, mapping)]
        window = MappedBlocks(memory, arenas, owner.pid)
        assert not window.owner_gone
        owner.kill()
    gone = MappedBlocks(memory, arenas, 0)
    assert (window.owner_gone, gone.owner_gone) == (True, False)
    window.close()
    table.close()


# --- the GIL --------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize(("nbytes", "released"), [(512 * KIB, False), (MIB, True)])
def test_only_long_reads_let_go_of_the_gil(
    opener: Opener, nbytes: int, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time may cost the switch interval of another thread."""
    name = "mapped_compiled" if opener is mapped else "process_compiled"
    real = getattr(blocks, name)
    if real is None:
        pytest.skip("nothing is compiled here")
    calls: list[bool] = []

    def counted(index: int) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            calls.append(bool(index))
            return real[index](*arguments)

        return call

    monkeypatch.setattr(blocks, name, (counted(0), counted(1)))
    expect_right(opener, Shape(1, 1, nbytes, 0, 1, 1), Wish([0], 0, [False]))
    assert calls == [released]
