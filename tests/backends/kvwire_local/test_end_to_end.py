"""Two communicators of one host: what a user sees of `local`."""

from __future__ import annotations

import asyncio
import errno
import gc
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire.backend import Payload, registry
from kvwire.limits import MIB, SPAN_PIECES_MAX
from kvwire.memory import cma
from kvwire.memory.arena import Arena
from kvwire_local import LocalBackend
from kvwire_local import backend as diagnosis
from kvwire_local.tracer_slot import TracerSlot
from tests.support import inside
from tests.support.pairs import Pair, connected

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with connected(transport="local") as made:
        yield made


@one_loop
async def test_a_cache_in_an_arena_is_pulled(pair: Pair) -> None:
    arena = Arena(16 * MIB)
    await _pull(pair, arena)
    gc.collect()
    # Nothing holds the cache any more, so that its memory can be unmapped.
    arena.close()
    assert arena.closed


async def _pull(pair: Pair, arena: Arena) -> None:
    spec = kvwire.KVSpec(
        layers=3, kv_heads=4, head_dim=64, block_tokens=16, dtype="float16"
    )
    shape = (40, 2, 16, 4, 64)
    tensors = [arena.numpy(shape, np.float16) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        tensor[:] = np.random.default_rng(number).standard_normal(shape)
    landed = [np.zeros(shape, np.float16) for _ in range(3)]
    blocks, places = [7, 3, 39, 11, 0], [1, 5, 2, 30, 8]
    out = pair.far.publish("p", kvwire.PagedCache(spec, tensors, layout="NHD"), blocks)
    inc = pair.left.pull("p", kvwire.PagedCache(spec, landed, layout="NHD"), places)
    out.ready()
    out.finish()
    outcome = await inc
    assert outcome.complete
    await inc.drained()
    await out.drained()
    for source, target in zip(tensors, landed, strict=True):
        assert np.array_equal(source[blocks], target[places])
    assert not np.array_equal(landed[0][places[0]], landed[1][places[0]])


@one_loop
async def test_small_fragments_travel_many_at_once(pair: Pair) -> None:
    """A descriptor names each, so they are counted as well as their bytes.

    They are gathered first, and the loop has its turns between.
    """
    sent: list[int] = []
    in_turn: list[int] = []
    lane: Any = inside.lanes(pair.right).open[0].lane
    send = lane.send

    def counted(payload: Payload, token: object) -> Any:
        assert not in_turn
        in_turn.append(payload.nbytes)
        asyncio.get_running_loop().call_soon(in_turn.clear)
        sent.append(payload.nbytes)
        return send(payload, token)

    lane.send = counted
    spec = kvwire.KVSpec(
        layers=1, kv_heads=4, head_dim=16, block_tokens=16, dtype="float16"
    )
    tensor = np.random.default_rng(1).standard_normal((4096, 2, 16, 4, 16))
    have = [tensor.astype(np.float16)]
    want = [np.zeros_like(have[0])]
    blocks, places = list(range(0, 4096, 2)), list(range(4095, 0, -2))
    out = pair.far.publish("p", kvwire.PagedCache(spec, have), blocks)
    inc = pair.left.pull("p", kvwire.PagedCache(spec, want), places)
    out.ready()
    out.finish()
    assert (await inc).complete
    await inc.drained()
    await out.drained()
    assert np.array_equal(have[0][blocks], want[0][places])
    assert sent == [SPAN_PIECES_MAX * 4096] * 2


# --- the backend: where it runs, and what it says to who takes it for a transport -----


def test_it_is_registered() -> None:
    assert registry.load("local") is LocalBackend
    assert LocalBackend.availability().available
    assert LocalBackend.rank() < registry.load("tcp").rank()


def test_elsewhere_than_on_linux_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = LocalBackend.availability()
    assert not found.available
    assert "this is darwin" in found.reason
    assert found.remedy == "use tcp"


def found() -> dict[str, str]:
    return {finding.name: finding.state for finding in LocalBackend.diagnose()}


def test_this_machine_is_looked_at() -> None:
    assert set(found()) == {"ptrace scope", "process_vm_readv", "arenas"}
    assert all(finding.text for finding in LocalBackend.diagnose())


@pytest.mark.parametrize(
    ("scope", "state", "text"),
    [
        ("0", "ok", "0: peers of this user"),
        ("1", "ok", "1: one peer process at a time"),
        ("2", "warn", "2: only a process with CAP_SYS_PTRACE"),
        ("3", "warn", "3: no process may read"),
        ("7", "warn", "7: a value that this version does not know"),
        ("", "ok", "not restricted"),
    ],
)
def test_each_scope_is_explained(
    scope: str, state: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "ptrace_scope"
    file.write_text(scope)
    finding = diagnosis.findings(TracerSlot(lambda pid: True, file))[0]
    assert finding.state == state
    assert finding.text.startswith(text)
    assert bool(finding.remedy) is (state == "warn")


def test_refusals_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(cma, "read_bytes", refuse)
    monkeypatch.setattr(diagnosis, "Arena", refuse)
    assert found()["process_vm_readv"] == "warn"
    assert found()["arenas"] == "missing"


def test_elsewhere_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert LocalBackend.diagnose() == ()
