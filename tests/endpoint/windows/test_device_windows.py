"""Windows in a device's memory: read from device to device, or else by messages.

The devices are simulated. Owner and reader have one each, as two processes have.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire import PagedCache
from kvwire.backend import WindowMemory
from kvwire.errors import BackendUnavailable, ProtocolError
from kvwire.memory.device import moves
from kvwire.types import MemoryKind
from kvwire_local import device_blocks
from kvwire_local.device_blocks import (
    ALLOCATIONS_MAX,
    read_allocations,
    shared_allocations,
)
from tests.support import inside
from tests.support.device_caches import BLOCKS, LAYERS, LAYOUTS, SPEC
from tests.support.device_caches import DeviceCache as Cache
from tests.support.pairs import Pair, connected, turns, until
from tests.support.simulated_device import SimulatedDevice
from tests.test_aio import no_more_threads

SOURCE = [7, 3, 39, 20, 21, 22, 0]
TARGET = [2, 4, 6, 8, 10, 12, 14]
WAY = "simulated_ipc"


@dataclass(frozen=True)
class Open:
    """A window of the far device's cache, which the near one's cache reads."""

    both: Pair
    window: kvwire.Window
    remote: kvwire.RemoteWindow
    source: Cache
    target: Cache

    def get(self, blocks: list[int] = SOURCE) -> kvwire.Request[kvwire.Outcome]:
        into = TARGET[: len(blocks)]
        ticket = self.window.offer(blocks)
        return self.remote.get(ticket, into=self.target.paged, blocks=into)

    async def moves(self) -> bool:
        """Whether all of it lands as it is there."""
        outcome = await self.get()
        assert outcome.complete, outcome.missing
        landed = self.target.blocks(TARGET) == self.source.blocks(SOURCE)
        return bool(landed.all())

    async def busy(self) -> kvwire.Request[kvwire.Outcome]:
        """A get that the reader's device copies now; the window was open before."""
        assert await self.moves()
        device = self.target.device
        assert device is not None
        device.hold()
        request = self.get()
        reader = inside.reader(self.remote)
        assert reader is not None
        await until(lambda: reader.busy)
        return request


@asynccontextmanager
async def opened(
    near: SimulatedDevice,
    far: SimulatedDevice,
    layout: str = "NHD",
    **settings: Any,
) -> AsyncIterator[Open]:
    """Both ends; afterwards nothing of the owner is open on the reader's device."""
    source, target = Cache(far, seed=1), Cache(near, layout, seed=None)
    async with connected("tcp", prefer=("local",), **settings) as both:
        window = both.far.expose("kv", source.paged)
        remote = await both.left.window("kv")
        yield Open(both, window, remote, source, target)
        await remote.close()
        await window.close()
        await until(lambda: not near.opened)


