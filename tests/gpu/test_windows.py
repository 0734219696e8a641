"""Windows on a GPU between two processes: this one reads, and the other one owns.

Without a GPU, a device of the tests takes its place.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire import KVSpec, PagedCache
from kvwire.backend import BlockRead
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.memory.copy import copy
from kvwire.memory.device.ops import contiguous
from kvwire_local.blocks import ProcessBlocks
from tests.gpu.devices import KINDS, need_gpu
from tests.support.runs import Beside, beside
from tests.support.simulated_device import SimulatedDevice

# A child takes a third of a second to start.
pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])
LAYERS, BLOCKS = 4, 64
SHAPE = (BLOCKS, 2, 16, 8, 64)
SPEC = KVSpec(layers=LAYERS, kv_heads=8, head_dim=64, block_tokens=16, dtype="float32")
EVERYTHING = list(range(BLOCKS))
BLOCK_BYTES = LAYERS * 4 * int(np.prod(SHAPE[1:]))
_TO_OWNER, _TO_READER = 1, 2


class Gpu(Protocol):
    """Caches in which all elements of a block are one number, its *life*."""

    kind: str
    cache: PagedCache

    def fill(self, block: int, life: int) -> None:
        """Write to a block; the kernels are over when it returns."""

    def values(self, block: int) -> npt.NDArray[np.float32]:
        """The elements of a block in all layers."""

    def close(self) -> None:
        """Nothing uses it any more."""


class Torch:
    kind = "cuda_ipc"

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        make = torch.zeros
        self._layers: Any = [
            make(SHAPE, dtype=torch.float32, device="cuda") for _ in range(LAYERS)
        ]
        self.cache = PagedCache(SPEC, self._layers)

    def fill(self, block: int, life: int) -> None:
        for layer in self._layers:
            layer[block].fill_(life)
        self._torch.cuda.current_stream().synchronize()

    def values(self, block: int) -> npt.NDArray[np.float32]:
        found = self._torch.stack([layer[block] for layer in self._layers])
        host: npt.NDArray[np.float32] = found.cpu().numpy()
        return host

    def close(self) -> None:
        pass


class Simulated:
    kind = "simulated_ipc"

    def __init__(self) -> None:
        self._device = SimulatedDevice(128 * MIB)
        self._layers = [
            self._device.array(np.zeros(SHAPE, np.float32)) for _ in range(LAYERS)
        ]
        self.cache = PagedCache(SPEC, self._layers)

    def fill(self, block: int, life: int) -> None:
        for layer in range(LAYERS):
            memory = np.full(SHAPE[1:], life, np.float32).reshape(-1).view(np.uint8)
            copy(memory.data, self._block(layer, block))

    def values(self, block: int) -> npt.NDArray[np.float32]:
        found = np.empty((LAYERS, *SHAPE[1:]), np.float32)
        for layer in range(LAYERS):
            flat = found[layer].reshape(-1).view(np.uint8)
            copy(self._block(layer, block), flat.data)
        return found

    def close(self) -> None:
        self._device.close()

    def _block(self, layer: int, block: int) -> Fragments:
        nbytes = BLOCK_BYTES // LAYERS
        address = self._layers[layer].data_ptr() + block * nbytes
        memory = contiguous(address, nbytes, self, self._device.device)
        return self._device.reach(memory)


def gpu(kind: str) -> Gpu:
    """The memory of this process."""
    return Simulated() if kind == "simulated" else Torch()


def _believed(self: ProcessBlocks, batch: BlockRead) -> Bits:
    """Reads no generation."""
    return np.ones(batch.entries.size, np.bool_)


# --- owner ----------------------------------------------------------------------------


class Owner:
    """Offers blocks, and takes them back to write to them."""

    def __init__(self, memory: Gpu, window: kvwire.Window) -> None:
        self._memory = memory
        self._window = window
        self._lives = [0] * BLOCKS
        self._life = 0
        self._lock = threading.Lock()
        self._churns = False
        self._churning = threading.Thread(target=self._churn, daemon=True)
        for block in range(BLOCKS):
            self._change(block)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what the reader asks for."""
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
        self._memory.fill(block, self._life % 2**24)
        self._lives[block] = self._life % 2**24


