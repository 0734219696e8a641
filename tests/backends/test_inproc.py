"""The reference backend: names, loops that are gone, and faults by a seed.

What it has in common with every backend is in test_conformance.py.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Any

import pytest

from kvwire.backend import Landing, Link, Listener
from kvwire.errors import ConnectionLost, UsageError
from kvwire.limits import EAGER_BYTES_MAX, HEADER_BYTES, MIB
from kvwire.memory.copy import as_fragments
from kvwire.testing.faults import FaultPlan
from kvwire.types import Address
from kvwire_inproc import InprocBackend
from kvwire_inproc.faults import Fault, schedule
from kvwire_inproc.lane import InprocLane
from kvwire_inproc.link import InprocLink
from tests.backends.kvwire_tcp.recorder import VIEW, Body, Pair, header, linked_by
from tests.backends.recorders import LaneRecorder
from tests.support.pairs import turns, until

ANY = Address("inproc", "")
LENGTH = 1000


def pair(
    plan: FaultPlan | None = None,
) -> AbstractAsyncContextManager[Pair[InprocLink]]:
    """Two links, and the faults of what the near one sends."""
    return linked_by(InprocBackend(plan), InprocBackend(), ANY, InprocLink)


def send(joined: Pair[InprocLink], count: int) -> None:
    """Frames that are numbered, each with a payload of its number."""
    for number in range(count):
        payload = memoryview(bytes([number]) * LENGTH)
        joined.near.send(header(LENGTH, number), payload, number)
    joined.near.flush()


# --- names ----------------------------------------------------------------------------


def ignore(link: Link) -> None:
    link.abort()


async def test_a_chosen_name_may_be_taken_by_a_user() -> None:
    backend = InprocBackend()
    chosen = await backend.listen(ANY, ignore)
    number = int(chosen.address.host.removeprefix("auto-"))
    taken = await backend.listen(Address("inproc", f"auto-{number + 1}"), ignore)
    following = await backend.listen(ANY, ignore)
    assert following.address.host == f"auto-{number + 2}"
    for listener in (chosen, taken, following):
        await listener.close()


def test_the_name_of_a_closed_loop_is_free() -> None:
    name = Address("inproc", "orphan")

    async def listen() -> Listener:
        return await InprocBackend().listen(name, ignore)

    async def after() -> None:
        with pytest.raises(ConnectionRefusedError):
            await InprocBackend().connect(name)
        heir = await listen()
        # The first owner's late close must not take the name from its heir.
        await orphan.close()
        (await InprocBackend().connect(name)).abort()
        await heir.close()

    orphan = asyncio.run(listen())
    asyncio.run(after())


# --- the contract, where it is stricter than a stream can be --------------------------


async def test_a_header_that_is_kept_is_noticed() -> None:
    kept: list[memoryview] = []

    def keep(header: memoryview) -> Body:
        kept.append(header)
        return Body(LENGTH, 0, VIEW)

    async with pair() as joined:
        joined.at_far.body_of = keep  # type: ignore[method-assign]
        send(joined, 1)
        await joined.at_far.received(1)
        with pytest.raises(ValueError, match="released memoryview"):
            bytes(kept[0])


async def test_bulk_needs_a_token() -> None:
    async with pair() as joined:
        body = memoryview(bytes(EAGER_BYTES_MAX + 1))
        with pytest.raises(
            UsageError, match=f"{EAGER_BYTES_MAX + 1} bytes needs a token"
        ):
            joined.near.send(header(len(body)), body)
        assert joined.near.queued_bytes == 0


# --- plans ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"drop": 1.5},
        {"kill": -0.1},
        {"corrupt": float("nan")},
        {"delay_s": -1},
        {"spare": -1},
        {"kill_after": -1},
        {"drop": "x"},
        {"delay_s": None},
    ],
    ids=str,
)
def test_an_impossible_plan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"fault plan: {next(iter(wrong))}[=:]"):
        FaultPlan(seed=0, **wrong)


def test_a_schedule_is_the_same_in_every_process_and_version() -> None:
    plan = FaultPlan(seed=1, drop=0.3, corrupt=0.3)
    fates = [faults for faults, _ in islice(schedule(plan, "0"), 50)]
    said = "".join(" dc*"[(Fault.DROP in f) + 2 * (Fault.CORRUPT in f)] for f in fates)
    assert said == "  *c dd ccc  ddc dddcc*d* d   d *      d  d *   d*"


# --- faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "sent", "arrived"),
    [
        ({"drop": 1.0, "spare": 2}, 5, [0, 1]),
        ({"duplicate": 1.0, "spare": 1}, 3, [0, 1, 1, 2, 2]),
        ({"reorder": 1.0, "delay_s": 0.0, "spare": 2}, 2, [0, 1]),
    ],
    ids=str,
)
async def test_what_arrives(
    faults: dict[str, Any], sent: int, arrived: list[int]
) -> None:
    async with pair(FaultPlan(seed=0, **faults)) as joined:
        send(joined, sent)
        await until(lambda: len(joined.at_near.sent) == sent)
        assert joined.at_far.numbers == arrived
        assert joined.at_near.sent == list(range(sent))
        assert joined.near.queued_bytes == 0


@pytest.mark.parametrize("seed", range(8))
async def test_corrupt(seed: int) -> None:
    headers: list[bytes] = []

    def take(header: memoryview) -> Body:
        headers.append(bytes(header))
        return Body(LENGTH, 0, VIEW)

    async with pair(FaultPlan(seed=seed, corrupt=1.0)) as joined:
        joined.at_far.body_of = take  # type: ignore[method-assign]
        payload = memoryview(bytearray(LENGTH))
        joined.near.send(bytes(HEADER_BYTES), as_fragments(payload), "t")
        joined.near.flush()
        await joined.at_far.received(1)
        bits = int.from_bytes(headers[0] + (joined.at_far.frames[0][1] or b""), "big")
        assert bits.bit_count() == 1
        assert bytes(payload) == bytes(LENGTH), "the sender's own memory was changed"


async def test_delay_holds_everything_back() -> None:
    plan = FaultPlan(seed=0, delay=1.0, delay_s=3600, spare=2)
    async with pair(plan) as joined:
        send(joined, 5)
        await turns(10)
        assert joined.at_far.numbers == [0, 1]
        assert joined.near.queued_bytes == 3 * (HEADER_BYTES + LENGTH)


async def test_reorder_lets_others_overtake() -> None:
    async with pair(FaultPlan(seed=3, reorder=0.5, delay_s=0.001)) as joined:
        send(joined, 20)
        await until(lambda: len(joined.at_near.sent) == 20)
        numbers = joined.at_far.numbers
        assert numbers != list(range(20))
        assert sorted(numbers) == list(range(20))
        assert joined.at_far.frames == [(n, bytes([n]) * LENGTH) for n in numbers]
        assert joined.at_near.sent == numbers


async def test_memory_is_lent_while_a_frame_is_held_back() -> None:
    plan = FaultPlan(seed=0, reorder=1.0, duplicate=1.0, delay_s=0.001)
    memory = [bytearray([n]) * LENGTH for n in range(4)]

    def reuse(link: Link, token: object) -> None:
        assert isinstance(token, int)
        memory[token][:] = bytes([0xEE]) * LENGTH

    async with pair(plan) as joined:
        joined.at_near.frame_sent = reuse  # type: ignore[method-assign]
        for number, payload in enumerate(memory):
            joined.near.send(header(LENGTH, number), memoryview(payload), number)
        joined.near.flush()
        await joined.at_far.received(8)
        expected = [(n, bytes([n]) * LENGTH) for n in (0, 0, 1, 1, 2, 2, 3, 3)]
        assert sorted(joined.at_far.frames) == expected


async def test_stall() -> None:
    async with pair(FaultPlan(seed=0, stall=1.0, stall_after=2)) as joined:
        send(joined, 5)
        await until(lambda: len(joined.at_near.sent) == 2)
        joined.near.close()
        await turns(10)
        assert joined.at_far.numbers == [0, 1]
        assert joined.near.queued_bytes == 3 * (HEADER_BYTES + LENGTH)
        # Neither a close nor an abort gets through; each side can still abort its own.
        joined.near.abort()
        await until(lambda: joined.at_near.closed)
        assert not joined.at_far.closed
        joined.far.abort()
        await until(lambda: joined.at_far.closed)


async def test_kill() -> None:
    async with pair(FaultPlan(seed=0, kill=1.0, kill_after=3)) as joined:
        send(joined, 5)
        await until(lambda: joined.at_near.closed and joined.at_far.closed)
        assert joined.at_far.numbers == [0, 1, 2]
        for recorder in (joined.at_near, joined.at_far):
            assert isinstance(recorder.closed[0], ConnectionLost)
        assert joined.near.queued_bytes == 0


async def test_a_payload_that_is_not_awaited_yet_waits_though_the_lane_is_flushed() -> (
    None
):
    """A flush for what this side sends, while the payload before is half here."""
    near, far, told = InprocLane(), InprocLane(), LaneRecorder()
    await near.join(far.bootstrap, LaneRecorder())
    await far.join(near.bootstrap, told)
    data = memoryview(bytearray(8 * MIB))
    first, second = (near.send(data, number) for number in range(2))
    near.flush()
    far.receive(first, Landing(8 * MIB, memoryview(bytearray(8 * MIB))))
    while not told.received:
        far.flush()
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    far.receive(second, Landing(8 * MIB, memoryview(bytearray(8 * MIB))))
    far.flush()
    await told.moved(received=2)
    assert not told.closed
    for lane in (near, far):
        lane.abort()
