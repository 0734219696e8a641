"""Threads of a store: what they return, raise and let go of, and copies in turns."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from kvwire_store.threads import Threads


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
