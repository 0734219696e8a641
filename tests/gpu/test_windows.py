"""Windows on a GPU between two processes: this one reads, and the other one owns.

Without a GPU, a device of the tests takes its place.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire import KVSpec, PagedCache
from kvwire.backend import BlockRead
from kvwire.kv.blocks import Bits
from kvwire_local.blocks import ProcessBlocks
from tests.gpu.devices import KINDS, need_gpu
from tests.gpu.peer import Peer, Torch, gpu, serve, started

# A child takes a third of a second to start.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
LAYERS, BLOCKS = 4, 64
SHAPE = (BLOCKS, 2, 16, 8, 64)
SPEC = KVSpec(layers=LAYERS, kv_heads=8, head_dim=64, block_tokens=16, dtype="float32")
EVERYTHING = list(range(BLOCKS))


class Cache:
    """One in which all elements of a block are one number, its *life*."""

    def __init__(self, memory: Torch) -> None:
        self._memory = memory
        zeros = np.zeros(SHAPE, np.float32)
        self._layers = [memory.array(zeros) for _ in range(LAYERS)]
        self.paged = PagedCache(SPEC, self._layers)

    def fill(self, block: int, life: int) -> None:
        for layer in self._layers:
            self._memory.write(layer[block], np.full(SHAPE[1:], life, np.float32))

    def values(self, block: int) -> Any:
        """The elements of a block in all layers."""
        return np.stack([self._memory.values(layer[block]) for layer in self._layers])


def _believed(self: ProcessBlocks, batch: BlockRead) -> Bits:
    """Reads no generation."""
    return np.ones(batch.entries.size, np.bool_)


# --- owner ----------------------------------------------------------------------------


class Owner:
    """Offers blocks, and takes them back to write to them."""

    def __init__(self, cache: Cache, window: kvwire.Window) -> None:
        self._cache = cache
        self._window = window
        self._lives = [0] * BLOCKS
        self._life = 0
        self._lock = threading.Lock()
        self._churns = False
        self._churning = threading.Thread(target=self._churn, daemon=True)
        for block in range(BLOCKS):
            self._change(block)

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what the reader asks for; a change of many blocks holds up no loop."""
        return await asyncio.to_thread(self._answer, asked)

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "offer":
            with self._lock:
                blocks = asked["blocks"]
                ticket = self._window.offer(blocks).hex()
                return {"ticket": ticket, "lives": [self._lives[b] for b in blocks]}
        if asked["do"] == "withdraw":
            with self._lock:
                for block in asked["blocks"]:
                    self._change(block)
        elif asked["do"] == "churn":
            self._churns = True
            self._churning.start()
        elif asked["do"] == "rest":
            self._churns = False
            self._churning.join()
        return {"changes": self._life}

    def _churn(self) -> None:
        rng = np.random.default_rng(1)
        while self._churns:
            with self._lock:
                self._change(int(rng.integers(BLOCKS)))

    def _change(self, block: int) -> None:
        self._life += 1
        self._window.withdraw([block])
        self._cache.fill(block, self._life % 2**24)
        self._lives[block] = self._life % 2**24


async def own(kind: str) -> None:
    async with kvwire.open(prefer=("local",)) as comm:
        cache = Cache(gpu(kind))
        owner = Owner(cache, comm.expose("kv", cache.paged))
        await serve(comm, lambda _: owner.answer)


# --- reader ---------------------------------------------------------------------------


class Reader:
    """Gets blocks of the owner, and looks at every one."""

    def __init__(self, cache: Cache, owner: Peer, remote: kvwire.RemoteWindow) -> None:
        self.cache = cache
        self.owner = owner
        self.remote = remote
        self.landed = 0
        self.missing = 0
        self.wrong = 0

    async def get(self, ids: list[int], answer: Any) -> set[int]:
        """Get offered blocks into the same places; count them; return the landed."""
        ticket = bytes.fromhex(answer["ticket"])
        outcome = await self.remote.get(ticket, self.cache.paged, ids)
        landed = {block for _, block in outcome.landed}
        for block, life in zip(ids, answer["lives"], strict=True):
            if block in landed and (self.cache.values(block) != life).any():
                self.wrong += 1
        self.landed += len(landed)
        self.missing += len(ids) - len(landed)
        return landed

    async def watch(self, seconds: float) -> None:
        """Read beside an owner that writes all the time, until one is wrong."""
        await self.owner.ask("churn")
        rng = np.random.default_rng(2)
        end = time.monotonic() + seconds
        while time.monotonic() < end or not (self.landed and self.missing):
            ids = rng.permutation(BLOCKS)[: int(rng.integers(1, BLOCKS))].tolist()
            await self.get(ids, await self.owner.ask("offer", blocks=ids))
            if self.wrong:
                return
        await self.owner.ask("rest")


@pytest.fixture(params=KINDS)
async def reader(request: pytest.FixtureRequest) -> AsyncIterator[Reader]:
    need_gpu(request.param)
    memory = gpu(request.param)
    cache = Cache(memory)
    module = "tests.gpu.test_windows"
    async with started(module, request.param, prefer=("local",)) as (_, owner):
        remote = await owner.connection.window("kv")
        assert remote.way == memory.way, f"read by {remote.way}"
        yield Reader(cache, owner, remote)
        await remote.close()
    # The device still works, whatever became of the owner.
    cache.fill(0, 7)
    assert (cache.values(0) == 7).all()
    memory.close()


async def test_every_block_is_right_and_what_is_withdrawn_is_missing(
    reader: Reader,
) -> None:
    offered = await reader.owner.ask("offer", blocks=EVERYTHING)
    assert await reader.get(EVERYTHING, offered) == set(EVERYTHING)
    await reader.owner.ask("withdraw", blocks=[5, 9])
    assert await reader.get(EVERYTHING, offered) == set(EVERYTHING) - {5, 9}
    assert not reader.wrong


async def test_no_torn_or_stale_block_lands(reader: Reader) -> None:
    await reader.watch(1.0 if reader.remote.way == "simulated_ipc" else 20.0)
    assert not reader.wrong


async def test_without_the_look_at_generations_torn_blocks_land(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test before would prove nothing."""
    monkeypatch.setattr(ProcessBlocks, "read", _believed)
    await reader.watch(60.0)
    assert reader.wrong


async def test_an_owner_that_is_killed_during_gets(reader: Reader) -> None:
    """What lands is right, and the rest is missing."""
    offered = await reader.owner.ask("offer", blocks=EVERYTHING)
    gets = [asyncio.ensure_future(reader.get(EVERYTHING, offered)) for _ in range(8)]
    await asyncio.sleep(0)
    reader.owner.process.signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        await asyncio.gather(*gets)
        while await reader.get(EVERYTHING, offered):
            pass
    assert not reader.wrong
    assert reader.remote.owner_gone


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1]))
