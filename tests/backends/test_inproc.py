"""The reference backend: names, loops that are gone, and faults by a seed.

What it has in common with every backend is in test_conformance.py.
"""

from __future__ import annotations

import asyncio
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
from tests.backends.kvwire_tcp.recorder import Recorder
from tests.backends.recorders import LaneRecorder
from tests.support.pairs import until

ANY = Address("inproc", "")
LENGTH = 1000


class Ear(Recorder):
    """Takes payloads of 1,000 bytes, and keeps headers as they came."""

    def __init__(self) -> None:
        super().__init__()
        self.raw: list[bytes] = []
        self.payloads: list[bytes] = []
        self.kept: memoryview | None = None

    def header_received(self, link: Link, header: memoryview) -> Landing:
        self.raw.append(bytes(header))
        self.kept = header
        return Landing(LENGTH, memoryview(bytearray(LENGTH)))

    def body_received(self, link: Link, landing: Landing) -> None:
        assert isinstance(landing.payload, memoryview)
        self.payloads.append(bytes(landing.payload))

    @property
    def numbers(self) -> list[int]:
        return [header[0] for header in self.raw]


class Pair:
    """A link with an ear at each end."""

    def __init__(self, listener: Listener, left: Link, right: Link) -> None:
        self.listener = listener
        self.left, self.right = left, right
        self.near, self.far = Ear(), Ear()
        left.start(self.near)
        right.start(self.far)

    def send(self, count: int) -> None:
        for number in range(count):
            payload = memoryview(bytes([number]) * LENGTH)
            self.left.send(header(number), payload, number)
        self.left.flush()

    async def end(self) -> None:
        self.left.abort()
        self.right.abort()
        await self.listener.close()
        await turns()


def header(number: int) -> bytes:
    return bytes([number]) * HEADER_BYTES


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def pair(plan: FaultPlan | None = None, back: FaultPlan | None = None) -> Pair:
    accepted: list[Link] = []
    listener = await InprocBackend(back).listen(ANY, accepted.append)
    left = await InprocBackend(plan).connect(listener.address)
    await until(lambda: accepted)
    return Pair(listener, left, accepted[0])


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
    joined = await pair()
    joined.send(1)
    await until(lambda: joined.far.payloads)
    with pytest.raises(ValueError, match="released memoryview"):
        bytes(joined.far.kept or b"")
    await joined.end()


async def test_bulk_needs_a_token() -> None:
    joined = await pair()
    payload = memoryview(bytes(EAGER_BYTES_MAX + 1))
    with pytest.raises(UsageError, match=f"{EAGER_BYTES_MAX + 1} bytes needs a token"):
        joined.left.send(header(0), payload)
    assert joined.left.queued_bytes == 0
    await joined.end()


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
    joined = await pair(FaultPlan(seed=0, **faults))
    joined.send(sent)
    await until(lambda: len(joined.near.sent) == sent)
    assert joined.far.numbers == arrived
    assert joined.near.sent == list(range(sent))
    assert joined.left.queued_bytes == 0
    await joined.end()


@pytest.mark.parametrize("seed", range(8))
async def test_corrupt(seed: int) -> None:
    joined = await pair(FaultPlan(seed=seed, corrupt=1.0))
    payload = memoryview(bytearray(LENGTH))
    joined.left.send(bytes(HEADER_BYTES), as_fragments(payload), "t")
    joined.left.flush()
    await until(lambda: joined.far.payloads)
    bits = int.from_bytes(joined.far.raw[0] + joined.far.payloads[0], "big")
    assert bits.bit_count() == 1
    assert bytes(payload) == bytes(LENGTH), "the sender's own memory was changed"
    await joined.end()


async def test_delay_holds_everything_back() -> None:
    joined = await pair(FaultPlan(seed=0, delay=1.0, delay_s=3600, spare=2))
    joined.send(5)
    await turns()
    assert joined.far.numbers == [0, 1]
    assert joined.left.queued_bytes == 3 * (HEADER_BYTES + LENGTH)
    await joined.end()
    assert len(joined.far.closed) == 1


async def test_reorder_lets_others_overtake() -> None:
    joined = await pair(FaultPlan(seed=3, reorder=0.5, delay_s=0.001))
    joined.send(20)
    await until(lambda: len(joined.near.sent) == 20)
    assert joined.far.numbers != list(range(20))
    assert sorted(joined.far.numbers) == list(range(20))
    assert [payload[0] for payload in joined.far.payloads] == joined.far.numbers
    assert joined.near.sent == joined.far.numbers
    await joined.end()


async def test_memory_is_lent_while_a_frame_is_held_back() -> None:
    joined = await pair(FaultPlan(seed=0, reorder=1.0, duplicate=1.0, delay_s=0.001))
    memory = [bytearray([n]) * LENGTH for n in range(4)]

    def reuse(link: Link, token: object) -> None:
        assert isinstance(token, int)
        memory[token][:] = bytes([0xEE]) * LENGTH

    joined.near.frame_sent = reuse  # type: ignore[method-assign]
    for number, payload in enumerate(memory):
        joined.left.send(header(number), memoryview(payload), number)
    joined.left.flush()
    await until(lambda: len(joined.far.payloads) == 8)
    assert sorted(p[0] for p in joined.far.payloads) == [0, 0, 1, 1, 2, 2, 3, 3]
    await joined.end()


async def test_stall() -> None:
    joined = await pair(FaultPlan(seed=0, stall=1.0, stall_after=2))
    joined.send(5)
    await until(lambda: len(joined.near.sent) == 2)
    joined.left.close()
    await turns()
    assert joined.far.numbers == [0, 1]
    assert joined.left.queued_bytes == 3 * (HEADER_BYTES + LENGTH)
    # Neither a close nor an abort gets through; each side can still abort its own.
    joined.left.abort()
    await until(lambda: joined.near.closed)
    assert not joined.far.closed
    joined.right.abort()
    await until(lambda: joined.far.closed)
    await joined.end()


async def test_kill() -> None:
    joined = await pair(FaultPlan(seed=0, kill=1.0, kill_after=3))
    joined.send(5)
    await until(lambda: joined.near.closed and joined.far.closed)
    assert joined.far.numbers == [0, 1, 2]
    for ear in (joined.near, joined.far):
        assert isinstance(ear.closed[0], ConnectionLost)
    assert joined.left.queued_bytes == 0
    await joined.end()


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
