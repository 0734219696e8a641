"""Blocks that are overwritten while they are read: none is taken for good."""

from __future__ import annotations

import shutil
import signal
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from kvwire.backend import BlockRead
from kvwire.errors import ConnectionLost
from kvwire.memory import compiled
from kvwire.memory.compiled import compiled_function
from kvwire_local import blocks
from kvwire_local.blocks import MappedBlocks, ProcessBlocks
from tests.backends.kvwire_local.window_owner import (
    BLOCKS,
    LAYERS,
    RUN,
    BusyOwner,
    busy_owner,
    places,
)
from tests.backends.kvwire_local.window_rig import (
    column,
    need_compiled,
    without_compiled,
)
from tests.support.runs import ran
from tests.support.waiting import PATIENCE_S

# A child takes a third of a second to start.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
in_and_out = pytest.mark.parametrize(
    "in_arena", [True, False], ids=["mapped", "process"]
)
_SOURCE = compiled.LIBRARY.with_suffix(".c")


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def with_compiled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> bool:
    if request.param:
        need_compiled()
    else:
        without_compiled(monkeypatch)
    return bool(request.param)


class Readings:
    """Reads whatever blocks the owner has offered last, and checks each word."""

    def __init__(self, owner: BusyOwner) -> None:
        self.owner = owner
        self.landed = 0
        self.missing = 0
        self.torn = 0
        self._memory = np.zeros((LAYERS, BLOCKS, RUN // 8), np.uint64)
        self._expected = np.stack([places(layer) for layer in range(LAYERS)])
        memory = owner.memory
        ids = list(range(BLOCKS))
        self._batch = BlockRead(
            pieces_from=column([first for first, _ in memory.spans]),
            pieces_to=column([layer.ctypes.data for layer in self._memory]),
            run=RUN,
            offsets_from=column(ids) * np.uint64(RUN),
            offsets_to=column(ids) * np.uint64(RUN),
            entries=column(ids),
            generations=column(ids),
            per_block=1,
            owner=self._memory,
        )

    def get(self) -> None:
        """Read all blocks with the tickets of this moment."""
        tickets = np.array(self.owner.offered)
        landed = self.owner.reader.read(self._batch._replace(generations=tickets))
        assert isinstance(landed, np.ndarray)
        count = int(np.count_nonzero(landed))
        self.landed += count
        self.missing += BLOCKS - count
        found = self._memory[:, landed] - tickets[landed, np.newaxis]
        right = (found == self._expected[:, np.newaxis]).all(axis=(0, 2))
        self.torn += count - int(np.count_nonzero(right))

    def get_for_ever(self) -> None:
        """Read until that fails."""
        while True:
            self.get()


@in_and_out
@pytest.mark.parametrize(
    "gets", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
async def test_no_torn_block_is_taken(
    gets: int, in_arena: bool, with_compiled: bool, tmp_path: Path
) -> None:
    async with busy_owner(tmp_path, in_arena=in_arena) as owner:
        readings = Readings(owner)
        # Python takes several times as long.
        for _ in range(gets // BLOCKS // (1 if with_compiled else 10)):
            readings.get()
        while not (readings.landed and readings.missing):
            readings.get()
        assert readings.torn == 0


@in_and_out
async def test_without_the_second_look_torn_blocks_are_taken(
    in_arena: bool,
    with_compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above would find it within seconds."""
    plant(monkeypatch, tmp_path, with_compiled=with_compiled)
    async with busy_owner(tmp_path, in_arena=in_arena) as owner:
        readings = Readings(owner)
        end = time.monotonic() + PATIENCE_S
        while not readings.torn:
            assert time.monotonic() < end, vars(readings)
            readings.get()


def plant(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, with_compiled: bool
) -> None:
    """Leave the second look out."""
    if not with_compiled:

        def look(*_: object) -> None:
            pass

        monkeypatch.setattr(MappedBlocks, "_look_again", look)
        monkeypatch.setattr(ProcessBlocks, "_look_again", look)
        return
    named = sysconfig.get_config_var("CC") or "cc"
    compiler = shutil.which(named.split()[0]) or shutil.which("cc")
    if compiler is None or not _SOURCE.exists():
        pytest.skip("there is no compiler, or not the source of _copy.so")
    library = folder / "planted.so"
    flags = ("-O2", "-fPIC", "-shared", "-DKVWIRE_PLANTED")
    ran(compiler, *flags, "-o", library, _SOURCE, check=True)
    for name in ("mapped_compiled", "process_compiled"):
        function = getattr(blocks, name).held
        planted = compiled_function(
            function.__name__,
            *function.argtypes,
            result=function.restype,
            library=library,
        )
        assert planted is not None
        monkeypatch.setattr(blocks, name, planted)


@in_and_out
async def test_an_owner_that_is_stopped_while_it_writes(
    in_arena: bool, with_compiled: bool, tmp_path: Path
) -> None:
    """Nobody waits for it; the block that it was at is missing."""
    async with busy_owner(tmp_path, in_arena=in_arena) as owner:
        readings = Readings(owner)
        for _ in range(20):
            owner.signal(signal.SIGSTOP)
            for _ in range(20):
                readings.get()
            assert not owner.reader.owner_gone
            owner.signal(signal.SIGCONT)
            for _ in range(20):
                readings.get()
        assert readings.torn == 0
        assert readings.landed


@in_and_out
async def test_an_owner_that_is_killed_while_it_writes(
    in_arena: bool, with_compiled: bool, tmp_path: Path
) -> None:
    """Mapped, what it had offered is there for ever; other memory is gone."""
    async with busy_owner(tmp_path, in_arena=in_arena) as owner:
        readings = Readings(owner)
        for _ in range(200):
            readings.get()
        owner.signal(signal.SIGKILL)
        if in_arena:
            for _ in range(2000):
                readings.get()
            await owner.gone()
            landed = readings.landed
            readings.get()
            assert readings.landed > landed
        else:
            with pytest.raises(ConnectionLost, match="the window's owner has gone"):
                readings.get_for_ever()
        assert owner.reader.owner_gone
        assert readings.torn == 0