async def own(kind: str) -> None:
    """Be the owner until the reader has closed its end."""
    async with kvwire.open(prefer=("local",)) as comm:
        memory = gpu(kind)
        window = comm.expose("kv", memory.cache)
        owner = Owner(memory, window)
        print(await comm.listen("127.0.0.1:0"), flush=True)
        connection = await comm.accept()
        while True:
            asked = json.loads(bytes(await connection.recv(_TO_OWNER)))
            # A change of many blocks would hold up the loop.
            answer = await asyncio.to_thread(owner.answer, asked)
            await connection.send(_TO_READER, json.dumps(answer).encode())


# --- reader ---------------------------------------------------------------------------


class Reader:
    """Gets blocks of the owner, and looks at every one."""

    def __init__(
        self,
        memory: Gpu,
        owner: Beside,
        connection: kvwire.Connection,
        remote: kvwire.RemoteWindow,
    ) -> None:
        self.memory = memory
        self.owner = owner
        self.remote = remote
        self.landed = 0
        self.missing = 0
        self.wrong = 0
        self._connection = connection

    async def ask(self, what: str, **more: Any) -> Any:
        """Have the owner do something."""
        asked = json.dumps({"do": what, **more}).encode()
        await self._connection.send(_TO_OWNER, asked)
        return json.loads(bytes(await self._connection.recv(_TO_READER)))

    async def get(self, ids: list[int], answer: Any) -> set[int]:
        """Get offered blocks into the same places; count them; return the landed."""
        ticket = bytes.fromhex(answer["ticket"])
        outcome = await self.remote.get(ticket, self.memory.cache, ids)
        landed = {block for _, block in outcome.landed}
        for block, life in zip(ids, answer["lives"], strict=True):
            if block in landed and (self.memory.values(block) != life).any():
                self.wrong += 1
        self.landed += len(landed)
        self.missing += len(ids) - len(landed)
        return landed

    async def watch(self, seconds: float) -> None:
        """Read beside an owner that writes all the time, until one is wrong."""
        await self.ask("churn")
        rng = np.random.default_rng(2)
        end = time.monotonic() + seconds
        while time.monotonic() < end or not (self.landed and self.missing):
            ids = rng.permutation(BLOCKS)[: int(rng.integers(1, BLOCKS))].tolist()
            await self.get(ids, await self.ask("offer", blocks=ids))
            if self.wrong:
                return
        await self.ask("rest")


@pytest.fixture(params=KINDS)
async def reader(request: pytest.FixtureRequest) -> AsyncIterator[Reader]:
    need_gpu(request.param)
    memory = gpu(request.param)
    words = ("-m", "tests.gpu.test_windows", request.param)
    async with (
        beside(*words, kind=Beside) as owner,
        kvwire.open(prefer=("local",)) as comm,
    ):
        connection = await comm.connect(await owner.line())
        remote = await connection.window("kv")
        assert remote.way == memory.kind, f"read by {remote.way}"
        yield Reader(memory, owner, connection, remote)
        await remote.close()
    # The device still works, whatever became of the owner.
    memory.fill(0, 7)
    assert (memory.values(0) == 7).all()
    memory.close()


async def test_every_block_is_right_and_what_is_withdrawn_is_missing(
    reader: Reader,
) -> None:
    offered = await reader.ask("offer", blocks=EVERYTHING)
    assert await reader.get(EVERYTHING, offered) == set(EVERYTHING)
    await reader.ask("withdraw", blocks=[5, 9])
    assert await reader.get(EVERYTHING, offered) == set(EVERYTHING) - {5, 9}
    assert not reader.wrong


async def test_no_torn_or_stale_block_lands(reader: Reader) -> None:
    await reader.watch(1.0 if reader.memory.kind == "simulated_ipc" else 20.0)
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
    offered = await reader.ask("offer", blocks=EVERYTHING)
    gets = [asyncio.ensure_future(reader.get(EVERYTHING, offered)) for _ in range(8)]
    await asyncio.sleep(0)
    reader.owner.signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        await asyncio.gather(*gets)
        while await reader.get(EVERYTHING, offered):
            pass
    assert not reader.wrong
    assert reader.remote.owner_gone


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1]))
