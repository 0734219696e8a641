"""An object tier over the S3 protocol: moto's server, and a proxy that does wrong.

`make test-s3` installs the server, 140 MB, in an environment of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

pytest.importorskip("obstore", reason="needs obstore: pip install obstore")

import obstore.store

from kvwire import KVSpec
from kvwire.limits import MIB
from kvwire_store import BlockStore
from kvwire_store.tiers.object import ObjectTier
from packages.store.tests.contract import expect_shared, tier_of
from tests.support.caches import Filled, chain
from tests.support.pairs import until
from tests.support.servers import free_port, s3_server
from tests.support.waiting import PATIENCE_S

MEMORY = "memory:64MiB?slab=32MiB"

# Its threads start with the first request of a process, and stay.
obstore.put(obstore.store.MemoryStore(), "first", b"")


@pytest.fixture
def server() -> Iterator[str]:
    with s3_server() as running:
        url = f"http://127.0.0.1:{running.port}"
        assert (
            httpx.put(f"{url}/cache", content=b"", timeout=PATIENCE_S).status_code
            == 200
        )
        yield url


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")


def tier(url: str, timeout_s: float = 10) -> str:
    return f"object:s3://cache/p?endpoint={url}&region=us-east-1&timeout={timeout_s:g}"


Fault = Callable[[Request], Response | None]


@asynccontextmanager
async def proxy(server: str, fault: Fault) -> AsyncIterator[str]:
    """A way to the server on which some requests get what ``fault`` says."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:

        async def forward(request: Request) -> Response:
            if (wrong := fault(request)) is not None:
                return wrong
            path = request.url.path + (
                "?" + request.url.query if request.url.query else ""
            )
            came = await client.request(
                request.method,
                server + path,
                headers=request.headers.raw,
                content=await request.body(),
            )
            return Response(came.content, came.status_code, dict(came.headers))

        methods = ["GET", "PUT", "HEAD", "POST", "DELETE"]
        app = Starlette(routes=[Route("/{path:path}", forward, methods=methods)])
        port = free_port()
        config = uvicorn.Config(app, port=port, log_level="critical", lifespan="off")
        running = uvicorn.Server(config)
        serving = asyncio.create_task(running.serve())
        await until(lambda: running.started)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.should_exit = True
            await serving


@pytest.mark.parametrize(
    ("refused", "status", "times", "lands"),
    [
        pytest.param("-", 400, 0, True, id="all taken"),
        pytest.param("partNumber", 503, 1, True, id="each throttled once"),
        pytest.param("partNumber=2", 400, 99, False, id="one refused"),
        # Ends by the tier's deadline, and the others by what they are told.
        pytest.param("partNumber=2", 503, 99, False, id="one throttled for long"),
        pytest.param("^uploadId", 403, 99, False, id="not completed"),
    ],
)
async def test_a_large_block_goes_in_parts(
    server: str,
    refused: str,
    status: int,
    times: int,
    lands: bool,
) -> None:
    """If one is refused, nothing of the others stays there, and nothing is promised."""
    spec = KVSpec(layers=3, kv_heads=8, head_dim=128, block_tokens=1024)
    assert spec.block_bytes == 12 * MIB
    source, target = Filled(2, spec, seed=3), Filled(2, spec)
    asked: Counter[str] = Counter()

    def fault(request: Request) -> Response | None:
        asked[what := f"{request.method} {request.url}"] += 1
        wrong = request.method != "DELETE" and re.search(refused, request.url.query)
        if not wrong or asked[what] > times:
            return None
        return Response("<Error><Code>No</Code></Error>", status)

    async with proxy(server, fault) as url:
        address = tier(url, timeout_s=6 if status == 503 and not lands else 30)
        async with BlockStore.open([MEMORY, address]) as store:
            tier_of(store, ObjectTier).part_bytes = 5 * MIB
            put = await store.put(chain(2), source.cache, range(2))
        async with BlockStore.open([MEMORY, address]) as store:
            tier_of(store, ObjectTier).part_bytes = 5 * MIB
            got = await store.get(chain(2), target.cache, range(2))
    parts = set(re.findall(r"partNumber=\d", " ".join(asked)))
    assert parts <= {f"partNumber={part}" for part in (1, 2, 3)}
    # Where one is refused it may be before the others were on their way.
    assert len(parts) == 3 or refused in parts
    assert put.complete == got.complete == lands
    # The head for `find`, and three ranges of each block.
    if lands:
        gets = [one for one in asked if one.startswith("GET ")]
        assert [asked[one] for one in gets] == [5, 5]
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        left = await client.get(f"{server}/cache?uploads")
    assert "<Upload>" not in left.text
    for here, there in zip(source.tensors, target.tensors, strict=True):
        assert (here.tobytes() == there.tobytes()) == lands


