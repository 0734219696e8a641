"""Real bytes between two ends of torch's gloo, which stands for NCCL without a GPU.

Run by ``make test-torch``, in the environment that has torch.
"""

from __future__ import annotations

import asyncio
import importlib.util
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvwire import KVSpec, PagedCache
from kvwire.backend import Availability, Landing
from kvwire.backend.lane import LaneContext
from kvwire.errors import BackendUnavailable
from kvwire.types import Role
from kvwire_nccl.backend import NcclBackend
from kvwire_nccl.lane import NcclLane
from tests.backends.kvwire_nccl.gloo import Gloo
from tests.backends.lane_recorder import LaneRecorder
from tests.support.pairs import communicators, until

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="torch is not installed here; make test-torch runs this where it is",
    ),
    pytest.mark.usefixtures("gloo_is_loaded"),
]


SPEC = KVSpec(layers=4, kv_heads=4, head_dim=32, block_tokens=16, dtype="float16")
SHAPE = (40, 2, 16, 4, 32)
SOURCE = [7, 3, 39, 20, 21, 22, 0, 11, 30, 31, 5, 1]
TARGET = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]


@pytest.fixture(scope="module")
def gloo_is_loaded() -> None:
    """What gloo makes once for the process is not what a test leaves behind."""
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def availability(_: type[NcclBackend]) -> Availability:
        return Availability(available=True, reason="gloo needs no GPU")

    monkeypatch.setattr(NcclBackend, "availability", classmethod(availability))
    monkeypatch.setattr(NcclBackend, "library", lambda *_: gloo())


def gloo() -> Gloo:
    """One that gives a movement up after a second."""
    library = Gloo()
    library.move_timeout_s = 1.0
    return library


def caches() -> tuple[PagedCache, PagedCache, list[npt.NDArray[Any]]]:
    """A cache with content, an empty one, and all their arrays."""
    rng = np.random.default_rng(0)
    full = [rng.integers(0, 2**16, SHAPE, np.uint16).view(np.float16) for _ in range(4)]
    empty: list[npt.NDArray[Any]] = [np.zeros(SHAPE, np.float16) for _ in range(4)]
    return PagedCache(SPEC, full), PagedCache(SPEC, empty), full + empty


async def test_a_kv_transfer_each_way() -> None:
    """Through selection, bootstrap, threads and two process groups of two ranks."""
    async with communicators() as (near, far):
        address = await far.listen("127.0.0.1:0")
        left = await near.connect(address, transport="nccl")
        right = await anext(far.connections())
        assert left.transport == "nccl"
        for pulls, publishes in ((left, far), (right, near)):
            source, target, arrays = caches()
            inc = pulls.pull("t", target, TARGET)
            async with publishes.publish("t", source, SOURCE) as out:
                for layer in range(4):
                    out.ready(layers=layer)
            assert (await inc).complete
            await inc.drained()
            await out.drained()
            for full, empty in zip(arrays[:4], arrays[4:], strict=True):
                assert empty[TARGET].tobytes() == full[SOURCE].tobytes()


async def test_memory_is_in_quarantine_until_gloo_lets_go() -> None:
    """A receive that the peer never answers ends with gloo's timeout, not before."""
    lanes = [
        NcclLane(LaneContext(role=r, number=1, secret=bytes(32)), gloo())
        for r in (Role.CLIENT, Role.SERVER)
    ]
    client, server = lanes
    notes = LaneRecorder(), LaneRecorder()
    await server.join(client.bootstrap, notes[1])
    await client.join(server.bootstrap, notes[0])
    into = memoryview(bytearray(100_000))
    # The first shows that both are up, the second is never sent.
    server.receive(
        client.send(memoryview(bytes(into.nbytes)), 1), Landing(100_000, into)
    )
    server.receive(b"", Landing(100_000, into))
    client.flush()
    server.flush()
    await until(lambda: notes[0].sent and notes[1].received)
    server.abort()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not notes[1].closed
    await until(lambda: notes[1].closed)
    assert len(notes[1].received) == 1
    client.abort()
    await until(lambda: notes[0].closed)


async def test_names_of_another_library_are_refused() -> None:
    with pytest.raises(BackendUnavailable, match="is none of gloo's"):
        gloo().open(b"no port/x", True)
