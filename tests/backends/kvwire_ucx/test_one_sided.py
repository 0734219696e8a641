"""Large fragments are read where they lie, and nothing is written after ``drained``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire import KVSpec, PagedCache
from kvwire.errors import ProtocolError
from kvwire.kv.layout import AxisOrder
from kvwire.limits import KIB, MIB
from kvwire.testing.conformance.content import Memory
from kvwire.testing.conformance.lane_side import Parcel
from kvwire.testing.conformance.rig import LaneRig
from kvwire.testing.harness import Loopback
from kvwire_ucx import UcxBackend, one_sided
from kvwire_ucx import lane as lane_module
from kvwire_ucx.bootstrap import FIRST_PAYLOAD
from kvwire_ucx.lane import UcxLane
from kvwire_ucx.lent import LentFragment, is_lent, lent_descriptor
from tests.backends.kvwire_ucx.support import SHARED_MEMORY, TCP, needs_reading

pytestmark = needs_reading

# A block of a layer is 1 MiB, and they lie apart on both sides.
SPEC = KVSpec(layers=2, kv_heads=16, head_dim=128, block_tokens=128, dtype="float16")
LAYOUT = AxisOrder("block kv token head dim")
BLOCKS = 8
OURS, THEIRS = [0, 2, 4], [7, 5, 3]
POISON = 0x7B
Tensor = npt.NDArray[np.float16]


def settings(**more: str) -> dict[str, str]:
    return {"TLS": SHARED_MEMORY, "one_sided": "yes", **more}


def cache(value: float) -> tuple[PagedCache, list[Tensor]]:
    shape = (BLOCKS, 2, 128, 16, 128)
    tensors = [np.full(shape, value + i, np.float16) for i in range(SPEC.layers)]
    return PagedCache(SPEC, tensors, layout=LAYOUT), tensors


@asynccontextmanager
async def pair(left: str = "yes", right: str = "yes") -> AsyncIterator[Loopback]:
    """Connected over TCP, with UCX for the data, one-sided where both want it."""
    wishes = [
        kvwire.Config(require=("ucx",), backends={"ucx": settings(one_sided=own)})
        for own in (left, right)
    ]
    async with (
        kvwire.open(wishes[0], name="a") as a,
        kvwire.open(wishes[1], name="b") as b,
    ):
        address = await b.listen("127.0.0.1:0")
        ab = await a.connect(address)
        yield Loopback(a=a, b=b, ab=ab, ba=await b.accept(), address=address)


def lanes(communicator: kvwire.Communicator) -> list[UcxLane]:
    backend: Any = communicator._state._backends["ucx"]
    return list(backend._lanes)


@pytest.mark.parametrize("verb", ["push", "pull"])
@pytest.mark.parametrize(("left", "right"), [("yes", "yes"), ("no", "yes")])
async def test_blocks_arrive(
    verb: str, left: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By reading where both sides have asked for it, and as messages elsewhere."""
    read: list[int] = []
    real = one_sided.OneSided.read

    def noted(self: Any, number: int, *rest: Any) -> None:
        read.append(number)
        real(self, number, *rest)

    monkeypatch.setattr(one_sided.OneSided, "read", noted)
    source, sent = cache(1)
    target, received = cache(9)
    async with pair(left, right) as both:
        if verb == "push":
            incoming = both.b.expect("t", target, THEIRS)
            outgoing = both.ab.push("t", source, OURS)
        else:
            outgoing = both.a.publish("t", source, OURS)
            incoming = both.ba.pull("t", target, THEIRS)
        outgoing.ready(layers=slice(0, 2))
        outgoing.finish()
        assert (await incoming).complete
        assert (await outgoing).complete
        await incoming.drained()
        await outgoing.drained()
        for layer in range(SPEC.layers):
            assert (received[layer][THEIRS] == sent[layer][OURS]).all()
            assert (received[layer][0::2] == 9 + layer).all()
        assert bool(read) == (left == right == "yes")
        for lane in lanes(both.a) if read else ():
            assert lane._one_sided is not None
            assert (lane._one_sided.unread, len(lane._one_sided._ranges)) == (0, 0)


