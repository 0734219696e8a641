"""What carries the data after each change, what the report says, and what is logged.

In virtual time. That data moves over it is in test_lanes.py and test_raising.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvwire.driver.counters import Counters
from kvwire.driver.lanes import active_transport as carrier_module
from kvwire.driver.lanes.active_transport import WORD_S, ActiveTransport
from kvwire.driver.lanes.scheduler import LaneEndpoint, LaneScheduler
from kvwire.types import Candidate, PeerInfo, TransportReport, TrustMode
from tests.support import virtual_time

REPORT = TransportReport(
    (
        Candidate("fast", True, "offered by both sides", possible=True),
        Candidate("tcp", False, "another was preferred", possible=True),
        Candidate("slow", False, "forbidden by `forbid`"),
    )
)
FAR = PeerInfo(
    name="far", incarnation=bytes(8), address=None, trust=TrustMode.LOOPBACK, version=1
)


class Ends:
    """A carrier, and lanes that are up because the test says so."""

    def __init__(self, scheme: str = "tcp", peer: PeerInfo = FAR) -> None:
        self.lanes = cast("LaneScheduler", SimpleNamespace(up=[], shared=False))
        self.counters = Counters()
        self.carrier = ActiveTransport(
            self.lanes,
            scheme=scheme,
            report=REPORT,
            peer=peer,
            counters=self.counters,
        )

    def up(self, backend: str) -> LaneEndpoint:
        lane = SimpleNamespace(description=f"what {backend} is")
        half = LaneEndpoint(1, backend, cast("Any", lane))
        self.lanes.up.append(half)
        return half

    @property
    def reasons(self) -> dict[str, str]:
        """Why each transport carries the data, or does not."""
        return {c.name: c.reason for c in self.carrier.report}


def virtually(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    virtual_time.run(scenario())


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(r.levelno, r.getMessage().split(": ", 1)[1]) for r in caplog.records]


def test_a_lane_is_taken_as_was_wished() -> None:
    async def scenario() -> None:
        ends = Ends()
        ends.carrier.take_lane(ends.up("fast"))
        assert ends.carrier.taken == ends.carrier.report.taken == "fast"
        assert ends.reasons["fast"] == "what fast is"
        assert ends.reasons["slow"] == "forbidden by `forbid`"
        assert not ends.lanes.shared
        assert not ends.counters.transport_fallbacks

    virtually(scenario)


def test_the_control_link_is_taken_when_a_lane_does_not_come_up() -> None:
    async def scenario() -> None:
        ends = Ends()
        ends.carrier.failed["fast"] = "no such device"
        ends.carrier.take_link()
        assert ends.carrier.taken == ends.carrier.report.taken == "tcp"
        assert ends.reasons["tcp"] == "offered by both sides"
        assert ends.reasons["fast"] == "no such device"
        assert ends.lanes.shared
        assert ends.counters.transport_fallbacks == 1

    virtually(scenario)


def test_what_breaks_is_replaced_when_nothing_of_it_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        ends = Ends()
        half = ends.up("fast")
        ends.carrier.take_lane(half)
        ends.carrier.lane_broke("fast", "reset")
        assert ends.carrier.taken == "fast"
        await virtual_time.pass_time(WORD_S / 2)
        ends.lanes.up.clear()
        ends.carrier.lane_broke("fast", "reset again")
        assert ends.carrier.taken == ends.carrier.report.taken == "tcp"
        assert ends.reasons["tcp"] == "fast failed: reset again"
        assert ends.reasons["fast"] == "reset again"
        assert ends.counters.transport_fallbacks == 1
        await virtual_time.pass_time(WORD_S / 2)
        ends.lanes.up.append(half)
        ends.carrier.lane_came_back(half)
        assert ends.carrier.taken == ends.carrier.report.taken == "fast"
        assert ends.reasons["tcp"] == "another was preferred"
        assert ends.counters.transport_fallbacks == 1, "coming back is none"
        await virtual_time.pass_time(WORD_S / 2)
        ends.up("fast")
        ends.carrier.lane_came_back(half)
        await virtual_time.pass_time(2 * WORD_S)

    virtually(scenario)
    assert said(caplog) == [
        (logging.WARNING, "a lane of fast broke: reset"),
        (
            logging.WARNING,
            "fast failed, and the control link carries the data now: reset again",
        ),
        (logging.INFO, "fast is back and carries the data again"),
        (logging.INFO, "a lane of fast is back"),
    ]


def test_a_lane_of_the_control_link_s_own_transport_shares_with_it() -> None:
    async def scenario() -> None:
        ends = Ends(scheme="fast")
        half = ends.up("fast")
        ends.carrier.take_link()
        ends.carrier.lane_came_back(half)
        assert ends.lanes.shared
        assert ends.reasons["fast"] == "offered by both sides"

    virtually(scenario)


def test_what_is_said_is_said_a_moment_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        carrier = Ends().carrier
        carrier.say("one")
        await virtual_time.pass_time(WORD_S / 2)
        carrier.say("two", logging.INFO)
        assert (said(caplog), carrier.untold) == ([], 2)
        await virtual_time.pass_time(WORD_S)
        assert said(caplog) == [(logging.WARNING, "one"), (logging.INFO, "two")]
        assert carrier.untold == 0

    virtually(scenario)


def test_what_is_not_said_before_the_end_is_never_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        carrier = Ends().carrier
        carrier.say("one")
        await virtual_time.pass_time(2 * WORD_S)
        carrier.say("two")
        carrier.end()
        assert carrier.untold == 0
        await virtual_time.pass_time(2 * WORD_S)

    virtually(scenario)
    assert said(caplog) == [(logging.WARNING, "one")]


@pytest.fixture(autouse=True)
def _every_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvwire")


def test_in_mtls_the_report_says_who_can_read_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protected = {"tcp": "inside TLS", "fast": ""}
    monkeypatch.setattr(carrier_module, "protection", protected.__getitem__)

    async def scenario() -> None:
        ends = Ends(peer=replace(FAR, trust=TrustMode.MTLS))
        assert ends.reasons["fast"] == "offered by both sides; NOT ENCRYPTED"
        ends.carrier.take_lane(ends.up("fast"))
        assert ends.reasons["fast"] == "what fast is; NOT ENCRYPTED"
        ends.carrier.take_link()
        assert ends.reasons["tcp"] == "offered by both sides; inside TLS"

    virtually(scenario)
