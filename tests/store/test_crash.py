"""A process that is killed at any moment loses nothing that was complete.

Children are killed by SIGKILL in front of a system call, or after half of it. Which
call is drawn from a seed; set ``KVWIRE_CRASH_SEED`` to try other ones.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvwire import BlockStore
from tests.store.caches import Filled
from tests.store.crash_child import BLOCKS, CHAINS, SIZE, name_of
from tests.store.files import Killer, disk, store_on

SEED = int(os.environ.get("KVWIRE_CRASH_SEED", "1"))
KILLS = 12
NEVER = 10**6
IDS = list(range(BLOCKS))
# Of the five chains that have room, one may have lost a slot to what came after.
SURE = 4


def run_child(directory: Path, kill_at: int, torn: bool) -> list[str]:
    """The lines a child has printed before it was killed."""
    how = [str(directory), str(kill_at), "torn" if torn else "whole"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.crash_child", *how],
        capture_output=True,
        text=True,
        check=False,
    )
    expected = 0 if kill_at == NEVER else -signal.SIGKILL
    assert done.returncode == expected, done.stderr
    return done.stdout.split("\n")[:-1]


async def check_what_is_left(directory: Path, complete: list[int]) -> None:
    """Complete puts are there, and nothing that is there is anything else."""
    tiers = ["memory:64KiB", f"disk:{directory}?size={SIZE}"]
    async with BlockStore.open(tiers) as store:
        for seed in range(CHAINS):
            hashes, source, target = name_of(seed), Filled(BLOCKS, seed=seed), Filled()
            outcome = await store.get(hashes, target.cache, IDS)
            here = outcome.landed.ids().tolist()
            assert np.array_equal(target.tokens(here), source.tokens(here))
            if seed in complete[-SURE:]:
                assert outcome.complete, (seed, complete, dict(outcome.missing))
        # And the store goes on as if nothing had happened.
        fresh = Filled(BLOCKS, seed=99)
        assert (await store.put(name_of(99), fresh.cache, IDS)).complete


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many system calls a child makes that nobody kills."""
    lines = run_child(tmp_path_factory.mktemp("whole"), NEVER, torn=False)
    assert [int(line) for line in lines[:-1]] == list(range(CHAINS))
    return int(lines[-1].removeprefix("calls "))


@pytest.mark.asyncio(loop_factories=["asyncio"])  # the child's loop is always the same
@pytest.mark.parametrize("number", range(KILLS))
async def test_a_kill_loses_nothing_that_was_complete(
    tmp_path: Path, calls: int, number: int
) -> None:
    chance = random.Random(SEED * 1000 + number)
    kill_at, torn = chance.randrange(calls), chance.random() < 0.5
    print(f"KVWIRE_CRASH_SEED={SEED}: kill at {kill_at} of {calls}, torn: {torn}")
    lines = await asyncio.to_thread(run_child, tmp_path, kill_at, torn)
    complete = [int(line) for line in lines]
    await check_what_is_left(tmp_path, complete)


class _Killed(BaseException):
    """Stands for SIGKILL within this process."""


def _kill() -> None:
    raise _Killed


@pytest.mark.asyncio(loop_factories=["asyncio"])  # of the order of calls, not the loop
@pytest.mark.parametrize("torn", [False, True])
async def test_every_call_may_be_the_last(tmp_path: Path, torn: bool) -> None:
    """Each system call of two puts and the one before them, and half of each."""
    kill_at = 0
    while await _run_until(tmp_path / str(kill_at), kill_at, torn):
        kill_at += 1
    # Opening, two slabs, images and entries: fewer would mean that nothing was tried.
    assert kill_at >= 12


async def _run_until(directory: Path, kill_at: int, torn: bool) -> bool:
    """Put until a call is the last one; whether there was such a call."""
    killer = Killer(kill_at, torn=torn, end=_kill)
    complete: list[int] = []
    store = None
    try:
        tier = await disk(directory, SIZE, killer)
        store = store_on(tier, memory="memory:64KiB")
        for seed in range(7):
            source = Filled(BLOCKS, seed=seed)
            await store.put(name_of(seed), source.cache, IDS)
            complete.append(seed)
    except _Killed:
        pass
    killed = len(complete) < 7
    if store is not None:
        await abandon(store)
    await check_what_is_left(directory, complete)
    return killed


async def abandon(store: BlockStore) -> None:
    """Let go of what a killed process would no longer have, and nothing else."""
    for tier in store._tiers.below:
        tier._directory.close()  # type: ignore[attr-defined]
        tier._threads.close()  # type: ignore[attr-defined]
    store._threads.close()
    # Frames that the end of the put went through, and what the loop is just calling.
    for _ in range(3):
        await asyncio.sleep(0)
        gc.collect()
    store._tiers.memory.close()
