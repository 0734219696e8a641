"""Ends that memory depends on: of calls, of errors, and of a store."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import thread as pools
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from kvwire import ConnectionLost
from kvwire.aio import gather_all, run_to_completion
from kvwire.errors import error_text
from kvwire_store import BlockStore
from kvwire_store.threads import Threads
from tests.support.caches import Filled, chain


async def test_an_error_is_in_no_cycle() -> None:
    """It would keep what was to be moved until the garbage collector comes by."""

    async def work() -> None:
        memory = np.zeros(8)
        held.append(weakref.ref(memory))
        raise ConnectionLost("gone")

    held: list[weakref.ref[np.ndarray[tuple[int], np.dtype[np.float64]]]] = []
    gc.disable()
    try:
        for call in (run_to_completion, gather_all):
            with pytest.raises(ConnectionLost):
                await call(work())
            await asyncio.sleep(0)  # the loop still has what woke this task
            assert held.pop()() is None
    finally:
        gc.enable()


def test_an_error_lets_go_of_what_its_frames_have() -> None:
    def held() -> None:
        memory = np.zeros(8)
        gone.append(weakref.ref(memory))
        try:
            raise KeyError(1)
        except KeyError as exc:
            error = ConnectionLost("gone")
            error.__cause__ = exc
        raise error

    gone: list[weakref.ref[np.ndarray[tuple[int], np.dtype[np.float64]]]] = []
    kept: list[Exception] = []
    try:
        held()
    except ConnectionLost as exc:
        kept.append(exc)
    assert gone[0]() is not None
    assert error_text(kept[0]) == "gone"
    assert gone[0]() is None
    assert error_text(ConnectionLost()) == "ConnectionLost"


async def test_a_store_waits_for_threads_that_still_have_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread is slow to drop what it has copied; the caller is told before."""
    run = pools._WorkItem.run

    def slow(item: pools._WorkItem[object]) -> None:
        run(item)
        threading.Event().wait(0.05)

    async with BlockStore.open(["memory:64KiB"]) as store:
        with monkeypatch.context() as patch:
            patch.setattr(pools._WorkItem, "run", slow)
            await store.put(chain(4), Filled(seed=1).cache, range(4))
        await store.close()
    assert "stay in use" not in caplog.text


@pytest.fixture
def threads() -> Iterator[Threads]:
    with closing(Threads()) as opened:
        yield opened


async def test_what_has_not_begun_is_not_skipped(threads: Threads) -> None:
    """Every thread is busy when it is cancelled: it still runs, and is waited for."""
    go, ended = threading.Event(), []
    busy = [asyncio.create_task(threads.run(partial(go.wait, 10))) for _ in range(8)]
    await asyncio.sleep(0)
    last = asyncio.create_task(threads.run(lambda: ended.append(True)))
    await asyncio.sleep(0)
    last.cancel()
    await asyncio.sleep(0)
    assert not last.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await last
    assert ended
    assert all(await asyncio.gather(*busy))


async def test_an_error_lets_go_of_what_was_copied(threads: Threads) -> None:
    """At once, and not when the garbage collector comes by: it may be a whole store."""
    memory = np.zeros(8)
    held = weakref.ref(memory)
    call = partial(_fail, memory)
    del memory
    gc.disable()
    try:
        with pytest.raises(KeyError):
            await threads.run(call)
        del call
        # The thread lets go of the call when it takes its next one.
        await threads.run(int)
        assert held() is None
    finally:
        gc.enable()


def _fail(memory: object) -> None:
    raise KeyError(id(memory))
