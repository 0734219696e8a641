"""What Mooncake's engine is asked to move, by an engine that only writes it down."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.bench.peers.serving import LEFT, RIGHT, offsets

WHERE, BASE = "127.0.0.1:7", 1_000_000
PEER = {"where": WHERE, "base": BASE}
WORK = {"nbytes": 32, "count": 3, "layers": 1, "cross_layer": False}
OFFSETS = {side: offsets(WORK, side).tolist() for side in (LEFT, RIGHT)}


class Engine:
    """Has room for calls, and gives each the status that the test wants."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.status.get(name, 4711 if name == "get_rpc_port" else 0)

        return call

    @property
    def batches(self) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0].startswith("batch")]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def module(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program's module, with that engine in the place of Mooncake's."""
    stand_in = ModuleType("mooncake.engine")
    stand_in.TransferEngine = lambda: engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", stand_in)
    name = "tests.bench.peers.mooncake"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module(name)
    versions = SimpleNamespace(version=lambda package: f"{package} 1")
    monkeypatch.setattr(found, "importlib", SimpleNamespace(metadata=versions))
    yield found
    sys.modules.pop(name, None)


def ready(module: Any, verb: str) -> Any:
    """Three fragments of 32 bytes, with their places on each side."""
    program = module.Program({"pool_bytes": "192"})
    program.connect(PEER)
    program.use({"verb": verb, **WORK}, None)
    return program


@pytest.mark.parametrize(
    ("verb", "call"),
    [("push", "batch_transfer_sync_write"), ("pull", "batch_transfer_sync_read")],
)
def test_all_fragments_in_one_batch(
    verb: str, call: str, module: Any, engine: Engine
) -> None:
    program = ready(module, verb)
    program.move()
    ours = [program.base + offset for offset in OFFSETS[LEFT]]
    theirs = [BASE + offset for offset in OFFSETS[RIGHT]]
    assert engine.batches == [(call, WHERE, ours, theirs, [32] * 3)]


def test_batches_of_a_size(
    module: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fragment is in one of them, in their order."""
    monkeypatch.setenv("BENCH_BATCH", "2")
    program = ready(module, "push")
    program.move()
    assert [len(batch[2]) for batch in engine.batches] == [2, 1]
    moved = [address - program.base for batch in engine.batches for address in batch[2]]
    assert moved == OFFSETS[LEFT]


def test_where_it_listens_and_what_it_is(module: Any, engine: Engine) -> None:
    program = module.Program({"pool_bytes": "128"})
    assert ("register_memory", program.base, 128) in engine.calls
    said = program.listen()
    assert said == {"where": "127.0.0.1:4711", "base": program.base}
    facts = program.connect(PEER)
    assert facts == {"mooncake": "mooncake-transfer-engine-non-cuda 1"}


@pytest.mark.parametrize(
    ("call", "error"),
    [("initialize", "cannot listen at"), ("register_memory", "cannot register 128")],
)
def test_an_engine_that_cannot_start(
    call: str, error: str, module: Any, engine: Engine
) -> None:
    engine.status[call] = -1
    with pytest.raises(RuntimeError, match=error):
        module.Program({"pool_bytes": "128"})


def test_a_batch_that_fails_is_an_error(module: Any, engine: Engine) -> None:
    engine.status["batch_transfer_sync_write"] = 3
    with pytest.raises(RuntimeError, match="a batch of 3 fragments returned 3"):
        ready(module, "push").move()