@pytest.mark.parametrize("passing", [moves.PASSING_BYTES, 3000])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_blocks_go_from_device_to_device(
    near: SimulatedDevice,
    far: SimulatedDevice,
    layout: str,
    passing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the ticket and no others; one that was withdrawn is missing."""
    monkeypatch.setattr(
        device_blocks,
        "DeviceMoves",
        lambda ops, call_soon: moves.DeviceMoves(ops, call_soon, passing),
    )
    async with opened(near, far, layout) as w:
        assert w.remote.way == WAY
        assert await w.moves()
        assert near.opened == 1
        rest = [block for block in range(BLOCKS) if block not in TARGET]
        assert not w.target.blocks(rest).any()
        ticket = w.window.offer(SOURCE)
        w.window.withdraw([3])
        outcome = await w.remote.get(ticket, into=w.target.paged, blocks=TARGET)
        assert sorted(outcome.missing) == [("kv", 4)]
        assert "withdrawn" in outcome.missing["kv", 4]


@pytest.mark.parametrize("late", [False, True])
async def test_a_block_that_is_taken_back_during_the_copy_does_not_land(
    near: SimulatedDevice, far: SimulatedDevice, late: bool
) -> None:
    """The generations are read behind the copy, and not when it is queued."""
    async with opened(near, far) as w:
        request = await w.busy()
        if late:
            w.window.withdraw([39])
        w.source.overwrite([39])  # an owner that keeps its word withdraws first
        near.release()
        outcome = await request
        # Without the withdrawal the other bytes land, which shows that the copy came
        # behind them.
        assert (("kv", 6) in outcome.missing) == late
        assert (w.target.blocks([6]) == w.source.blocks([39])).all()


async def test_a_window_that_no_thread_can_open_is_not_opened_later(
    near: SimulatedDevice, far: SimulatedDevice
) -> None:
    """Nothing would close it."""
    async with opened(near, far) as w:
        with no_more_threads():
            assert not (await w.get()).complete
        await asyncio.to_thread(int)  # by the thread that would open it, too
        assert not near.opened
        assert await w.moves()


async def test_a_cache_in_host_memory_gets_blocks_by_messages(
    near: SimulatedDevice, far: SimulatedDevice
) -> None:
    arrays = [np.zeros(LAYOUTS["NHD"], np.uint16) for _ in range(LAYERS)]
    target = PagedCache(SPEC, arrays)
    async with opened(near, far) as w:
        ticket = w.window.offer(SOURCE)
        outcome = await w.remote.get(ticket, into=target, blocks=TARGET)
        assert outcome.complete, outcome.missing
        assert (np.stack(arrays)[:, TARGET] == w.source.blocks(SOURCE)).all()
        assert not near.opened


async def test_a_window_in_host_memory_is_read_into_a_device_by_messages(
    near: SimulatedDevice,
) -> None:
    """A small get too, whose bytes come in one frame for host memory."""
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 9, LAYOUTS["NHD"], np.uint16) for _ in range(LAYERS)]
    target = Cache(near, seed=None)
    async with connected("tcp", prefer=("local",)) as both:
        window = both.far.expose("kv", PagedCache(SPEC, arrays))
        remote = await both.left.window("kv")
        for count in (1, len(SOURCE)):
            ticket = window.offer(SOURCE[:count])
            into = TARGET[:count]
            outcome = await remote.get(ticket, into=target.paged, blocks=into)
            assert outcome.complete, outcome.missing
            expected = np.stack(arrays)[:, SOURCE[:count]]
            assert (target.blocks(into) == expected).all()


def _no_handle(far: SimulatedDevice, _: SimulatedDevice) -> None:
    far.shares = False


def _of_nothing(far: SimulatedDevice, _: SimulatedDevice) -> None:
    """Forged, or of a device that the reader's cannot reach."""
    share = far.share
    far.share = lambda address: share(address)._replace(  # type: ignore[method-assign]
        handle=bytes(64)
    )


def _too_small(far: SimulatedDevice, small: SimulatedDevice) -> None:
    """The reader's own driver reports less than the window: nothing is touched."""
    share, handle = far.share, small.share(small.allocate(4096)).handle
    far.share = lambda address: share(address)._replace(  # type: ignore[method-assign]
        handle=handle
    )


@pytest.mark.parametrize(
    ("spoil", "way"),
    [
        (_no_handle, "messages"),
        (_of_nothing, WAY),
        (_too_small, WAY),
        (None, "messages"),
    ],
    ids=["no handle", "opens nothing", "too small", "no tracing"],
)
async def test_memory_that_cannot_be_opened_is_read_by_messages(
    near: SimulatedDevice,
    far: SimulatedDevice,
    spoil: Callable[[SimulatedDevice, SimulatedDevice], None] | None,
    way: str,
) -> None:
    """Known from the beginning, or found out by the first get."""
    settings: dict[str, Any] = {}
    small = SimulatedDevice(4096)
    if spoil is None:  # the process may not be read
        settings = {"backends": {"local": {"way": "arena"}}}
    else:
        spoil(far, small)
    async with opened(near, far, **settings) as w:
        assert w.remote.way == way
        assert await w.moves()
        assert w.remote.way == "messages"
        assert not near.opened
    small.close()


async def test_a_device_that_fails_keeps_the_blocks(
    near: SimulatedDevice, far: SimulatedDevice
) -> None:
    """They are missing, and never reported as free: it may still write to them."""
    async with opened(near, far) as w:
        assert await w.moves()
        near.fail("a kernel went wrong")
        request = w.get()
        outcome = await request
        assert len(outcome.missing) == len(TARGET)
        assert "a kernel went wrong" in outcome.missing["kv", TARGET[0]]
        released = asyncio.ensure_future(request.released())
        await turns(20)
        assert not released.done()
        released.cancel()


async def test_the_owner_waits_until_nothing_of_it_is_open(
    near: SimulatedDevice, far: SimulatedDevice
) -> None:
    """CUDA does not define what becomes of memory that is freed while it is open."""
    async with opened(near, far) as w:
        request = await w.busy()
        closing = asyncio.ensure_future(w.window.close())
        await turns(50)
        assert not closing.done()
        near.release()
        await closing
        assert not near.opened
        assert len((await request).missing) == len(TARGET)


async def test_a_lane_that_ends_ends_its_window(
    near: SimulatedDevice, far: SimulatedDevice
) -> None:
    async with opened(near, far) as w:
        assert await w.moves()
        await w.both.right.close()
        await until(lambda: w.remote.owner_gone)
        assert len((await w.get()).missing) == len(TARGET)


# --- records --------------------------------------------------------------------------


def test_a_span_of_several_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is named once, whatever lies in it."""
    device = SimulatedDevice(1 << 20)
    first = device.allocate(1 << 20)
    step = 1 << 16

    def share(address: int) -> Any:
        begin = first + (address - first) // step * step
        return shared._replace(address=begin, nbytes=step)

    shared = device.share(first)
    monkeypatch.setattr(device, "share", share)
    spans = ((first, 2 * step), (first + 2 * step + 8, 8), (first + 2 * step + 64, 8))
    memory = WindowMemory(spans=spans, table=(8, 8), device=device.device)
    kind, found = read_allocations(shared_allocations(memory))
    assert kind is MemoryKind.SIMULATED
    assert [address for address, _ in found] == [first, first + step, first + 2 * step]
    step = 256
    with pytest.raises(BackendUnavailable, match="more than 256"):
        shared_allocations(memory)
    device.close()


def _cut(good: bytes) -> bytes:
    return good[:-1]


def _of_no_kind(good: bytes) -> bytes:
    return b"\x09" + good[1:]


def _too_many(good: bytes) -> bytes:
    count = ALLOCATIONS_MAX + 1
    return good[:4] + count.to_bytes(4, "little") + good[8:] * count


@pytest.mark.parametrize(
    "spoiled",
    [_cut, _of_no_kind, _too_many, lambda _: b""],
    ids=["cut", "of no kind", "too many", "empty"],
)
def test_false_records_of_allocations(
    device: SimulatedDevice, spoiled: Callable[[bytes], bytes]
) -> None:
    spans = ((device.allocate(64), 64),)
    memory = WindowMemory(spans=spans, table=(8, 8), device=device.device)
    good = shared_allocations(memory)
    assert len(read_allocations(good)[1]) == 1
    with pytest.raises(ProtocolError):
        read_allocations(spoiled(good))