@pytest.mark.parametrize(
    "times",
    [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
async def test_nothing_is_written_after_drained(times: int) -> None:
    """Transfers are aborted at any moment; their memory is watched from then on."""
    source, _ = cache(1)
    watched: deque[list[Tensor]] = deque()
    spare = [cache(9) for _ in range(4)]
    async with pair() as both:
        for turn in range(times):
            target, tensors = spare[turn % len(spare)]
            if len(watched) == len(spare):
                require_untouched(watched.popleft())
            incoming = both.b.expect(turn, target, THEIRS)
            outgoing = both.ab.push(turn, source, OURS)
            outgoing.ready(layers=slice(0, 2))
            for _ in range(turn * 7 % 40):
                await asyncio.sleep(0)
            (incoming if turn % 2 else outgoing).abort("no longer wanted")
            await incoming
            await incoming.drained()
            for tensor in tensors:
                tensor.view(np.uint8).fill(POISON)
            watched.append(tensors)
            await outgoing.drained()
        await go_on(both, 0.5 if times < 1000 else 10)
        for tensors in watched:
            require_untouched(tensors)


@pytest.mark.parametrize("side", ["reader", "lender"])
@pytest.mark.parametrize(
    "times", [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_nothing_is_written_after_a_lane_has_closed(
    side: str, times: int
) -> None:
    """The lane itself is aborted, with reads under way and others not yet begun."""
    rig = LaneRig(UcxBackend, settings(), 10)
    watched: list[Memory] = []
    for turn in range(times):
        left, right = await rig.pair()
        landed: list[Memory] = []

        def land(parcel: Any, landed: list[Memory] = landed) -> Memory:
            landed.append(Memory(parcel.length))
            return landed[-1]

        right.land = land
        left.queue_many(4, 2 * MIB)
        left.flush()
        right.take()
        for _ in range(turn * 3 % 10):
            await asyncio.sleep(0)
        aborted = right if side == "reader" else left
        aborted.abort()
        await rig.closes(right)
        for memory in landed:
            memory.poison(POISON)
        watched = [*watched, *landed][-16:]
        await rig.closes(left)
        one = left.lane
        assert isinstance(one, UcxLane)
        assert one._one_sided is not None
        assert len(one._one_sided._ranges) == 0
    await rig.settle()
    assert all(memory.is_all(POISON) for memory in watched)
    await rig.aclose()


async def go_on(both: Loopback, seconds: float) -> None:
    """Move other things over the same lane for a while."""
    loop, message = asyncio.get_running_loop(), bytes(MIB)
    until = loop.time() + seconds
    while loop.time() < until:
        request = both.ab.send(1, message)
        assert await both.ba.recv(1) == message
        await request


def require_untouched(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        assert (tensor.view(np.uint8) == POISON).all(), "a late write"


async def test_small_and_many_fragments_are_messages() -> None:
    rig = LaneRig(UcxBackend, settings(), 10)
    left, right = await rig.pair()
    right.holding = True
    left.send(4 * MIB, lambda _: [64 * KIB] * 64)
    left.send(100 * KIB)
    left.send(MIB)
    assert [is_lent(parcel.descriptor) for parcel in right.inbox] == [
        False,
        False,
        True,
    ]
    right.take()
    await rig.moved(left, right, 3)
    await rig.aclose()


async def test_what_ucx_would_read_by_messages_is_sent() -> None:
    """Over TCP, where UCX ends the process that lends if the reader goes away."""
    rig = LaneRig(UcxBackend, settings(TLS=TCP), 10)
    left, right = await rig.pair()
    right.holding = True
    left.send(MIB)
    assert not is_lent(right.inbox[0].descriptor)
    right.take()
    await rig.moved(left, right, 1)
    lent = lent_descriptor(FIRST_PAYLOAD + 1, [LentFragment(1 << 20, MIB, b"key")])
    assert lent is not None
    right.receive(Parcel(0, MIB, lent))
    await rig.closes(right)
    assert "nothing here reads it: UCX uses tcp" in str(right.closed[0])
    await rig.aclose()


async def test_lent_memory_is_for_who_has_asked() -> None:
    """A descriptor of lent memory is refused by a side that is not one-sided."""
    rig = LaneRig(UcxBackend, settings(one_sided="no"), 10)
    _, right = await rig.pair()
    lent = lent_descriptor(FIRST_PAYLOAD, [LentFragment(1 << 20, MIB, b"key")])
    assert lent is not None
    with pytest.raises(ProtocolError, match="a descriptor of"):
        right.receive(Parcel(0, MIB, lent))
    await rig.aclose()


async def test_a_range_may_stay_registered() -> None:
    """Sent again, it needs no new registration; it goes with the lane."""
    rig = LaneRig(UcxBackend, settings(registrations="1"), 10)
    left, right = await rig.pair()
    left.send(MIB)
    await rig.moved(left, right, 1)
    assert isinstance(left.lane, UcxLane)
    assert left.lane._one_sided is not None
    ranges = left.lane._one_sided._ranges
    assert len(ranges) == 1
    left.abort()
    await rig.closes(left)
    assert len(ranges) == 0
    await rig.aclose()


async def test_a_stopped_reader_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that it may be reading stays in quarantine until it goes on."""
    monkeypatch.setattr(lane_module, "LINGER_S", 0.01)
    rig = LaneRig(UcxBackend, settings(), 10)
    left, right = await rig.held_pair()
    left.send(MIB)
    stopped: Any = right.lane
    stopped._worker._turning = True  # takes no turn, as a process that is stopped
    left.abort()
    await rig.until(lambda: "stays in quarantine" in caplog.text, "the log says so")
    assert not left.closed
    stopped._worker._turning = False
    stopped._worker.wake()
    await rig.closes(left)
    await rig.aclose()
