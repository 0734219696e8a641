"""Large fragments are read where they lie, and nothing is written after ``drained``."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvwire.errors import ProtocolError
from kvwire.limits import KIB, MIB
from kvwire.memory.copy import address_of
from kvwire.testing.conformance.content import Memory
from kvwire.testing.conformance.rig import LaneRig
from kvwire.testing.conformance.sides import Parcel
from kvwire_ucx import UcxBackend
from kvwire_ucx import lane as lane_module
from kvwire_ucx.bootstrap import FIRST_PAYLOAD
from kvwire_ucx.lane import UcxLane
from kvwire_ucx.one_sided import OneSidedPayloads
from kvwire_ucx.pieces import LentFragment, is_lent, lent_descriptor
from kvwire_ucx.worker import UcxEndpoint
from tests.backends.kvwire_ucx.support import SHARED_MEMORY, TCP, needs_reading
from tests.backends.transfers import pair
from tests.support import inside
from tests.support.pairs import turns
from tests.support.waiting import PATIENCE_S

pytestmark = needs_reading

ERR_NO_MEMORY = -4


def settings(**more: str) -> dict[str, str]:
    return {"TLS": SHARED_MEMORY, "one_sided": "yes", **more}


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_every_byte_of_a_put_or_get_is_read_where_it_lies(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever receives, straight into its memory, and not a byte by messages."""
    source, target = bytearray(os.urandom(9 * MIB)), bytearray(9 * MIB)
    read: list[tuple[int, int, int]] = []
    get = OneSidedPayloads._get

    def noted(self: Any, local: int, nbytes: int, remote: int, *rest: Any) -> None:
        read.append((local, remote, nbytes))
        get(self, local, nbytes, remote, *rest)

    monkeypatch.setattr(OneSidedPayloads, "_get", noted)
    async with pair("ucx", settings()) as both:
        assert "; one-sided" in str(both.left.transport_report)
        if verb == "put":
            grant = both.far.register(target, "write").grant(both.right)
            assert await both.left.put(source, grant) == len(source)
        else:
            grant = both.far.register(source, "read").grant(both.right)
            assert await both.left.get(grant, target) == len(source)
    assert target == source
    here, there = address_of(target), address_of(source)
    at = 0
    for local, remote, nbytes in sorted(read):
        assert (local, remote) == (here + at, there + at)
        at += nbytes
    assert at == len(source)


async def test_one_side_alone_is_not_one_sided() -> None:
    async with pair("ucx", settings(), settings(one_sided="no")) as both:
        assert "one-sided" not in str(both.left.transport_report)
        lane = inside.lanes(both.left).open[0].lane
        assert not lane.intact
        request = both.left.send(1, bytes(MIB))
        assert await both.right.recv(1) == bytes(MIB)
        await request


async def test_what_cannot_be_registered_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit of locked memory, for example."""
    rig = LaneRig(UcxBackend, settings(), PATIENCE_S)
    left, right = await rig.pair()
    right.holding = True
    assert isinstance(left.lane, UcxLane)
    ucp = left.lane._worker.context.library.ucp
    monkeypatch.setattr(ucp, "mem_map", lambda *_: ERR_NO_MEMORY)
    left.send(MIB)
    assert not is_lent(right.inbox[0].descriptor)
    right.take()
    await rig.moved(left, right, 1)
    await rig.aclose()


@pytest.mark.parametrize("side", ["reader", "lender"])
@pytest.mark.parametrize("times", [5, pytest.param(100, marks=[pytest.mark.slow])])
async def test_nothing_is_written_after_a_lane_has_closed(
    side: str, times: int
) -> None:
    """The lane itself is aborted, with reads under way and others not yet begun."""
    rig = LaneRig(UcxBackend, settings(), PATIENCE_S)
    watched: list[Memory] = []
    for turn in range(times):
        left, right = await rig.pair()
        landed = right.keep_landings()
        left.send_many(4, 2 * MIB)
        await turns(turn * 3 % 10)
        aborted = right if side == "reader" else left
        aborted.abort()
        await rig.closes(right)
        for memory in landed:
            memory.poison()
        watched = [*watched, *landed][-16:]
        await rig.closes(left)
        one = left.lane
        assert isinstance(one, UcxLane)
        assert one._one_sided is not None
        assert len(one._one_sided._ranges) == 0
    await rig.settle()
    assert all(memory.untouched for memory in watched)
    await rig.aclose()


async def test_small_and_many_fragments_are_messages() -> None:
    rig = LaneRig(UcxBackend, settings(), PATIENCE_S)
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
    rig = LaneRig(UcxBackend, settings(TLS=TCP), PATIENCE_S)
    left, right = await rig.pair()
    right.holding = True
    left.send(MIB)
    assert not left.lane.intact
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
    rig = LaneRig(UcxBackend, settings(one_sided="no"), PATIENCE_S)
    _, right = await rig.pair()
    lent = lent_descriptor(FIRST_PAYLOAD, [LentFragment(1 << 20, MIB, b"key")])
    assert lent is not None
    with pytest.raises(ProtocolError, match="a descriptor of"):
        right.receive(Parcel(0, MIB, lent))
    await rig.aclose()


async def test_a_range_may_stay_registered() -> None:
    """Sent again, it needs no new registration; it goes with the lane."""
    rig = LaneRig(UcxBackend, settings(registrations="1"), PATIENCE_S)
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


@pytest.mark.parametrize("nbytes", [MIB, 64 * KIB], ids=["lent", "a message"])
async def test_a_stopped_reader_is_waited_for(
    nbytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that it may be reading stays in quarantine until it goes on.

    UCX reads messages likewise, so what arrives over such a lane is never stale.
    """
    monkeypatch.setattr(lane_module, "LINGER_S", 0.01)
    rig = LaneRig(UcxBackend, settings(), PATIENCE_S)
    left, right = await rig.held_pair()
    left.send(nbytes)
    assert left.lane.intact
    stopped: Any = right.lane
    stopped._worker._turning = True  # takes no turn, as a process that is stopped
    left.abort()
    await rig.until(lambda: "stays in quarantine" in caplog.text, "the log says so")
    assert not left.closed
    stopped._worker._turning = False
    stopped._worker.wake()
    await rig.closes(left)
    await rig.aclose()


