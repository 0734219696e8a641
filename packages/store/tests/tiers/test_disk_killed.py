"""What a disk tier still has when its process is killed, and its log loses its end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvwire_store import BlockStore
from tests.support.caches import Filled, chain
from tests.support.runs import Beside, beside

# It flushes one chain, acknowledges another one, and waits to be killed.
_KILLED = """\
import asyncio, sys
from kvwire_store import BlockStore
from tests.support.caches import Filled, chain

async def main(path):
    source, ids = Filled(seed=1).cache, list(range(16))
    tiers = ["memory:64KiB", f"disk:{path}?size=1MiB"]
    async with BlockStore.open(tiers) as store:
        assert (await store.put(chain(16, "flushed"), source, ids)).complete
        await store.flush()
        assert (await store.put(chain(16, "put"), source, ids)).complete
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


def _zeroed(log: bytes) -> bytes:
    return log[:-4096] + bytes(4096)


def _half(log: bytes) -> bytes:
    return log[: len(log) // 2]


def _longer(log: bytes) -> bytes:
    return log + log[-512:]


@pytest.mark.parametrize(
    "tear",
    [None, _zeroed, _half, _longer, lambda log: log[:-1], lambda _: b""],
    ids=["whole", "zeroed", "half", "longer", "a byte short", "gone"],
)
async def test_what_was_flushed_is_there_after_a_kill(
    tmp_path: Path, tear: Callable[[bytes], bytes] | None
) -> None:
    """With any end of the log; and what was acknowledged, if the log is whole."""
    async with beside("-c", _KILLED, str(tmp_path), kind=Beside) as child:
        assert await child.line() == "ready"
        child.signal(signal.SIGKILL)
        await child.wait()
    log = tmp_path / "index.sqlite-wal"
    if tear is not None:
        log.write_bytes(tear(log.read_bytes()))
    source, ids = Filled(seed=1), list(range(16))
    async with BlockStore.open(["memory:64KiB", f"disk:{tmp_path}?size=1MiB"]) as store:
        for name, sure in (("flushed", True), ("put", tear is None)):
            target = Filled(16)
            got = await store.get(chain(16, name), target.cache, ids)
            assert got.complete or not sure
            here = got.landed.ids().tolist()
            assert np.array_equal(target.tokens(here), source.tokens(here))
            # And it takes them again.
            assert (await store.put(chain(16, name), source.cache, ids)).complete
