"""A store beside others: each moves the same bytes; what its operations consist of."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

import kvwire_store
from kvwire.limits import KIB, MIB
from kvwire.memory import pieces
from kvwire_certify.bench.line import HOST
from kvwire_certify.bench.work import Work
from packages.certify.tests.bench import redis
from packages.certify.tests.bench.contenders import does
from packages.certify.tests.bench.counting import Counts, counting
from packages.certify.tests.bench.store import (
    GET,
    LOOKUPS,
    MATCH,
    MATCH_ONE,
    ONE,
    PUT,
    SERVER,
    TIERS,
    StoreBlocks,
    work_of,
)
from packages.certify.tests.bench.store_cases import benchmark
from packages.certify.tests.bench.store_peers import FileBlocks, MemoryBlocks

HAS_OBSTORE = find_spec("obstore") is not None


@pytest.mark.skipif(not HAS_OBSTORE, reason="needs obstore: pip install obstore")
def test_each_tier_has_those_beside_it_that_do_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = benchmark([*TIERS], ["tcp"], ["small"], tmp_path, 4 * MIB)
    assert [(m.name, m.remedy) for m in found.missing] == [
        (redis.PROGRAM, redis.INSTALL)
    ]
    others = {
        f"{case.group} {case.name}": [one.name for one in case.beside]
        for case in found.cases
    }
    for name, expected in {
        "memory 64 KiB put": ["memcpy"],
        "memory 4 KiB match": [],
        "disk 64 KiB put": ["memcpy", "file"],
        "disk 64 KiB put, flushed": ["file"],
        "disk 4 KiB match": [],
        "server over tcp 64 KiB get": ["transfer tcp"],
        "server over tcp 4 KiB match": [],
        "object 64 KiB get of one": ["obstore"],
    }.items():
        assert others[name] == expected
    # Everybody has processes once, whatever they stand beside.
    everybody = {one for case in found.cases for one in case.contenders}
    assert len(everybody) == len({one.name for one in everybody})


@pytest.mark.parametrize(
    "tier",
    [
        pytest.param("memory"),
        pytest.param("server"),
        pytest.param("disk", marks=pytest.mark.slow),
        pytest.param("object", marks=pytest.mark.slow),
    ],
)
def test_everybody_does_every_work(tier: str, tmp_path: Path) -> None:
    if tier == "object" and not HAS_OBSTORE:
        pytest.skip("obstore is not installed: pip install obstore")
    shape = "large" if tier == "object" else "small"  # an object for each block: few
    cases = benchmark([tier], ["tcp"], [shape], tmp_path, 4 * MIB).cases
    for contender in dict.fromkeys(one for case in cases for one in case.contenders):
        with contender.start() as pair:
            for case in cases:
                if contender in case.contenders:
                    verb = case.work.verb
                    looked = {MATCH: LOOKUPS, MATCH_ONE: LOOKUPS, ONE: case.work.count}
                    does(pair, case.work, looked.get(verb, 1))


@pytest.mark.parametrize("peer", ["memory", "file"])
async def test_other_bytes_than_were_put_are_found(peer: str, tmp_path: Path) -> None:
    with ExitStack() as opened:
        of = MemoryBlocks() if peer == "memory" else FileBlocks(tmp_path, opened)
        done = work_of(GET, "small", 4 * MIB)
        await of.ready(done, None)
        await of.fill(done)
        await of.get(done)
        await of.verify(done)
        of.flat(done).block(done.count - 1)[1][0] ^= 1
        with pytest.raises(RuntimeError, match="other bytes than put had stored"):
            await of.verify(done)


# --- what an operation at a server consists of ----------------------------------------

# Python calls and frames, both sides, as in test_counts. 32 gets or 8 puts cost a
# CREDIT, and an index for clients of the host takes ten calls of a put.
CEILINGS: Final = {
    (PUT, 64 * KIB): (219, 2.125),
    (ONE, 64 * KIB): (153, 2.04),
    (PUT, MIB): (481, 6),
    (GET, MIB): (455, 6),
}
_NOT_COMPILED: Final = 20
_MARGIN: Final = 1.03
_RUNS: Final = 6


async def count(verb: str, nbytes: int) -> Counts:
    """Count one block's put or get at a server, over tcp."""
    # Memory in front has room for one set, and gets its copies behind the caller.
    of_set = 40 if verb == ONE else 1
    work = Work(verb=verb, nbytes=nbytes, count=40, layers=16, blocks=of_set)
    async with AsyncExitStack() as opened:
        opening = kvwire_store.BlockStore.open(["memory:64MiB"])
        store = await opened.enter_async_context(opening)
        server = kvwire_store.StoreServer(store, f"{HOST}:0")
        address = (await opened.enter_async_context(server)).address
        blocks = StoreBlocks({"tier": SERVER}, opened)
        for _ in range(2):  # the first one warms up
            await blocks.ready(work, f"{address.host}:{address.port}")
            with counting() as tally:
                await blocks.move(work)
    return tally.of_each(work.count)


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the ceilings are those of Python 3.11"
)
@pytest.mark.parametrize(("verb", "nbytes"), CEILINGS)
def test_a_block_at_a_server_is_no_dearer_than_it_was(
    verb: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWIRE_REQUIRE", "tcp")
    calls, frames = (most * _MARGIN for most in CEILINGS[verb, nbytes])
    if pieces.compiled is None:
        calls += _NOT_COMPILED
    for _ in range(_RUNS):
        counts = asyncio.run(count(verb, nbytes))
        if counts.calls <= calls and sum(counts.frames.values()) <= frames:
            break
    assert counts.calls <= calls
    assert sum(counts.frames.values()) <= frames
