"""Scopes that cancel again and again, at every moment of a use: nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import kvwire
import kvwire_store
from kvwire.aio import run_to_completion
from kvwire.directory import open_directory
from kvwire_certify.conformance.rig import open_descriptors
from tests.directory.records import record
from tests.support.pairs import communicators, connected, until
from tests.support.scopes import in_scope

# Most uses take fewer. What waits for threads takes as many as a busy machine gives it.
TURNS_MAX = 2000


async def _announced(folder: Path) -> None:
    fleet, run = f"file:{folder}/fleet", f"{folder}/run"
    async with kvwire.open(directory=fleet, inspect=run) as comm:
        await comm.listen("127.0.0.1:0")
        comm.announce(role="decode")
        await until(lambda: any(folder.glob("fleet/*.json")))


async def _connected(_: Path) -> None:
    async with connected() as pair, pair.left, pair.right:
        await pair.left.send(1, b"x")
        await pair.right.recv(1)


async def _dialled(_: Path) -> None:
    async with communicators() as (a, b):
        peer = a.peer(str(await b.listen("127.0.0.1:0")))
        await peer.send(1, b"x")
        await (await b.accept()).recv(1)


async def _served(folder: Path) -> None:
    memory, disk = "memory:64KiB", f"disk:{folder}/kv?size=1MiB"
    async with (
        kvwire_store.BlockStore.open([memory, disk]) as store,
        kvwire_store.StoreServer(store, "127.0.0.1:0") as server,
        kvwire_store.BlockStore.open([memory, f"kvwire://{server.address}"]) as client,
    ):
        await client.flush()


async def _watched(folder: Path) -> None:
    directory = open_directory(f"file:{folder}/fleet?interval_s=0.001")
    try:
        await directory.announce(record(1))
        async for _ in directory.watch():
            break
        assert await directory.members()
    finally:
        await run_to_completion(directory.close())


USES: dict[str, Callable[[Path], Awaitable[None]]] = {
    "announced": _announced,
    "connected": _connected,
    "dialled": _dialled,
    "served": _served,
    "watched": _watched,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_whatever_was_open_is_closed(
    use: Callable[[Path], Awaitable[None]], tmp_path: Path
) -> None:
    await use(tmp_path)
    before, tasks = open_descriptors(), asyncio.all_tasks()
    directory = open_directory(f"file:{tmp_path}/fleet")
    cancelled, turns = True, 0
    while cancelled and turns < TURNS_MAX:
        cancelled = await in_scope(turns, lambda: use(tmp_path))
        assert await directory.members() == ()
        turns += 1 + turns // 16
    assert turns > 10
    await until(lambda: asyncio.all_tasks() == tasks)
    assert open_descriptors() == before
    await use(tmp_path)
