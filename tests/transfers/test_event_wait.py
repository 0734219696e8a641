"""What a mark may wait for: futures of any kind, events of a device, nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kvwire.driver.devices import Devices
from kvwire.errors import BackendUnavailable, UsageError
from kvwire.limits import MIB
from kvwire.transfers.event_wait import EventWaiter, wait_event
from tests.support.simulated_device import SimulatedDevice


@pytest.fixture
async def devices() -> AsyncIterator[Devices]:
    made = Devices(asyncio.get_running_loop(), MIB)
    yield made
    made.close()


async def test_a_future_that_fails(devices: Devices) -> None:
    after: Future[None] = Future()
    told: list[str] = []
    EventWaiter(devices).prepare(after)(told.append)
    after.set_exception(ValueError("no such layer"))
    assert told == ["failed: ValueError: no such layer"]


async def test_an_event_that_its_library_does_not_take(
    devices: Devices, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was claimed before it was waited for, so it fails and is not forgotten."""
    stream, told = device.stream(), list[str]()

    def refuse() -> None:
        raise RuntimeError("no more streams")

    monkeypatch.setattr(device, "stream", refuse)
    EventWaiter(devices).prepare(stream.record())(told.append)
    assert told == ["failed: RuntimeError: no more streams"]
    stream.close()


async def test_waiting_for_an_event(devices: Devices, device: SimulatedDevice) -> None:
    stream, gate = device.stream(), threading.Event()
    stream.call(lambda: void(gate.wait()))
    waiting = asyncio.ensure_future(wait_event(stream.record(), devices))
    given_up = asyncio.ensure_future(wait_event(stream.record(), devices))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    given_up.cancel()
    gate.set()
    await waiting
    assert given_up.cancelled()
    device.fail("an illegal memory access")
    with pytest.raises(BackendUnavailable, match="failed: RuntimeError: an illegal"):
        await wait_event(stream.record(), devices)
    stream.close()


async def test_waiting_for_a_future_of_another_thread(devices: Devices) -> None:
    after: Future[None] = Future()
    threading.Thread(target=after.set_result, args=(None,)).start()
    await wait_event(after, devices)
    with pytest.raises(UsageError, match=r"pass a future, a torch\.cuda\.Event"):
        await wait_event(7, devices)


def test_what_comes_true_when_the_loop_is_closed() -> None:
    """Whoever says so need not know, and has others to tell."""
    after = Waited()

    async def given_up() -> None:
        devices = Devices(asyncio.get_running_loop(), MIB)
        waiting = asyncio.ensure_future(wait_event(after, devices))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        devices.close()

    asyncio.run(given_up())
    (call,) = after.calls
    call(after)
    assert after.asked


class Waited:
    """A future that tells no sooner than the test says."""

    def __init__(self) -> None:
        self.calls: list[Callable[[Any], object]] = []
        self.asked = False

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        self.calls.append(call)

    def result(self) -> None:
        self.asked = True


def void(_: object) -> None:
    """For work whose result nobody wants."""
