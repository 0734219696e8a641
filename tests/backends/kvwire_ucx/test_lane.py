"""What is peculiar to lanes over UCX; what all lanes promise is the kit's."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvwire.aio import end_task
from kvwire.backend.lane import LaneContext
from kvwire.errors import BackendUnavailable, ConnectionLost, ProtocolError
from kvwire.limits import KIB
from kvwire.types import Role
from kvwire_certify.conformance.rig import LaneRig
from kvwire_ucx import UcxBackend
from kvwire_ucx.bootstrap import parse
from kvwire_ucx.context import ABANDONED_MAX, Context
from kvwire_ucx.lane import UcxLane
from kvwire_ucx.library import Version
from kvwire_ucx.worker import Worker
from tests.backends.kvwire_ucx.support import (
    SHARED_MEMORY,
    TCP,
    needs_ucx,
    transports_of_this_loop,
)
from tests.backends.recorders import LaneRecorder
from tests.support.waiting import PATIENCE_S

pytestmark = needs_ucx


def rig() -> LaneRig:
    return LaneRig(UcxBackend, {"TLS": transports_of_this_loop()}, PATIENCE_S)


async def test_the_description_names_what_moves_the_bytes() -> None:
    test = rig()
    left, right = await test.pair()
    for side in (left, right):
        side.send(100 * KIB)
    await test.arrives(right, 1)
    await test.arrives(left, 1)
    ways = transports_of_this_loop()
    expected = "sysv" if ways == SHARED_MEMORY else f"{ways.rpartition(',')[2]}/"
    assert expected in left.lane.description
    assert left.lane.description.startswith("UCX 1.")
    await test.aclose()


async def test_who_does_not_know_the_secret_is_found_out() -> None:
    test = rig()
    left, right = test.prepare()
    assert isinstance(left.lane, UcxLane)
    forged = dataclasses.replace(left.lane._context, secret=bytes(32))
    left.lane._context = forged
    await right.join(left.lane.bootstrap)
    with pytest.raises(BackendUnavailable, match="the peer ended the lane"):
        await test.within(left.join(right.lane.bootstrap), "the forger's join")
    await test.closes(right)
    (error,) = right.closed
    assert isinstance(error, ConnectionLost)
    assert "does not prove the secret" in str(error)
    await test.aclose()


async def test_a_server_connects_when_it_answers() -> None:
    """Both at once crash UCX 1.22 when a lane ends soon after (docs/adr/12-ucx.md)."""
    test = rig()
    left, right = test.prepare()
    server = right.lane
    assert isinstance(server, UcxLane)
    await right.join(left.lane.bootstrap)
    before = server._endpoint
    await test.within(left.join(server.bootstrap), "the client's join")
    assert before is None
    assert server._endpoint is not None
    await test.aclose()


async def test_a_server_that_sends_first_connects_for_it() -> None:
    test = rig()
    left, right = test.prepare()
    await right.join(left.lane.bootstrap)
    left.holding = True
    right.send(100 * KIB)
    await test.within(left.join(right.lane.bootstrap), "the client's join")
    left.release()
    await test.arrives(left, 1)
    assert not right.closed
    await test.aclose()


async def test_another_minor_version_of_ucx_is_refused() -> None:
    test = rig()
    left, right = test.prepare()
    told = parse(left.lane.bootstrap)
    other = dataclasses.replace(told, version=Version(1, 99, 0)).to_bytes()
    with pytest.raises(BackendUnavailable, match=r"the peer has UCX 1\.99\.0"):
        await right.join(other)
    patch = dataclasses.replace(told, version=told.version._replace(release=99))
    left, right = test.prepare()
    await right.join(patch.to_bytes())
    await test.aclose()


@pytest.mark.parametrize("length", [50 * KIB, 200 * KIB])
async def test_a_payload_of_another_length_ends_the_lane(length: int) -> None:
    """A peer whose lane sends other than its control link says."""
    test = rig()
    left, right = await test.pair()
    right.holding = True
    left.send(100 * KIB)
    parcel = right.inbox.popleft()
    right.receive(dataclasses.replace(parcel, length=length))
    await test.closes(right)
    (error,) = right.closed
    assert isinstance(error, ProtocolError)
    # Of a message that is too long, UCX does not say by how much.
    assert f"bytes and not {length}" in str(error)
    assert not right.arrived
    await test.aclose()


@asynccontextmanager
async def _fragile(
    count: int,
) -> AsyncIterator[tuple[list[UcxLane], list[Worker], list[LaneRecorder]]]:
    """Clients of a UCX that cannot free them, which wait for a silent peer's answer."""
    context = Context({"TLS": TCP})
    loop = asyncio.get_running_loop()
    given = LaneContext(role=Role.CLIENT, number=1, secret=bytes(32))
    silent = UcxLane(Worker(context, loop), given, lambda _: None)
    workers = [Worker(context, loop) for _ in range(count)]
    for worker in workers:
        worker.is_fragile = True
    lanes = [UcxLane(worker, given, lambda _: None) for worker in workers]
    handlers = [LaneRecorder() for _ in lanes]
    joining = [
        asyncio.create_task(lane.join(silent.bootstrap, handler))
        for lane, handler in zip(lanes, handlers, strict=True)
    ]
    await asyncio.wait(joining, timeout=0.05)
    for task in joining:
        await end_task(task)
    del joining, task
    yield lanes, workers, handlers
    silent.abort()
    await silent.ended
    for left in context.abandoned:
        assert isinstance(left, Worker)
        context.library.ucp.worker_destroy(left.handle)  # as this UCX can
        context.release(left)
    context.abandoned.clear()
    context.close()


async def test_a_lane_without_an_answer_is_left_if_ucx_cannot_free_it() -> None:
    """UCX 1.13 ends the process then, while RC queue pairs connect."""
    async with _fragile(1) as (lanes, workers, handlers):
        assert lanes[0].ended.done()
        assert workers[0].context.abandoned == workers
        connection = weakref.ref(handlers[0])
        lanes.clear()
        handlers.clear()
        gc.collect()
        assert connection() is None  # only UCX's memory is kept


async def test_lanes_that_are_left_are_few_even_if_they_wait_at_once() -> None:
    async with _fragile(ABANDONED_MAX + 3) as (lanes, workers, _):
        context = workers[0].context
        assert len(context.abandoned) == ABANDONED_MAX
        assert all("behind 8 lanes" in lane.description for lane in lanes[-3:])
        assert "behind" not in lanes[0].description
        with pytest.raises(BackendUnavailable, match=f"free {ABANDONED_MAX} lanes"):
            context.check_open()
        await asyncio.wait([lane.ended for lane in lanes])
        assert all(worker.closed for worker in workers)  # the others were freed