@pytest.mark.parametrize("ranges", [0, 1])
async def test_an_object_that_vanishes_after_it_was_found_is_missing(
    server: str, ranges: int
) -> None:
    """Its bucket expires it, before or between its ranges. The other block lands."""
    spec = KVSpec(layers=3, kv_heads=8, head_dim=128, block_tokens=1024)
    source, target = Filled(2, spec, seed=3), Filled(2, spec)
    asked: list[str] = []
    gone: set[str] = set()

    def fault(request: Request) -> Response | None:
        path = request.url.path
        if request.method == "POST":  # a new one begins
            gone.discard(path)
        if "range" in request.headers:
            asked.append(path)
            # It was found by a range of its own.
            if path == asked[0] and asked.count(path) == 2 + ranges:
                gone.add(path)
        return Response(NO_KEY, 404) if path in gone else None

    async with proxy(server, fault) as url:
        address = tier(url, timeout_s=PATIENCE_S)
        async with BlockStore.open([MEMORY, address]) as store:
            assert (await store.put(chain(2), source.cache, range(2))).complete
        asked.clear()
        async with BlockStore.open([MEMORY, address]) as store:
            tier_of(store, ObjectTier).part_bytes = 5 * MIB
            got = await store.get(chain(2), target.cache, range(2))
            ((_, lost),) = got.missing
            for here, there in zip(source.tensors, target.tensors, strict=True):
                assert (here[1 - lost] == there[1 - lost]).all()
            assert await store.match(chain(2), target.cache) == lost
            assert store.report[address] == ""
            assert (await store.put(chain(2), source.cache, range(2))).complete
            assert (await store.get(chain(2), target.cache, range(2))).complete


NO_KEY = "<Error><Code>NoSuchKey</Code></Error>"
SLOW_DOWN = "<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"


def throttles(times: int) -> Fault:
    """Each object's first requests are refused as S3 does where one asks too fast."""
    seen: Counter[tuple[str, str]] = Counter()

    def fault(request: Request) -> Response | None:
        seen[request.method, request.url.path] += 1
        if seen[request.method, request.url.path] > times:
            return None
        return Response(SLOW_DOWN, 503, media_type="application/xml")

    return fault


async def test_a_bucket_that_throttles_is_asked_again(server: str) -> None:
    async with proxy(server, throttles(2)) as url:
        await expect_shared(tier(url))


async def test_a_bucket_with_versions(server: str) -> None:
    """What is deleted is not found, though the bucket has its version still."""
    enabled = (
        "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    )
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        done = await http.put(f"{server}/cache?versioning", content=enabled.encode())
        assert done.status_code == 200
    await expect_shared(tier(server))
    cache = Filled(4, seed=1).cache
    async with BlockStore.open([MEMORY, tier(server)]) as store:
        for _ in range(2):
            assert (await store.put(chain(4, "v"), cache, range(4))).complete
            await store.delete(chain(4, "v"), cache)
            assert await store.match(chain(4, "v"), cache) == 0
