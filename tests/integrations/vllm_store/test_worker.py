"""A worker and its store, on memory that looks like vLLM's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire.integrations.vllm_store.config import StoreSettings
from kvwire.integrations.vllm_store.lookup import Lookup, address_file
from kvwire.integrations.vllm_store.scheduler import NamedBlocks, StoreStep
from kvwire.integrations.vllm_store.worker import StoreWorker
from kvwire.kv.hashing import HashScheme
from tests.integrations.vllm.fakes import (
    BLOCK_TOKENS,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    NAMES,
    SHAPE,
)
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import eventually

HASHES = HashScheme(BLOCK_TOKENS).block_hashes(list(range(100, 112)))
FROM, INTO = [3, 1, 4], [9, 2, 6]


class Worker:
    """A worker and its memory."""

    def __init__(self, file: Path, **settings: Any) -> None:
        self.side = StoreWorker(StoreSettings(**settings), SHAPE, file)
        self.memory = np.zeros(
            (LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, 2 * DIM), np.float32
        )
        self.side.register(dict(zip(NAMES, self.memory, strict=True)))

    def save(self, *, hooks: bool = True) -> None:
        """One step that computes three blocks, and what it leaves."""
        named = NamedBlocks("p", HASHES, FROM)
        self.side.begin_step(StoreStep(saves=[named]))
        for layer, name in enumerate(NAMES):
            self.memory[layer, FROM] = self.values(layer)
            # One that is called for each half of a batch saves once.
            for _ in range(2 * hooks):
                self.side.layer_written(name)
        self.side.step_written()

    def load(self) -> None:
        """One step that begins to load them elsewhere."""
        self.side.begin_step(StoreStep(loads=[NamedBlocks("d", HASHES, INTO)]))
        self.side.start_loads()

    def freed(self) -> bool:
        """Whether the scheduler has heard that what was saved has drained."""
        self.side.begin_step(StoreStep(leaving={"p"}))
        return eventually(lambda: self.side.finished()[0] == {"p"})

    def loaded(self) -> bool:
        """Whether the scheduler has heard that the load is over."""
        return eventually(lambda: self.side.finished()[1] == {"d"})

    def holds(self) -> bool:
        return all((self.memory[n, INTO] == self.values(n)).all() for n in range(3))

    @staticmethod
    def values(layer: int) -> Any:
        shape = (3, HEADS, BLOCK_TOKENS, 2 * DIM)
        return np.arange(np.prod(shape)).reshape(shape) + 10_000 * layer


@contextmanager
def worker(folder: Path, **settings: Any) -> Iterator[Worker]:
    disk = f"disk:{folder}/{{rank}}?size=1MiB"
    made = Worker(folder / "a", **{"tiers": ["memory:1MiB", disk], **settings})
    try:
        yield made
    finally:
        made.side.close()


@pytest.mark.parametrize("parts", [1, 2, 3, 64])
@pytest.mark.parametrize("hooks", [True, False])
def test_another_worker_finds_what_one_has_saved(
    tmp_path: Path, parts: int, hooks: bool
) -> None:
    with worker(tmp_path, parts=parts) as first:
        first.save(hooks=hooks)
        assert len(first.side._saves["p"]) == min(parts, LAYERS)
        assert first.freed()
    with worker(tmp_path, parts=parts) as second:
        second.load()
        assert second.loaded()
        for name in NAMES:
            second.side.wait_layer(name)
        assert second.holds()
        second.side.finished()
        assert second.side.take_errors() == set()


@pytest.mark.parametrize("parts", [1, 3])
def test_blocks_that_are_not_there_are_told(tmp_path: Path, parts: int) -> None:
    with worker(tmp_path, parts=parts) as made:
        made.load()
        assert made.loaded()
        assert made.side.take_errors() == set(INTO)
        assert made.side.take_errors() == set()


def test_a_part_that_is_lost_is_told_in_the_step_that_reads_it(tmp_path: Path) -> None:
    with worker(tmp_path, parts=3) as made:
        made.save()
        assert made.freed()
        # It may have been evicted since the prompt was looked up.
        store, last = made.side._store, made.side._caches[2]
        made.side._engine.start(lambda _: store.delete_all(last)).result()
        made.load()
        assert made.loaded()
        for name in NAMES:
            made.side.wait_layer(name)
        made.side.finished()
        assert made.side.take_errors() == set(INTO)


def test_a_fence_returns_when_the_store_has_let_go(tmp_path: Path) -> None:
    with worker(tmp_path, parts=3) as made:
        made.save()
        made.side.fence(StoreStep(fenced={"p"}))
        made.memory[:, FROM] = -1  # vLLM gives the blocks to another request
        made.load()
        assert made.loaded()
        made.side.fence(StoreStep(fenced={"d"}))
        assert made.holds()


def test_one_that_ends_before_its_load_is_reported_when_all_of_it_is_over(
    tmp_path: Path,
) -> None:
    with worker(tmp_path, parts=3) as made:
        made.save()
        assert made.freed()
        made.load()
        made.side.fence(StoreStep(fenced={"d"}))
        assert made.loaded()
        assert made.holds()


def test_the_scheduler_asks_what_is_there(tmp_path: Path) -> None:
    with (
        worker(tmp_path, parts=2) as made,
        closing(Lookup([tmp_path / "a"], 60.0)) as lookup,
    ):
        assert lookup.begin(HASHES).result() == 0
        made.save()
        assert made.freed()
        assert lookup.begin([*HASHES, bytes(32)]).result() == 3
        assert lookup.begin([bytes(32), *HASHES]).result() == 0


def test_a_store_that_does_not_answer_has_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not there"):
        Lookup([tmp_path / "a"], 60.0)
    with worker(tmp_path):
        lookup = Lookup([tmp_path / "a"], 60.0)
    with closing(lookup):
        assert lookup.begin(HASHES).result() == 0


def test_the_address_is_in_a_directory_of_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = address_file("../an engine", 3)
    assert found.name == ".._an_engine-3.store"
    assert found.parent.stat().st_mode & 0o777 == 0o700
    found.parent.chmod(0o755)
    with pytest.raises(UsageError, match="this user alone"):
        address_file("e", 0)


def test_caches_on_a_gpu(tmp_path: Path) -> None:
    """Saved once the kernels before have run, loaded before the ones behind."""
    with closing(SimulatedDevice()) as device:
        side = StoreWorker(StoreSettings(), SHAPE, tmp_path / "a")
        shape = (BLOCKS, HEADS, BLOCK_TOKENS, 2 * DIM)
        arrays = [device.array(np.zeros(shape, np.float32)) for _ in NAMES]
        side.register(dict(zip(NAMES, arrays, strict=True)))
        compute, gate = device.stream(), threading.Event()
        device.set_current(compute)
        compute.call(lambda: void(gate.wait()))
        values = np.random.default_rng(1).random((LAYERS, *shape), np.float32)
        side.begin_step(StoreStep(saves=[NamedBlocks("p", HASHES, FROM)]))
        for array, written, name in zip(arrays, values, NAMES, strict=True):
            compute.call(partial(array.write, written))
            side.layer_written(name)
        side.step_written()
        side.begin_step(StoreStep(leaving={"p"}))
        assert not side.finished()[0]
        gate.set()
        assert eventually(lambda: side.finished()[0] == {"p"})
        side.begin_step(StoreStep(loads=[NamedBlocks("d", HASHES, INTO)]))
        side.start_loads()
        assert eventually(lambda: side.finished()[1] == {"d"})
        assert not side.take_errors()
        for array, written in zip(arrays, values, strict=True):
            assert (array.read()[INTO] == written[FROM]).all()
        compute.close()
        side.close()


def void(_: object) -> None:
    """For work whose result nobody wants."""
