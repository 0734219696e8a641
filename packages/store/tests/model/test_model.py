"""A store is what its model says, whatever fails and wherever it is killed.

More rounds: ``pytest --soak 1000 --hypothesis-seed 1 packages/store/tests/model``.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from packages.store.tests.model.faults import ERRORS, POINTS, Plan, copied
from packages.store.tests.model.kinds import Block
from packages.store.tests.model.life import Life, Room, Shadow
from packages.store.tests.model.rounds import ROOMS, Round
from tests.support.depth import examples

# The tier works on threads, and waits for nothing that is a loop's own.
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])

SEEDS = range(1, 4)
CHAIN = [Block(0, number) for number in range(12)]
LARGER = [Block(2, number) for number in range(6)]


@one_loop
@pytest.mark.parametrize("room", sorted(set(ROOMS) - {"wide"}))
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_round_keeps_every_promise(
    tmp_path: Path, seed: int, room: str
) -> None:
    this = Round(seed, tmp_path, room=room)
    await this.run()
    assert this.counts["restarts"]


@one_loop
@pytest.mark.parametrize("seed", [1, 2])
async def test_slabs_with_as_many_slots_as_there_may_be(
    tmp_path: Path, seed: int
) -> None:
    """Runs of slots that go on in the next slab, and no other events."""
    this = Round(seed, tmp_path, room="wide", events=())
    await this.run()
    assert this.counts["puts"]


@pytest.mark.slow
@settings(max_examples=examples(40), phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_more_rounds(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        this = Round(seed, Path(folder))
        asyncio.run(this.run())
    assert this.counts["restarts"]


async def script(life: Life) -> None:
    """Fill a tier of two slabs, put the one to another size, and restart."""
    await life.open()
    await life.put(CHAIN)
    await life.put(LARGER)
    await life.put([Block(0, 12 + number) for number in range(12)])
    await life.close()
    await life.open()
    await life.put(LARGER[::-1])


@one_loop
@pytest.mark.slow
@pytest.mark.parametrize("power", [False, True])
async def test_every_call_may_be_the_last(tmp_path: Path, power: bool) -> None:
    """Each call that writes, of all that a tier does; or half of it, or the power."""
    calls = 0
    while await _ended_at(tmp_path / str(calls), calls, power):
        calls += 1
    # The tables, the images, the rows, a checkpoint: fewer would mean that nothing was
    # tried.
    assert calls >= 40


async def _ended_at(base: Path, at: int, power: bool) -> bool:
    """End a script at one call; whether there was such a call."""
    await asyncio.to_thread(base.mkdir)
    this = Round(at, base, room="tiny", events=())
    this.use(f"{ROOMS['tiny'].disk}&sync={'put' if power else 'flush'}")
    end = partial(this.ended, power=power)
    POINTS.arm(Plan(at=at, torn=bool(at % 2), end=end))
    try:
        await script(this.life)
        ended = bool(POINTS.disarm())
        if ended:
            await this.go_on()
            await this.life.get_all()
            # And then as if nothing had happened, as far as anybody remembers.
            for blocks in (CHAIN, LARGER):
                assert await this.life.put(blocks) == []
            await this.life.close()
            await this.life.open()
            await this.life.get_all()
    finally:
        POINTS.disarm()
        await this.life.close()
        POINTS.forget()
    return ended


@one_loop
@pytest.mark.parametrize("code", ERRORS)
async def test_every_call_may_fail(tmp_path: Path, code: int) -> None:
    """Each call alone: the put of it is done again, and nothing else was lost."""
    at, hit = 0, True
    while hit:
        life = Life(tmp_path / str(at), ROOMS["tiny"], Shadow())
        await life.open()
        POINTS.arm(Plan(at=at, code=code))
        lacking = [*await life.put(CHAIN), *await life.put(LARGER)]
        hit = bool(POINTS.disarm())
        assert hit or not lacking
        assert await life.put(CHAIN) == await life.put(LARGER) == []
        await life.close()
        await life.open()
        await life.get_all()
        await life.close()
        at += 1
    assert at >= 6


FULL = [Block(0, number) for number in range(64)]
NEXT = [Block(0, 64 + number) for number in range(8)]
LATER = [Block(0, 72 + number) for number in range(24)]


@one_loop
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("code", ERRORS)
async def test_a_write_that_fails_costs_no_block(
    tmp_path: Path, code: int, torn: bool
) -> None:
    """Each call of a put or flush, and all after it: what is there stays there.

    Also where the process is killed then.
    """
    room = Room("2MiB", "size=256KiB&slab=64KiB", (0,), 96, 1, 64)
    at, hit = 0, True
    while hit:
        life = Life(tmp_path / str(at), room, Shadow())
        await life.open()
        for blocks in (FULL, NEXT):
            assert await life.put(blocks) == []
        await life.flush()
        there = life.present([*FULL, *NEXT])
        assert len(there) >= 60, "it is full but for its reserve"
        counts = life.counts
        POINTS.arm(Plan(at=at, calls=10**6, code=code, torn=torn))
        lacking = await life.put(LATER)
        for _ in range(2):
            with suppress(OSError):
                await life.flush()
        hit = bool(POINTS.disarm())
        left = Life(tmp_path / f"{at} left", room, Shadow(tried={*FULL, *NEXT, *LATER}))
        copied(life.directory, left.directory)
        evicted, written = (
            now - then for now, then in zip(life.counts, counts, strict=True)
        )
        assert evicted <= written == len(LATER) - len(lacking) * hit
        for one in (life, left):
            if one is left:
                await life.close()
                await left.open()
            assert len(one.present(there)) >= len(there) - written
            one.shadow.sure = one.present(there)
            await one.get_all()  # and each byte of them
        await left.close()
        at += 1
    assert at >= 4
