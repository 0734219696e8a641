"""``python -m tests.bench.objects``: what packing blocks into one object would win.

16 MiB of blocks, each an object of its own or all of them in one, on moto's server and
in a directory, in turns. Set S3_SERVER as ``make test-s3`` does.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import httpx
import obstore
from obstore.store import from_url

from kvwire.limits import KIB, STORE_BATCH_BYTES, STORE_OBJECT_REQUESTS
from tests.support.servers import s3_server

ROUNDS: Final = 5
SIZES_KIB: Final = (64, 512, 2048)
POINTER_BYTES: Final = 128


async def _each(work: Callable[[int], Awaitable[None]], count: int) -> None:
    left = iter(range(count))

    async def lane() -> None:
        for at in left:
            await work(at)

    await asyncio.gather(*(lane() for _ in range(STORE_OBJECT_REQUESTS)))


async def measure(name: str, store: Any, size: int) -> None:
    """Print milliseconds for 16 MiB, medians of all rounds, and this process's CPU."""
    data, count = os.urandom(STORE_BATCH_BYTES), STORE_BATCH_BYTES // size

    async def put(what: str, raw: bytes) -> None:
        await obstore.put_async(store, what, raw, use_multipart=False)

    async def get(what: str, start: int, nbytes: int) -> None:
        await obstore.get_range_async(store, what, start=start, length=nbytes)

    def part(at: int) -> bytes:
        return data[at * size :][:size]

    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "put, an object each": lambda: _each(lambda at: put(f"{at}", part(at)), count),
        "put, a pack": lambda: put("pack", data),
        "pointers to a pack": lambda: _each(
            lambda at: put(f"to/{at}", data[:POINTER_BYTES]), count
        ),
        "get, an object each": lambda: _each(lambda at: get(f"{at}", 0, size), count),
        "get, a pack": lambda: get("pack", 0, STORE_BATCH_BYTES),
        "get, ranges of a pack": lambda: _each(
            lambda at: get("pack", at * size, size), count
        ),
    }
    walls: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for way, call in ways.items():
            begun, cpu = time.perf_counter(), time.process_time()
            await call()
            walls[way].append(time.perf_counter() - begun)
            cpus[way].append(time.process_time() - cpu)
    for way in ways:
        wall, busy = (statistics.median(of[way]) * 1e3 for of in (walls, cpus))
        print(f"{name:9} {size // KIB:5} KiB  {way:22} {wall:8.0f} ms, CPU {busy:6.0f}")


async def main() -> None:
    """Measure every size on both."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "somebody")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "something")
    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient() as client:
            (await client.put(f"{url}/cache")).raise_for_status()
        config = {"endpoint": url, "region": "us-east-1"}
        options = {"allow_http": True}
        s3 = from_url("s3://cache/p", config=config, client_options=options)
        for kib in SIZES_KIB:
            await measure("moto", s3, kib * KIB)
            await measure("directory", from_url(f"file://{folder}"), kib * KIB)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
