"""A worker and its store, on memory that looks like vLLM's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.hashing import HashScheme
from kvwire_store import BlockStore
from kvwire_vllm.store.config import StoreSettings
from kvwire_vllm.store.lookup import Lookup, address_file
from kvwire_vllm.store.scheduler import (
    NamedBlocks,
    StoreStep,
)
from kvwire_vllm.store.worker import StoreWorker
from packages.vllm.tests.support.fakes import (
    BLOCK_TOKENS,
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    NAMES,
    SHAPE,
)
from packages.vllm.tests.support.store_server import StoreServer
from tests.support.simulated_device import SimulatedDevice
from tests.support.waiting import eventually

HASHES = HashScheme(BLOCK_TOKENS).block_hashes(list(range(100, 112)))
FROM, INTO = [3, 1, 4], [9, 2, 6]


class Worker:
    """A worker and its memory."""

    def __init__(self, file: Path, **settings: Any) -> None:
        self.side = StoreWorker(StoreSettings(**settings), [SHAPE], file)
        self.memory = np.zeros(
            (LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, 2 * DIM), np.float32
        )
        self.side.register(dict(zip(NAMES, self.memory, strict=True)))

    def save(self) -> None:
        """One step that computes three blocks, and what it leaves."""
        named = NamedBlocks("p", HASHES, FROM)
        self.side.begin_step(StoreStep(saves=[named]))
        for layer in range(LAYERS):
            self.memory[layer, FROM] = self.values(layer)
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


def test_another_worker_finds_what_one_has_saved(tmp_path: Path) -> None:
    with worker(tmp_path) as first:
        first.save()
        assert first.freed()
    with worker(tmp_path) as second:
        second.load()
        assert second.loaded()
        assert second.holds()
        assert second.side.take_errors() == set()


def test_blocks_that_are_not_there_are_told(tmp_path: Path) -> None:
    with worker(tmp_path) as made:
        made.load()
        assert made.loaded()
        assert made.side.take_errors() == set(INTO)
        assert made.side.take_errors() == set()


def test_a_load_that_fails_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BackendUnavailable("the device does not work")

    with worker(tmp_path) as made:
        monkeypatch.setattr("kvwire_store.BlockStore.get", fail)
        made.load()
        assert made.loaded()
        assert made.side.take_errors() == set(INTO)


def test_a_fence_returns_when_the_store_has_let_go(tmp_path: Path) -> None:
    with worker(tmp_path) as made:
        made.save()
        made.side.fence(StoreStep(fenced={"p"}))
        made.memory[:, FROM] = -1  # vLLM gives the blocks to another request
        made.load()
        assert made.loaded()
        assert made.holds()


def test_a_save_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BackendUnavailable("the device does not work")

    with worker(tmp_path) as made:
        with monkeypatch.context() as patched:
            patched.setattr("kvwire_store.BlockStore.put", fail)
            made.save()
            assert made.freed()
        made.load()
        assert made.loaded()
        assert made.side.take_errors() == set(INTO)


def test_a_save_shows_how_long_it_took(tmp_path: Path) -> None:
    with worker(tmp_path) as made:
        made.save()
        seen: dict[str, list[float]] = {}

        def saved() -> bool:
            made.side.finished()
            for name, values in made.side.take_observed().items():
                seen.setdefault(name, []).extend(values)
            return "save_s" in seen

        assert eventually(saved)
        assert 0 < seen["save_s"][0] < 60
        assert not made.side.take_observed()  # nothing is behind any more


def many(request: str, steps: int = 20) -> list[NamedBlocks]:
    """What steps of a request fill; memory of the test has room for few at once."""
    size = 10 * BLOCK_TOKENS
    return [
        NamedBlocks(
            request,
            HashScheme(BLOCK_TOKENS).block_hashes(
                list(range(step * size, (step + 1) * size)), salt=request.encode()
            ),
            list(range(10)),
        )
        for step in range(steps)
    ]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    made = StoreServer(tmp_path)
    yield made
    made.kill()


def test_a_server_that_stands_still_delays_no_step_and_holds_no_block(
    tmp_path: Path, server: StoreServer
) -> None:
    """When it goes on, what has waited with its request is saved."""
    tiers = ["memory:1MiB", f"kvwire://{server.address}?timeout=300"]
    with worker(tmp_path, tiers=tiers, save_hold_s=0.2) as made:
        server.pause()
        try:
            began = time.monotonic()
            saves = many("runs") + many("ends") + many("preempted")
            made.side.begin_step(StoreStep(saves=saves))
            made.side.step_written()
            made.side.fence(StoreStep(fenced={"preempted"}))
            made.side.begin_step(StoreStep(leaving={"ends"}))
            assert eventually(lambda: made.side.finished()[0] == {"ends"})
            assert time.monotonic() - began < 60  # and not the tier's 300
        finally:
            server.pause(on=False)

        def caught_up() -> bool:
            made.side.finished()
            return not made.side.take_observed()

        assert eventually(caught_up)
        with closing(Lookup([tmp_path / "a"], 60.0)) as lookup:
            hashes = [one for named in many("runs") for one in named.hashes]
            assert lookup.begin(hashes).result() == len(hashes)
    with worker(tmp_path, tiers=tiers) as another:
        ids = list(range(3))
        wanted = NamedBlocks("d", many("runs")[-1].hashes[-3:], ids)
        another.side.begin_step(StoreStep(loads=[wanted]))
        another.side.start_loads()
        assert another.loaded()
        assert not another.side.take_errors()


def test_what_a_server_missed_is_saved_when_it_is_back(
    tmp_path: Path, server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = ["memory:1MiB", f"kvwire://{server.address}"]
    with worker(tmp_path, tiers=tiers) as made:
        server.kill()
        made.save()
        assert eventually(lambda: "blocks were not saved" in caplog.text)
        server.restart()

        def saved() -> bool:
            made.side.finished()
            return server.blocks() == len(HASHES)

        assert eventually(saved)


def test_layers_of_several_shapes_in_one_table(tmp_path: Path) -> None:
    """As those of a model and its draft model: each has the same blocks."""
    shapes = [
        replace(SHAPE, name="0 full", layers=NAMES),
        replace(
            SHAPE,
            name="1 full",
            layers=("draft.9",),
            kv_heads=2,
            total_kv_heads=2,
            head_dim=16,
        ),
    ]
    sides, memories = [], []
    for name in "ab":
        side = StoreWorker(
            StoreSettings(tiers=("memory:1MiB", f"disk:{tmp_path}/kv?size=1MiB")),
            shapes,
            tmp_path / name,
        )
        memory = {
            name: np.zeros((BLOCKS, HEADS, BLOCK_TOKENS, 2 * DIM), np.float32)
            for name in NAMES
        } | {"draft.9": np.zeros((BLOCKS, 2, BLOCK_TOKENS, 32), np.float32)}
        side.register(memory)
        sides.append(side)
        memories.append(memory)
        if name == "a":
            for layer in memory.values():
                layer[:] = np.random.default_rng(layer.size).random(layer.shape)
            side.begin_step(StoreStep(saves=[NamedBlocks("p", HASHES, FROM)]))
            side.step_written()
            side.begin_step(StoreStep(leaving={"p"}))
            assert eventually(lambda: sides[0].finished()[0] == {"p"})
            side.close()
    with closing(sides[1]) as side, closing(Lookup([tmp_path / "b"], 60.0)) as lookup:
        assert lookup.begin([*HASHES, bytes(32)]).result() == 3
        side.begin_step(StoreStep(loads=[NamedBlocks("d", HASHES, INTO)]))
        side.start_loads()
        assert eventually(lambda: side.finished()[1] == {"d"})
        assert not side.take_errors()
        for name, layer in memories[1].items():
            assert np.array_equal(layer[INTO], memories[0][name][FROM])
        side.begin_step(StoreStep(loads=[NamedBlocks("d", [bytes(32)], [5])]))
        side.start_loads()
        assert eventually(lambda: side.finished()[1] == {"d"})
        assert side.take_errors() == {5}


def test_a_tier_without_room_for_a_block_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    tiers = ("memory:64KiB?slab=4KiB",)
    shape = replace(SHAPE, head_dim=2 * DIM)
    side = StoreWorker(StoreSettings(tiers=tiers), [shape], tmp_path / "a")
    memory = np.zeros((LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, 4 * DIM), np.float32)
    layers = dict(zip(NAMES, memory, strict=True))
    try:
        said = r"'memory:64KiB\?slab=4KiB': a block of 6144 bytes .* slab of 4096 bytes"
        with pytest.raises(UsageError, match=said):
            side.register(layers)
    finally:
        side.close()


def test_a_second_end_is_none(tmp_path: Path) -> None:
    with worker(tmp_path) as made:
        made.side.close()
        assert not (tmp_path / "a").exists()


def test_the_scheduler_asks_what_is_there(tmp_path: Path) -> None:
    with (
        worker(tmp_path) as made,
        closing(Lookup([tmp_path / "a"], 60.0)) as lookup,
    ):
        assert lookup.begin(HASHES).result() == 0
        made.save()
        assert made.freed()
        assert lookup.begin([*HASHES, bytes(32)]).result() == 3
        assert lookup.begin([bytes(32), *HASHES]).result() == 0


def test_the_scheduler_has_all_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = f"disk:{tmp_path / 'kv'}?size=1MiB"
    with (
        worker(tmp_path, tiers=["memory:1MiB", disk]) as made,
        closing(Lookup([tmp_path / "a"], 60.0)) as lookup,
    ):
        made.save()
        assert made.freed()
        assert lookup.begin(HASHES).result() == 3
        assert lookup.forget()
        assert lookup.begin(HASHES).result() == 0
        made.load()
        assert made.loaded()
        assert made.side.take_errors() == {*INTO}

        async def fails(*_: Any) -> None:
            raise OSError("the disk is away")

        monkeypatch.setattr(BlockStore, "delete_all", fails)
        assert not lookup.forget()
        assert lookup.begin(HASHES).result() == 0  # it still answers


def test_a_store_that_does_not_answer_has_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
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
    with pytest.raises(UsageError, match="only this user"):
        address_file("e", 0)


def test_caches_on_a_gpu(tmp_path: Path) -> None:
    """Saved once the kernels before have run, loaded before the ones behind."""
    with closing(SimulatedDevice()) as device:
        side = StoreWorker(StoreSettings(), [SHAPE], tmp_path / "a")
        shape = (BLOCKS, HEADS, BLOCK_TOKENS, 2 * DIM)
        arrays = [device.array(np.zeros(shape, np.float32)) for _ in NAMES]
        side.register(dict(zip(NAMES, arrays, strict=True)))
        compute, gate = device.stream(), threading.Event()
        device.set_current(compute)
        compute.call(lambda: void(gate.wait()))
        values = np.random.default_rng(1).random((LAYERS, *shape), np.float32)
        side.begin_step(StoreStep(saves=[NamedBlocks("p", HASHES, FROM)]))
        for array, written in zip(arrays, values, strict=True):
            compute.call(partial(array.write, written))
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
