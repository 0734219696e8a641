"""Threads of a store: what they return, raise and let go of, and copies in turns."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.store.threads import Threads, copy_in_turns


@pytest.fixture
def threads() -> Iterator[Threads]:
    with closing(Threads()) as opened:
        yield opened


async def test_a_call_returns_and_raises_what_it_does(threads: Threads) -> None:
    assert await threads.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(OSError, match="No space"):
        await threads.run(partial(_raise, OSError(errno.ENOSPC, "No space")))


async def test_the_loop_is_free_meanwhile(threads: Threads) -> None:
    """One thread waits for another one, and both for the loop."""
    first, second = threading.Event(), threading.Event()

    def one() -> bool:
        first.set()
        return second.wait(10)

    waiting = asyncio.create_task(threads.run(one))
    assert await threads.run(partial(first.wait, 10))
    second.set()
    assert await waiting


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


async def test_closed_threads_refuse() -> None:
    threads = Threads()
    threads.close()
    threads.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        await threads.run(int)


@given(data=st.data())
def test_a_copy_in_turns_is_a_copy(data: st.DataObject) -> None:
    """Whatever the pieces on either side, and wherever a turn ends in them."""
    nbytes = 3 * MIB + data.draw(st.integers(0, 5))
    source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    ends = [_cut(array, data) for array in (source, target)]
    copy_in_turns(*ends)
    assert np.array_equal(source, target)


def _cut(
    array: np.ndarray[tuple[int], np.dtype[np.uint8]], data: st.DataObject
) -> Fragments:
    """An array as fragments with borders here and there."""
    places = data.draw(st.sets(st.integers(1, array.size - 1), max_size=6))
    borders = np.array([0, *sorted(places), array.size], np.uint64)
    return Fragments(
        borders[:-1] + np.uint64(array.ctypes.data),
        np.diff(borders),
        owner=array,
        writable=True,
    )


def _raise(error: Exception) -> None:
    raise error


def _fail(memory: object) -> None:
    raise KeyError(id(memory))