async def test_a_reader_that_has_said_bye_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even where UCX has a socket as well, so that the peer hangs up first."""
    monkeypatch.setattr(lane_module, "LINGER_S", 0.01)
    both = property(lambda _: ("cma", "tcp/lo"))
    monkeypatch.setattr(UcxEndpoint, "transports", both)
    rig = LaneRig(UcxBackend, settings(), PATIENCE_S)
    left, right = await rig.held_pair()
    left.send(MIB)
    right.abort()
    await rig.closes(left)
    await rig.closes(right)
    assert "stays in quarantine" not in caplog.text
    await rig.aclose()


async def test_memory_is_free_when_the_stopped_reader_has_died(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process stands for the reader's here: it lives, and then it does not."""
    monkeypatch.setattr(lane_module, "LINGER_S", 0.01)
    rig = LaneRig(UcxBackend, settings(), PATIENCE_S)
    left, right = await rig.held_pair()
    left.send(MIB)
    lender, stopped = left.lane, right.lane
    assert isinstance(lender, UcxLane)
    assert isinstance(stopped, UcxLane)
    stopped._worker._turning = True
    async with process() as reader:
        assert lender._one_sided is not None
        lender._one_sided._peer = replace(lender._peer, pid=reader.pid)
        left.abort()
        await rig.until(lambda: "stays in quarantine" in caplog.text, "the log says so")
        assert not left.closed
        reader.kill()
        await rig.closes(left)
    stopped._worker._turning = False
    stopped._worker.wake()
    await rig.aclose()


async def test_a_python_that_cannot_watch_a_process_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of conda are built with the headers of an old kernel."""
    monkeypatch.delattr(os, "pidfd_open")
    rig = LaneRig(UcxBackend, settings(), PATIENCE_S)
    left, _ = await rig.pair()
    assert isinstance(left.lane, UcxLane)
    assert left.lane._one_sided is not None
    left.lane._one_sided.when_reader_dies(left.abort)
    assert "it will not be noticed if the peer dies" in caplog.text
    assert not left.closed
    await rig.aclose()


@pytest.mark.parametrize("namespace", ["own", "another's", "unknown"])
async def test_a_process_is_known_by_its_number_where_that_was_counted(
    namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In another namespace the number is that of nobody, or of somebody else."""
    async with process() as reader:
        reader.kill()
    rig = LaneRig(UcxBackend, settings(), PATIENCE_S)
    left, _ = await rig.pair()
    assert isinstance(left.lane, UcxLane)
    one_sided, peer = left.lane._one_sided, left.lane._peer
    assert one_sided is not None
    number = {"own": peer.pid_namespace, "another's": 1, "unknown": 0}[namespace]
    one_sided._peer = replace(peer, pid=reader.pid, pid_namespace=number)
    if namespace == "unknown":
        one_sided._own = replace(one_sided._own, pid_namespace=0)
    called: list[int] = []
    one_sided.when_reader_dies(lambda: called.append(1))
    assert len(called) == (namespace == "own")
    assert ("will not be noticed" in caplog.text) == (namespace != "own")
    await rig.aclose()


@asynccontextmanager
async def process() -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process that waits to be killed."""
    made = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.kill()
        await made.wait()
