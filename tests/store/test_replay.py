"""A replay has the hits, the evictions and the bytes of a store that really ran."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvwire import BlockStore, KVSpec, PagedCache, StoreServer, UsageError
from kvwire.store.counters import StoreCounters
from kvwire.store.replay import Replay, ReplayReport
from kvwire.store.tiers.base import TierStats
from kvwire.store.trace import TraceLine, TraceOp, read_trace
from tests.support.pairs import until

SPEC = KVSpec(layers=2, kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")


async def replayed(path: Path, tiers: list[str], **options: Any) -> ReplayReport:
    replay = Replay(tiers, **options)
    with path.open("rb") as lines:
        for line in read_trace(path, lines):
            await replay.play(line)
    return replay.report()


def the_only(folder: Path) -> Path:
    (path,) = folder.glob("*.jsonl")
    return path


def new_cache() -> PagedCache:
    tensors = [np.ones((64, 2, 16, 1, 64), np.float16) for _ in range(2)]
    return PagedCache(SPEC, tensors)


def prompts(count: int) -> Iterator[list[bytes]]:
    """Agents that come back to a few prefixes, and documents that are read once."""
    rng = np.random.default_rng(5)
    for number in range(count):
        agent = min(int(rng.zipf(1.3)), 60)
        shared = [b"%06d%02d" % (agent, at) for at in range(rng.integers(4, 30))]
        own = [b"%06d%02d" % (number + 100, at) for at in range(rng.integers(0, 12))]
        yield shared + own


async def serve(store: BlockStore, cache: PagedCache, hashes: list[bytes]) -> None:
    """Do what an engine does with a prompt, of which it has some blocks itself."""
    blocks = list(range(len(hashes)))
    own = len(hashes) // 4
    found = await store.match(hashes, cache)
    if found > own:
        await store.get(hashes[own:found], cache, blocks[own:found])
    if found < len(hashes):
        await store.put(hashes[found:], cache, blocks[found:])


def of_tier(stats: TierStats) -> tuple[int, int, int]:
    return stats.blocks, stats.evicted_blocks, stats.used_bytes


@pytest.mark.parametrize("evict", ["lru", "s3fifo"])
@pytest.mark.parametrize("write", ["through", "back"])
async def test_a_recorded_run_is_replayed_exactly(
    tmp_path: Path, evict: str, write: Any
) -> None:
    """Also its evictions: the tiers are much smaller than what is put."""
    tiers = [
        f"memory:1MiB?evict={evict}",
        f"disk:{tmp_path}/disk?size=4MiB&evict={evict}",
    ]
    cache = new_cache()
    record = f"{tmp_path}/traces"
    async with BlockStore.open(tiers, write=write, record=record) as store:
        for hashes in prompts(400):
            await serve(store, cache, hashes)
        await store.put([b"%08d" % 0], cache, [0])
        await store.delete([b"%08d" % 0], cache)
        counters = msgspec.structs.asdict(store.counters)
        real = [of_tier(one) for one in store.stats().values()]
        reads = [one.read_blocks for one in store.stats().values()]
    path = the_only(Path(record))
    report = await replayed(path, tiers, write=write)
    asked = report.hit_blocks / report.asked_blocks
    assert report.hit_rate == asked
    assert 0.3 < asked < 0.9
    assert real[1][1] > 100, "the disk has evicted nothing"
    assert abs(report.counters.hit_blocks - counters["hit_blocks"]) <= (
        0.01 * counters["hit_blocks"]
    )
    if write == "through":
        assert msgspec.structs.asdict(report.counters) == counters
        there = [(t.blocks, t.evicted_blocks, t.used_bytes) for t in report.tiers]
        assert there == real
        assert report.tiers[1].hit_blocks == reads[1]


async def test_a_larger_store_is_asked_for_what_the_recorded_one_lacked(
    tmp_path: Path,
) -> None:
    cache = new_cache()
    record = f"{tmp_path}/traces"
    hashes = [b"%08d" % number for number in range(8)]
    async with BlockStore.open(["memory:1MiB"], record=record) as store:
        await store.put(hashes, cache, range(8))
        await store.delete(hashes[4:], cache)
        assert await store.match(hashes, cache) == 4
        await store.get(hashes[2:4], cache, [2, 3])
        assert await store.match([b"%08d" % 9], cache) == 0
    path = the_only(Path(record))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    put, delete, load, nothing = lines
    assert [one["op"] for one in lines] == ["put", "delete", "load", "load"]
    assert put["block_bytes"] == SPEC.block_bytes
    assert put["input_length"] == 8 * 16
    assert delete["hash_ids"] == put["hash_ids"][4:]
    # What it would have asked for, had all of it been found.
    assert load["hash_ids"] == put["hash_ids"][2:]
    assert len(nothing["hash_ids"]) == 1


async def test_a_call_without_blocks_is_not_recorded(tmp_path: Path) -> None:
    cache = new_cache()
    async with BlockStore.open(["memory:1MiB"], record=str(tmp_path)) as store:
        assert await store.match([], cache) == 0
        await store.get([], cache, [])
        await store.put([], cache, [])
        await store.delete([], cache)
    assert the_only(tmp_path).read_bytes() == b""


async def test_a_recording_is_bounded_and_the_store_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = new_cache()
    with caplog.at_level(logging.WARNING, "kvwire.store"):
        async with BlockStore.open(
            ["memory:1MiB"], record=f"{tmp_path}?size=4KiB"
        ) as store:
            for hashes in prompts(60):
                await serve(store, cache, hashes)
    path = the_only(tmp_path)
    assert 2048 < path.stat().st_size <= 4096
    assert "its directory is full; give record= a larger ?size=" in caplog.text
    assert caplog.text.count("has stopped: ") == 1
    assert (await replayed(path, ["memory:1MiB"])).lines


@pytest.mark.parametrize(
    "record", ["?size=1GiB", "/proc/none/such", "traces?evict=lru", "t?size=x"]
)
async def test_a_recording_that_cannot_be_is_refused(
    record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"record|tier"):
        await BlockStore.open(["memory:1MiB"], record=record)


async def test_a_server_records_what_its_clients_read_in_place(tmp_path: Path) -> None:
    cache = new_cache()
    hashes = [b"%08d" % number for number in range(8)]
    record = f"{tmp_path}/traces"
    async with (
        BlockStore.open(["memory:4MiB"], record=record) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        BlockStore.open([f"kvwire://{server.address}"]) as client,
        BlockStore.open([f"kvwire://{server.address}"]) as other,
    ):
        await client.put(hashes, cache, range(8))
        assert (await other.get(hashes, cache, range(8))).complete
        await until(lambda: store.counters.hit_blocks == 8)
    path = the_only(Path(record))
    report = await replayed(path, ["memory:4MiB"])
    assert report.counters.stored_blocks == 8
    assert report.hit_blocks == 8


async def test_a_published_trace_is_prompts(tmp_path: Path) -> None:
    """Leading blocks are got and the others put; unknown fields are ignored."""
    path = tmp_path / "trace.jsonl"
    head = '"input_length": 1024, "output_length": 5'
    path.write_text(
        f'{{"timestamp": 0, {head}, "hash_ids": [0, 1, 2, 3]}}\n'
        f'{{"timestamp": 100, {head}, "hash_ids": [0, 1, 9, 3], "turn": 2}}\n'
        "\n"
        f'{{"timestamp": 2500, {head}, "hash_ids": []}}\n'
    )
    tiers = ["memory:1MiB", "disk:x?size=4MiB"]
    report = await replayed(path, tiers, block_bytes=4096)
    assert (report.lines, report.accesses, report.asked_blocks) == (3, 8, 8)
    assert report.hit_blocks == 2
    assert report.span_s == 2.5
    assert report.counters == StoreCounters(
        puts=2,
        gets=1,
        stored_blocks=5,
        present_blocks=1,
        hit_blocks=2,
        put_bytes=6 * 4096,
        got_bytes=2 * 4096,
    )
    memory, disk = report.tiers
    assert (memory.hit_blocks, memory.read_bytes) == (2, 2 * 4096)
    assert memory.written_bytes == disk.written_bytes == 5 * 4096
    assert (disk.name, disk.blocks) == ("disk:x?size=4MiB", 5)
    assert sum(p.asked_blocks for p in report.timeline) == 8
    assert not (tmp_path / "x").exists()


async def test_a_timeline_is_bounded_and_complete(tmp_path: Path) -> None:
    replay = Replay(["memory:1MiB"], block_bytes=4096)
    for number in range(1000):
        await replay.play(
            TraceLine(
                timestamp=number * number,
                input_length=1,
                output_length=1,
                hash_ids=[number % 300 if number % 3 else 7],
            )
        )
    report = replay.report()
    points = report.timeline
    assert 32 < len(points) <= 128
    assert sum(p.asked_blocks for p in points) == 1000
    assert sum(p.hit_blocks[0] for p in points) == report.hit_blocks > 0
    assert sum(p.evicted_blocks[0] for p in points) == report.tiers[0].evicted_blocks
    assert points[-1].time_s - report.part_s <= report.span_s <= points[-1].time_s
    assert all(p.time_s % report.part_s == 0 for p in points)


async def test_blocks_of_tenants_expire_by_the_time_of_the_trace() -> None:
    replay = Replay(["memory:1MiB"], tenants=["acme?ttl=60"], block_bytes=4096)

    def line(seconds: float, **fields: Any) -> TraceLine:
        return TraceLine(
            timestamp=seconds * 1e3,
            input_length=0,
            output_length=0,
            hash_ids=[1, 2],
            **fields,
        )

    await replay.play(line(0, tenant="acme"))
    await replay.play(line(59, tenant="acme", op=TraceOp.GET))
    assert replay.report().hit_blocks == 2
    await replay.play(line(61, tenant="acme", op=TraceOp.GET))
    assert replay.report().hit_blocks == 2
    with pytest.raises(UsageError, match="tenant='other': the tenants are acme"):
        await replay.play(line(62, tenant="other"))


async def test_what_a_line_does(tmp_path: Path) -> None:
    replay = Replay(["memory:1MiB?slab=16KiB"], block_bytes=4096)

    async def play(op: TraceOp, *ids: int) -> int:
        before = replay.report().hit_blocks
        line = TraceLine(
            timestamp=0, input_length=0, output_length=0, hash_ids=list(ids), op=op
        )
        await replay.play(line)
        return replay.report().hit_blocks - before

    await play(TraceOp.PUT, 1, 2, 3, 4)
    await play(TraceOp.DELETE, 2)
    assert await play(TraceOp.GET, 1, 2, 3, 4) == 3
    assert await play(TraceOp.LOAD, 1, 2, 3, 4) == 1
    assert await play(TraceOp.REQUEST, 1, 2, 3, 4) == 1
    assert await play(TraceOp.LOAD, 1, 2, 3, 4) == 4
    # Touched, so that others go first.
    await play(TraceOp.PUT, *range(10, 262))
    await play(TraceOp.TOUCH, 1, 2, 3, 4)
    await play(TraceOp.PUT, *range(300, 320))
    assert await play(TraceOp.GET, 1, 2, 3, 4) == 4
    assert replay.report().tiers[0].evicted_blocks == 20


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: "),
        ('{"timestamp": 0}', "missing required field `input_length`"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}',
            r"`int` >= 0.*hash_ids",
        ),
        (
            '{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[],"op":"pin"}',
            r"'pin' - at `\$.op`",
        ),
    ],
)
def test_a_line_that_is_none_is_named(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(UsageError, match=why), path.open("rb") as lines:
        list(read_trace(path, lines))


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        (["disk:x?size=1GiB"], "a replay takes memory:SIZE first"),
        (["memory:1MiB", "redis://here"], "also represent a server's tiers"),
        (
            ["memory:1MiB", "disk:x?size=1GiB&codec=zstd-planes"],
            "a replay takes no codec=",
        ),
        (["memory:1MiB?sync=put"], "unknown option 'sync'"),
        (["memory:1MiB?slab=64KiB"], "has no room in a slab of 65536 bytes"),
    ],
)
async def test_tiers_that_cannot_be_replayed_are_refused(
    tiers: list[str], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        await Replay(tiers, block_bytes=1 << 17).play(
            TraceLine(timestamp=0, input_length=0, output_length=0, hash_ids=[1])
        )


async def test_the_size_of_a_block_has_to_be_known() -> None:
    with pytest.raises(UsageError, match="does not give the block size: pass it"):
        await Replay(["memory:1MiB"]).play(
            TraceLine(timestamp=0, input_length=0, output_length=0, hash_ids=[1])
        )
