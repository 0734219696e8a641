"""Windows on a GPU between two processes: ``python -m tests.gpu.windows``.

This process reads; the owner is another one on the same GPU. It checks the bytes,
gets beside an owner that takes blocks back and writes to them all the time, a
withdrawal, and an owner that is killed during gets. It prints what it has seen,
and rates. It takes a minute, and up to four with ``--seconds 180``. With
``--simulated`` a device of the tests takes the GPU's place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import threading
import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import kvwire
import kvwire_local.device_blocks
from kvwire import KVSpec, PagedCache
from kvwire.backend import BlockRead
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.memory.copy import copy
from kvwire.memory.device.ops import contiguous
from kvwire_local.blocks import ProcessBlocks
from tests.support.runs import Beside, beside
from tests.support.simulated_device import SimulatedDevice

LAYERS, BLOCKS = 4, 64
SHAPE = (BLOCKS, 2, 16, 8, 64)
SPEC = KVSpec(layers=LAYERS, kv_heads=8, head_dim=64, block_tokens=16, dtype="float32")
BLOCK_BYTES = LAYERS * 4 * int(np.prod(SHAPE[1:]))
ROUNDS = 15
_TO_OWNER, _TO_READER = 1, 2


class Gpu(Protocol):
    """Caches in which all elements of a block are one number, its *life*."""

    kind: str
    cache: PagedCache

    def fill(self, block: int, life: int) -> None:
        """Write to a block; the kernels are over when it returns."""

    def values(self, block: int) -> npt.NDArray[np.float32]:
        """The elements of a block in all layers."""

    def copied(self) -> float:
        """The seconds of a copy of all blocks within the device."""


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

    def copied(self) -> float:
        others = [self._torch.empty_like(layer) for layer in self._layers]
        self._torch.cuda.synchronize()
        began = time.perf_counter()
        for one, other in zip(self._layers, others, strict=True):
            other.copy_(one)
        self._torch.cuda.synchronize()
        return time.perf_counter() - began


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

    def copied(self) -> float:
        began = time.perf_counter()
        for layer in self._layers:
            layer.read()
        return time.perf_counter() - began

    def _block(self, layer: int, block: int) -> Fragments:
        nbytes = BLOCK_BYTES // LAYERS
        address = self._layers[layer].data_ptr() + block * nbytes
        memory = contiguous(address, nbytes, self, self._device.device)
        return self._device.reach(memory)


def gpu(*, simulated: bool) -> Gpu:
    """The memory of this process."""
    return Simulated() if simulated else Torch()


class _Believing(ProcessBlocks):
    """Reads no generation."""

    def read(self, batch: BlockRead) -> Bits:
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


async def own(*, simulated: bool) -> None:
    """Be the owner until the reader has closed its end."""
    async with kvwire.open(prefer=("local",)) as comm:
        memory = gpu(simulated=simulated)
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
        self, memory: Gpu, connection: kvwire.Connection, remote: kvwire.RemoteWindow
    ) -> None:
        self.memory = memory
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


async def check(owner: Beside, *, simulated: bool, seconds: float) -> None:
    """Check everything but the death of the owner, and that last of all."""
    address = await owner.line()
    async with kvwire.open(prefer=("local",)) as comm:
        connection = await comm.connect(address)
        remote = await connection.window("kv")
        memory = gpu(simulated=simulated)
        assert remote.way == memory.kind, f"read by {remote.way}"
        reader = Reader(memory, connection, remote)
        everything = list(range(BLOCKS))
        offered = await reader.ask("offer", blocks=everything)
        assert await reader.get(everything, offered) == set(everything)
        assert not reader.wrong
        print(f"bytes: {BLOCKS} blocks right")
        await torn(reader, seconds)
        offered = await reader.ask("offer", blocks=everything)
        await reader.ask("withdraw", blocks=[5, 9])
        landed = await reader.get(everything, offered)
        assert landed == set(everything) - {5, 9}
        assert not reader.wrong
        print("withdrawn: 2 blocks missing, the others right")
        await rates(reader)
        await killed(owner, reader)
        await remote.close()
    memory.fill(0, 7)
    assert (memory.values(0) == 7).all()
    print("the device of the reader still works")


async def torn(reader: Reader, seconds: float) -> None:
    """Read beside an owner that writes all the time."""
    await reader.ask("churn")
    rng = np.random.default_rng(2)
    reader.landed = reader.missing = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or not (reader.landed and reader.missing):
        ids = rng.permutation(BLOCKS)[: int(rng.integers(1, BLOCKS))].tolist()
        await reader.get(ids, await reader.ask("offer", blocks=ids))
        assert not reader.wrong, "a block has landed that is torn or stale"
    changes = (await reader.ask("rest"))["changes"]
    print(
        f"beside {changes} changes: {reader.landed} blocks landed, "
        f"{reader.missing} missing, 0 wrong"
    )


async def killed(owner: Beside, reader: Reader) -> None:
    """Kill the owner during gets; what lands is right, and the rest is missing."""
    ids = list(range(BLOCKS))
    offered = await reader.ask("offer", blocks=ids)
    gets = [asyncio.ensure_future(reader.get(ids, offered)) for _ in range(8)]
    await asyncio.sleep(0)
    owner.signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        found = await asyncio.gather(*gets)
        while await reader.get(ids, offered):
            pass
    assert not reader.wrong
    assert reader.remote.owner_gone
    whole = sum(len(one) == BLOCKS for one in found)
    print(f"owner killed: {whole} of {len(gets)} gets under way were whole")


async def rates(reader: Reader) -> None:
    """Print the time of gets beside that of a copy within this process."""
    for count in (1, 8, BLOCKS):
        ids = list(range(count))
        offered = await reader.ask("offer", blocks=ids)
        ticket = bytes.fromhex(offered["ticket"])
        times = list[float]()
        for _ in range(ROUNDS):
            began = time.perf_counter()
            outcome = await reader.remote.get(ticket, reader.memory.cache, ids)
            times.append(time.perf_counter() - began)
            assert outcome.complete, outcome.missing
        best = statistics.median(times)
        nbytes = count * BLOCK_BYTES
        print(
            f"get of {nbytes // 1024} KiB in {count * LAYERS * 2} pieces: "
            f"{best * 1e6:.0f} us, {nbytes / best / 1e9:.1f} GB/s"
        )
    times = [reader.memory.copied() for _ in range(ROUNDS)]
    whole = statistics.median(times)
    print(
        f"copy of {BLOCKS * BLOCK_BYTES // 1024} KiB here: {whole * 1e6:.0f} us, "
        f"{BLOCKS * BLOCK_BYTES / whole / 1e9:.1f} GB/s"
    )


async def main(arguments: argparse.Namespace) -> None:
    """Be one of the two processes."""
    simulated: bool = arguments.simulated
    if arguments.owner:
        await own(simulated=simulated)
        return
    if arguments.planted:
        vars(kvwire_local.device_blocks)["ProcessBlocks"] = _Believing
    words = ["-m", "tests.gpu.windows", "--owner"]
    if simulated:
        words.append("--simulated")
    async with beside(*words, kind=Beside) as owner:
        await check(owner, simulated=simulated, seconds=arguments.seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--owner", action="store_true")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--planted", action="store_true", help="look at no generation")
    asyncio.run(main(parser.parse_args()))
    sys.exit(0)
