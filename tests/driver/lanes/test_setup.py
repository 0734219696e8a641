"""Which transport carries a connection's data, and which lane comes up again.

The lanes are those of inproc beside a link over tcp. What moves on a lane, and what
becomes of it when one breaks, is in test_scheduler.py.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

import kvwire
from kvwire import BackendUnavailable
from kvwire.backend.lane import Lane, LaneHandler
from kvwire.driver.lanes import setup
from kvwire.driver.lanes.setup import REFUSALS_MAX
from kvwire.errors import ConnectionClosed
from kvwire.limits import BOOTSTRAP_BYTES_MAX, LANE_TIMEOUT_SHARE, LANES_MAX
from kvwire_inproc.lane import InprocLane
from tests.support import inside
from tests.support.lanes import (
    BESIDE,
    DATA,
    NEVER_S,
    ONLY,
    HangingLane,
    expect_moves,
    impatient,
    is_over,
    lane_pause,
    raise_again_after,
    reasons,
    use,
)
from tests.support.logs import warned
from tests.support.pairs import Pair, communicators, connected, until
from tests.support.waiting import PATIENCE_S

# What breaks is opened again when its test is over.
_stays_down = lane_pause(NEVER_S, autouse=True)
# What breaks is opened again at once, in tests that ask for it.
comes_back = lane_pause(0.0)


def on_lanes(pair: Pair) -> int:
    """Bytes that both ends have received on lanes that are up."""
    return sum(
        endpoint.lane.received_bytes
        for end in (pair.left, pair.right)
        for endpoint in inside.lanes(end).open
    )


# --- what does not come up ------------------------------------------------------------


class _Refusing(InprocLane):
    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        self.abort()
        raise BackendUnavailable("the device has gone")


class _Buggy(InprocLane):
    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("role", ["client", "server", "both"])
@pytest.mark.parametrize(
    ("lane", "why"),
    [
        (_Refusing, "the device has gone"),
        (_Buggy, "ZeroDivisionError"),
        (HangingLane, "did not open within 0.05 s (a copy within the process)"),
    ],
)
async def test_what_fails_at_first_use_falls_to_the_next(
    lane: type[Lane],
    why: str,
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a line in the log, and in the report of both sides."""
    use(monkeypatch, lane, role)
    if lane is HangingLane:  # the others say at once that they cannot
        impatient(monkeypatch, 0.05 / PATIENCE_S)
    async with connected(**BESIDE) as pair:
        assert pair.left.transport == pair.right.transport == "tcp"
        await expect_moves(pair)
        near = reasons(pair.left.transport_report)["inproc"]
        far = reasons(pair.right.transport_report)["inproc"]
        assert why in near
        assert why in far or "did not open" in far or "did not open" in near
    said = [r for r in caplog.records if "cannot carry the data" in r.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert "inproc" in said[0].getMessage()


@pytest.mark.parametrize(
    ("setting", "limit"), [({"prefer": ("inproc", "tcp")}, "0.04 s"), (ONLY, "0.08 s")]
)
async def test_the_limit_of_a_lane_follows_the_setting(
    setting: dict[str, Any], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow machine raises one number, and the lane's limit with it."""
    use(monkeypatch, HangingLane, "client")
    near: dict[str, Any] = {**setting, "handshake_timeout_s": 0.1}
    async with communicators(near, setting) as (one, other):
        address = await other.listen("127.0.0.1:0")
        try:
            connection = await one.connect(address, timeout_s=PATIENCE_S)
        except BackendUnavailable as exc:
            why = str(exc)
        else:
            why = reasons(connection.transport_report)["inproc"]
    assert f"did not open within {limit}" in why


async def test_a_lane_that_hangs_leaves_time_for_the_next_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller of ``connect`` has less patience than the setting."""
    use(monkeypatch, HangingLane, "client")
    impatient(monkeypatch, 0.01)
    near: dict[str, Any] = {**BESIDE, "handshake_timeout_s": 86_400}
    async with communicators(near, BESIDE) as (one, other):
        address = await other.listen("127.0.0.1:0")
        connection = await one.connect(address, timeout_s=PATIENCE_S)
        assert connection.transport == "tcp"
        why = reasons(connection.transport_report)["inproc"]
    found = re.search(r"did not open within (\S+) s", why)
    assert found, why
    assert float(found[1]) <= 0.01 * PATIENCE_S


async def test_the_end_with_less_patience_ends_a_lane_and_not_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's ``handshake_timeout_s`` is over before the client's share of its."""
    use(monkeypatch, HangingLane, "client")
    monkeypatch.setattr(setup, "LANE_TIMEOUT_SHARE_LAST", 0.01)
    patient: dict[str, Any] = {**BESIDE, "handshake_timeout_s": 86_400}
    server: dict[str, Any] = {**BESIDE, "handshake_timeout_s": PATIENCE_S / 4}
    async with communicators(patient, server) as (near, far):
        connection = await near.connect(await far.listen("127.0.0.1:0"))
        accepted = await far.accept()
        assert connection.transport == accepted.transport == "tcp"
        for end in (connection, accepted):
            why = reasons(end.transport_report)["inproc"]
            assert "did not open within 0.15 s" in why


def _raises(_: Lane) -> str:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("role", ["client", "server"])
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("bootstrap", property(_raises), "ZeroDivisionError"),
        ("bootstrap", None, "its bootstrap is a NoneType"),
        ("bootstrap", bytes(BOOTSTRAP_BYTES_MAX + 1), "its bootstrap is of "),
        ("description", property(_raises), "ZeroDivisionError"),
        ("description", None, "its description is None"),
    ],
)
async def test_a_lane_that_says_nothing_usable_of_itself_falls_to_the_next(
    role: str, name: str, value: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bootstrap ended the connection; its description whatever asked for it."""
    use(monkeypatch, type("Lying", (InprocLane,), {name: value}), role)
    async with connected(**BESIDE) as pair:
        assert pair.left.transport == pair.right.transport == "tcp"
        await expect_moves(pair)
        assert why in reasons(pair.left.transport_report)["inproc"]


@pytest.mark.parametrize("role", ["client", "server"])
async def test_a_lane_that_is_up_when_nobody_waits_for_it_any_more(
    role: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its time runs out, or its ``connect`` is cancelled: it has joined, and ends."""
    waiting: list[asyncio.Task[Any]] = []

    class LastMoment(InprocLane):
        async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
            await super().join(bootstrap, handler)
            # Runs when the join has returned, and before its waiter does.
            task = asyncio.current_task() if role == "server" else waiting[0]
            assert task is not None
            asyncio.get_running_loop().call_soon(task.cancel)

    use(monkeypatch, LastMoment, role)
    async with communicators(**BESIDE) as (near, far):
        address = await far.listen("127.0.0.1:0")
        waiting.append(asyncio.ensure_future(near.connect(address)))
        await asyncio.wait(waiting)
        if role == "server":
            await waiting[0].result().close()
        else:
            assert waiting[0].cancelled()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_connection_that_ends_while_a_lane_comes_up_is_not_that_lane_s_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``connect`` says at once that it was lost, and blames no transport."""
    use(monkeypatch, HangingLane, "client")
    async with communicators(**BESIDE) as (near, far):
        address = await far.listen("127.0.0.1:0")
        connecting = asyncio.ensure_future(near.connect(address))
        await until(lambda: _is_joining(near))
        for connection in far.live_connections:
            connection.abort("the peer had enough")
        with pytest.raises(ConnectionClosed):
            async with asyncio.timeout(LANE_TIMEOUT_SHARE * PATIENCE_S / 2):
                await connecting
        assert not near.counters.lanes_failed
    assert not warned(caplog)


def _is_joining(near: kvwire.Communicator) -> bool:
    """Whether a lane is known that is not up."""
    return any(not inside.lanes(c).quiet for c in near.live_connections)


@pytest.mark.parametrize("role", ["client", "server"])
async def test_what_fails_and_is_required_is_an_error(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which says what was tried, and why each of it failed."""
    use(monkeypatch, _Refusing, role)
    async with communicators(**ONLY) as (near, far):
        address = await far.listen("127.0.0.1:0")
        with pytest.raises(BackendUnavailable, match=r"inproc: .*the device has gone"):
            await near.connect(address)
        await until(lambda: not far.live_connections)


@pytest.mark.parametrize(
    "error",
    [
        BackendUnavailable("no such device"),
        OSError(errno.EMFILE, "no such device, or too many files"),
        ZeroDivisionError("no such device: a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_transport_without_any_lane_is_refused_at_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server is asked, whatever the backend raises."""

    class Never(InprocLane):
        def __init__(self) -> None:
            raise error

    use(monkeypatch, Never, "both")
    async with connected(**BESIDE) as pair:
        await expect_moves(pair)
        assert "no such device" in reasons(pair.left.transport_report)["inproc"]


@asynccontextmanager
async def endless_lanes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """A pair whose lanes end when the block does, whatever is asked of them before."""
    stuck: dict[InprocLane, None] = {}

    class Endless(InprocLane):
        def close(self) -> None:
            stuck[self] = None

        def abort(self, error: Exception | None = None) -> None:
            stuck[self] = None

    use(monkeypatch, Endless, "both")
    monkeypatch.setattr("kvwire.endpoint.communicator.CLOSE_SLACK_S", 0.05)
    async with connected(**BESIDE, close_timeout_s=0.1) as pair:
        await expect_moves(pair)
        yield pair
        assert stuck
        for lane in stuck:
            InprocLane.abort(lane)
        ends = inside.links(pair.near), inside.links(pair.far)
        await until(lambda: not any(end.drivers for end in ends))


async def test_a_lane_that_never_falls_silent_does_not_hold_up_the_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The communicator closes and says what it has left; the lane keeps its memory."""
    async with endless_lanes(monkeypatch) as pair:
        await pair.near.close()
        await pair.far.close()
        assert any("stay in quarantine" in r.getMessage() for r in caplog.records)


async def test_nor_does_a_client_that_has_come_back_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its transfers wait until the lane that it has lost is quiet: never, here."""
    async with endless_lanes(monkeypatch) as pair:
        await inside.links(pair.near).redial(pair.left)
        await until(lambda: pair.right.closed)
        async with asyncio.timeout(60.0):
            await pair.near.close()
            await pair.far.close()
        assert inside.drivers(pair.near), "the lane's memory is not given up for that"


# --- what comes back ------------------------------------------------------------------


def break_lanes(end: kvwire.Connection) -> None:
    """As when its device is reset: our halves of all lanes are gone at once."""
    for endpoint in list(inside.lanes(end).open):
        endpoint.lane.abort()


async def restored(pair: Pair, count: int) -> None:
    """Wait until both sides have seen so many lanes come back."""
    await until(
        lambda: (
            pair.near.counters.lanes_restored == count
            and pair.far.counters.lanes_restored == count
        )
    )


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.usefixtures("comes_back")
async def test_a_lane_that_broke_comes_back_and_carries_the_data(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides say so: the transport, its report, the counters, and one line."""
    caplog.set_level(logging.INFO, "kvwire")
    async with connected(**BESIDE) as pair:
        await expect_moves(pair)
        break_lanes(pair.left if side == "client" else pair.right)
        await until(partial(is_over, pair.left, "tcp"))
        await restored(pair, 1)
        before = on_lanes(pair)
        await expect_moves(pair)
        assert on_lanes(pair) - before == 6 * len(DATA)
        for end, owner in ((pair.left, pair.near), (pair.right, pair.far)):
            assert end.transport == end.transport_report.taken == "inproc"
            taken = next(c for c in end.transport_report if c.taken)
            assert taken.reason == "a copy within the process"
            assert reasons(end.transport_report)["tcp"] == "another was preferred"
            counters = owner.counters
            assert counters.lanes_raised == 2
            await until(partial(getattr, counters, "lanes_failed"))
            assert counters.lanes_failed == 1
            assert counters.transport_fallbacks == 1, "coming back is none"
        back = "is back and carries the data again"
        await until(lambda: caplog.text.count(back) == 2)
        assert caplog.text.index("inproc failed") < caplog.text.index(back)


@pytest.mark.usefixtures("comes_back")
async def test_of_several_each_comes_back_and_the_log_names_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others carry the data meanwhile: nothing falls back."""
    caplog.set_level(logging.INFO, "kvwire")
    async with connected("tcp", prefer=("tcp",), lanes=4) as pair:
        one, *others = inside.lanes(pair.left).open[:3]
        one.lane.abort()
        await restored(pair, 1)
        for endpoint in others:
            endpoint.lane.abort()
        await restored(pair, 3)
        await until(lambda: caplog.text.count("a lane of tcp is back") == 6)
        assert "a lane of tcp broke" in caplog.text
        assert pair.near.counters.transport_fallbacks == 0


@pytest.mark.usefixtures("comes_back")
async def test_it_comes_back_however_often_it_breaks() -> None:
    """More often than there may be lanes at once, in the middle of one put."""
    async with connected(**BESIDE) as pair:
        memory = bytearray(len(DATA))
        region = pair.far.register(memory, "readwrite")
        grant = region.grant(pair.right)
        for count in range(1, 2 * LANES_MAX):
            memory[:] = bytes(len(DATA))
            put = pair.left.put(DATA, grant)
            break_lanes(pair.left if count % 2 else pair.right)
            await put
            assert memory == DATA
            await restored(pair, count)
        assert pair.left.transport == pair.right.transport == "inproc"
        await region.close()
        assert not len(inside.buffers(pair.near).holds)
        assert not len(inside.buffers(pair.far).holds)


async def test_transports_that_a_client_makes_up_are_not_remembered() -> None:
    """It may ask for another one each time, for as long as the connection lives."""
    async with connected(**BESIDE) as pair:
        lanes = inside.core(pair.left).lanes
        for turn in range(2 * LANES_MAX):
            number = lanes.next_number()
            assert number is not None
            lanes.open(number, f"made up {turn}", b"")
            inside.run(pair.left)
            await until(lambda: lanes._lanes[number].peer_closed)  # noqa: B023
            inside.core(pair.left).lane_gone(number, "neither do I")
            inside.run(pair.left)
        assert not inside.lanes(pair.right).failed
        await expect_moves(pair)


@pytest.mark.usefixtures("comes_back")
async def test_a_peer_that_refuses_is_asked_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a few times it stays as it is for long, and the log says why."""
    async with connected(**BESIDE) as pair:
        use(monkeypatch, _Refusing, "server")
        break_lanes(pair.left)
        await until(lambda: pair.near.counters.lanes_failed == 1 + REFUSALS_MAX)
        await until(lambda: not inside.driver(pair.left).lane_setup.busy)
        await expect_moves(pair)
        assert pair.left.transport == pair.right.transport == "tcp"
        assert pair.near.counters.lanes_failed == 1 + REFUSALS_MAX
        await until(lambda: "inproc is not requested for 600 s" in caplog.text)
        assert "the device has gone" in caplog.text


@pytest.mark.usefixtures("comes_back")
async def test_a_peer_that_has_refused_often_may_take_a_lane_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "REFUSED_PAUSE_S", 0.05)
    async with connected(**BESIDE) as pair:
        use(monkeypatch, _Refusing, "server")
        break_lanes(pair.left)
        # Each pause begins after one more refusal.
        await until(lambda: pair.near.counters.lanes_failed > 3 + REFUSALS_MAX)
        assert pair.left.transport == "tcp"
        use(monkeypatch, InprocLane, "both")
        await restored(pair, 1)


@pytest.mark.usefixtures("comes_back")
async def test_what_fails_on_this_side_is_tried_until_it_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has refused anything: our device may be back tomorrow."""
    async with connected(**BESIDE) as pair:
        use(monkeypatch, _Refusing, "client")
        break_lanes(pair.right)
        await until(lambda: pair.near.counters.lanes_failed > 3 * REFUSALS_MAX)
        assert pair.left.transport == "tcp"
        use(monkeypatch, InprocLane, "both")
        await restored(pair, 1)
        await expect_moves(pair)
        assert pair.left.transport == pair.right.transport == "inproc"


@pytest.mark.usefixtures("comes_back")
async def test_what_never_came_up_is_not_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice was made without it: nothing has changed since."""
    use(monkeypatch, _Refusing, "server")
    async with connected(**BESIDE) as pair:
        await expect_moves(pair)
        assert not inside.driver(pair.left).lane_setup.busy
        assert pair.near.counters.lanes_failed == 1


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("stage", ["waiting", "joining"])
async def test_the_end_of_a_connection_ends_the_setup_of_lanes(
    how: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its pause or in the middle of a join; nobody waits for either."""
    async with connected(**BESIDE) as pair:
        if stage == "joining":
            raise_again_after(monkeypatch, 0.0)
            use(monkeypatch, HangingLane, "client")
        break_lanes(pair.left)
        await until(lambda: inside.driver(pair.left).lane_setup.busy)
        if stage == "joining":
            await until(lambda: not inside.lanes(pair.left).quiet)
        async with asyncio.timeout(LANE_TIMEOUT_SHARE * PATIENCE_S / 2):
            if how == "close":
                await pair.left.close()
            else:
                pair.left.abort("enough")
                await pair.left.wait_closed()
            await pair.right.wait_closed()
        assert not inside.driver(pair.left).lane_setup.busy
