"""On a GPU: two processes that share it, over each transport; and one whose GPU fails.

NCCL refuses two ranks on one GPU unless they seem to be on two hosts: each process is
given a host's name of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from kvwire.backend.registry import availability
from tests.gpu.devices import Gpu
from tests.support.runs import Beside, beside

pytestmark = [pytest.mark.gpu]


@contextlib.asynccontextmanager
async def python(*words: str, **env: str) -> AsyncIterator[Beside]:
    async with beside("-m", *words, kind=Beside, env={**os.environ, **env}) as process:
        yield process


async def said(process: Beside) -> list[str]:
    """All lines that it still prints, once it has ended well."""
    lines = await process.last_words()
    assert await process.wait() == 0
    return lines.splitlines()


@pytest.mark.parametrize("transport", ["tcp", "local", "ucx", "nixl", "nccl"])
async def test_a_cache_goes_from_one_process_to_the_other(transport: str) -> None:
    Gpu("torch")
    found = availability(transport)
    if not found.available:
        pytest.skip(f"{transport}: {found.reason}")
    nccl = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    async with python("tests.gpu.side", transport, NCCL_HOSTID="a", **nccl) as consumer:
        address = await consumer.line()
        async with python(
            *("tests.gpu.side", transport, address), NCCL_HOSTID="b", **nccl
        ) as producer:
            both = await asyncio.gather(
                said(producer), said(consumer), return_exceptions=True
            )
    assert list(both) == [[transport], [transport]]


async def test_a_gpu_that_fails_ends_transfers_and_nothing_else() -> None:
    Gpu("torch")
    async with python("tests.gpu.broken") as process:
        lines = await said(process)
    first, sent, is_drained, second, last = lines
    for missing in (first, second):
        assert "64 blocks" in missing
        assert "assert" in missing, "what the driver says of it"
    # No copy was under way when it failed.
    assert (sent, is_drained, last) == ("False", "True", "alive")
