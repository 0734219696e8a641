"""What a mark may wait for: futures of any kind, events of a device, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import pytest

from kvwire.after import Afters
from kvwire.devices import Devices
from kvwire.errors import UsageError
from kvwire.limits import MIB
from kvwire.memory.device.simulated import SimulatedDevice
from tests.support.pairs import until


@pytest.fixture
async def devices() -> AsyncIterator[Devices]:
    made = Devices(asyncio.get_running_loop(), MIB)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["asyncio", "concurrent"])
async def test_a_future(devices: Devices, kind: str) -> None:
    after: Any = Future() if kind == "concurrent" else asyncio.Future()
    told: list[str] = []
    Afters(devices).prepare(after)(told.append)
    assert told == []
    after.set_result(None)
    await until(lambda: told)
    assert told == [""]


async def test_a_future_that_fails(devices: Devices) -> None:
    after: Future[None] = Future()
    told: list[str] = []
    Afters(devices).prepare(after)(told.append)
    after.set_exception(ValueError("no such layer"))
    assert told == ["failed: ValueError: no such layer"]


async def test_an_event(devices: Devices) -> None:
    device = SimulatedDevice()
    stream, told = device.stream(), list[str]()
    device.hold()
    stream.call(lambda: None)
    Afters(devices).prepare(stream.record())(told.append)
    for _ in range(20):
        await asyncio.sleep(0)
    assert told == []
    device.release()
    await until(lambda: told)
    assert told == [""]
    stream.close()
    device.close()


async def test_an_event_that_its_library_does_not_take(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was claimed before it was waited for, so it fails and is not forgotten."""
    device = SimulatedDevice()
    stream, told = device.stream(), list[str]()

    def refuse() -> None:
        raise RuntimeError("no more streams")

    monkeypatch.setattr(device, "stream", refuse)
    Afters(devices).prepare(stream.record())(told.append)
    assert told == ["failed: RuntimeError: no more streams"]
    stream.close()
    device.close()


@pytest.mark.parametrize("after", [7, "event", object()], ids=str)
async def test_nothing_that_can_be_waited_for(devices: Devices, after: Any) -> None:
    with pytest.raises(UsageError, match=r"pass a future, a torch\.cuda\.Event"):
        Afters(devices).prepare(after)
