"""Every tier keeps every promise of the kit: one test for each check.

One of your own does too if ``TIER=mine:place`` names it in the environment.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="needs obstore: pip install obstore")

import obstore.store

from kvwire.directory import open_directory
from kvwire_certify.conformance.check import Check
from kvwire_certify.conformance.runner import run_one
from kvwire_certify.tiers import TierRig, checks_with, opener
from kvwire_store import BlockStore, StoreServer
from kvwire_store.tiers.object_format import path_of
from packages.store.tests.tiers.services import Played
from tests.support.servers import Server, free_port, redis_server

# Its threads start with the first request of a process, and stay.
obstore.put(obstore.store.MemoryStore(), "first", b"")

OWN = os.environ.get("TIER", "")
Rig = Callable[[Path], AbstractAsyncContextManager[TierRig]]
KINDS: dict[str, Rig] = {}
CASES: list[Any] = []


def kind(name: str, *can: str) -> Callable[[Rig], Rig]:
    """Have the decorated rig checked; ``can`` has what it can do to its tier."""

    def add(rig: Rig) -> Rig:
        checks = checks_with(away="away" in can, damage="damage" in can)
        CASES.extend(pytest.param(name, c, id=f"{name}-{c.id}") for c in checks)
        KINDS[name] = rig
        return rig

    return add


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def on_disk(codec: str) -> Rig:
    @asynccontextmanager
    async def rig(folder: Path) -> AsyncIterator[TierRig]:
        def damage(_: bytes, image: bytes) -> None:
            flip(folder / "images", (folder / "images").read_bytes().index(image))

        address = f"disk:{folder}?size=64MiB&slab=1MiB{codec}"
        yield TierRig(opener(address), damage=None if codec else damage)

    return rig


def as_objects(codec: str) -> Rig:
    @asynccontextmanager
    async def rig(folder: Path) -> AsyncIterator[TierRig]:
        def damage(key: bytes, _: bytes) -> None:
            flip(folder / path_of(key), -1)

        yield TierRig(opener(f"object:file://{folder}?{codec}"), damage=damage)

    return rig


kind("disk", "damage")(on_disk(""))
kind("disk-coded")(on_disk("&codec=zstd-planes"))
kind("object", "damage")(as_objects(""))
kind("object-coded", "damage")(as_objects("codec=zstd-planes"))


@kind("values", "away", "damage")
@asynccontextmanager
async def _(folder: Path) -> AsyncIterator[TierRig]:
    service = Played()
    yield TierRig(service.open, service.away, service.damage)


@kind("redis", "away", "damage")
@asynccontextmanager
async def _(folder: Path) -> AsyncIterator[TierRig]:
    redis = pytest.importorskip("redis", reason="needs redis: pip install redis")
    with redis_server() as server:

        def damage(key: bytes, image: bytes) -> None:
            with redis.Redis("127.0.0.1", server.port) as plain:
                name = f"kvwire:{path_of(key)}"
                plain.setrange(name, plain.strlen(name) - 1, bytes([image[-1] ^ 1]))

        yield TierRig(
            opener(f"redis://127.0.0.1:{server.port}"), lambda: gone(server), damage
        )


@asynccontextmanager
async def gone(server: Server) -> AsyncIterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


class Served:
    """A store that is served on a port, now and then."""

    def __init__(self, store: BlockStore) -> None:
        self.store, self.port = store, free_port()
        self.server: StoreServer | None = None

    async def begin(self) -> None:
        where = f"127.0.0.1:{self.port}"
        self.server = StoreServer(self.store, where, berth_bytes=20 << 20)
        await self.server.__aenter__()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        assert self.server is not None
        await self.server.close()
        try:
            yield
        finally:
            await self.begin()


@kind("remote", "away")
@asynccontextmanager
async def _(folder: Path) -> AsyncIterator[TierRig]:
    """A store server, which has a memory tier alone."""
    async with BlockStore.open(["memory:64MiB?slab=32MiB"]) as store:
        served = Served(store)
        await served.begin()
        where = f"kvwire://127.0.0.1:{served.port}?timeout=5"
        yield TierRig(opener(where), served.away)


@kind("sharded")
@asynccontextmanager
async def _(folder: Path) -> AsyncIterator[TierRig]:
    directory = f"file:{folder}?interval_s=0.05"
    memory = ["memory:64MiB?slab=32MiB"]
    async with BlockStore.open(memory) as one, BlockStore.open(memory) as two:
        servers = [
            StoreServer(store, "127.0.0.1:0", labels={}, directory=directory)
            for store in (one, two)
        ]
        async with servers[0], servers[1]:
            watching = open_directory(directory)
            async with aclosing(watching.watch("role=store")) as members:
                for _ in servers:
                    await anext(members)
            yield TierRig(opener(f"kvwire://role=store?directory={directory}"))


@kind("third-party")
@asynccontextmanager
async def _(folder: Path) -> AsyncIterator[TierRig]:
    reason = "examples/third_party_tier is not installed; `make test` does it"
    pytest.importorskip("kvwire_sqlite", reason=reason)
    yield TierRig(opener(f"sqlite:{folder}/blocks.db"))


if OWN:

    @kind("own")
    @asynccontextmanager
    async def _(folder: Path) -> AsyncIterator[TierRig]:
        yield TierRig(opener(OWN))


@pytest.mark.parametrize(("name", "check"), CASES)
async def test_tier(name: str, check: Check, tmp_path: Path) -> None:
    async with KINDS[name](tmp_path) as rig:
        result = await run_one(lambda: rig, check)
    assert result.passed, result.reason
