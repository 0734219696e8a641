"""What the report says after each change, and what is counted and logged.

In virtual time. What carries the data is in test_state.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import pytest

from kvwire.driver.lanes import active_transport as module
from kvwire.driver.lanes.active_transport import LOG_DELAY_S, ActiveTransport
from kvwire.driver.lanes.state import LaneEndpoint, LaneInput, LaneSet
from kvwire.runtime.counters import Counters
from kvwire.types import Candidate, PeerInfo, TransportReport, TrustMode
from tests.support.virtual_time import pass_time

pytestmark = pytest.mark.asyncio(loop_factories=["virtual"])

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
    """An active transport, and lanes that are open because the test says so."""

    def __init__(self, scheme: str = "tcp", peer: PeerInfo = FAR) -> None:
        self.lanes = LaneSet(scheme, REPORT)
        self.counters = Counters()
        self.active = ActiveTransport(self.lanes, peer, self.counters)
        self._count = 0

    def open(self, backend: str) -> LaneEndpoint:
        self._count += 1
        lane = cast("Any", Described(f"what {backend} is"))
        endpoint = LaneEndpoint(self._count, backend, lane)
        self.lanes.add(endpoint)
        self.lanes.advance(endpoint, LaneInput.JOINED)
        self.lanes.advance(endpoint, LaneInput.READY)
        return endpoint

    def settle(self) -> None:
        self.lanes.end_initial_set()
        self.active.initial_set_done()

    def lose(self, endpoint: LaneEndpoint, reason: str) -> None:
        self.lanes.advance(endpoint, LaneInput.GONE, reason)
        self.active.lane_broke(endpoint)

    @property
    def reasons(self) -> dict[str, str]:
        """Why each transport carries the data, or does not."""
        return {c.name: c.reason for c in self.active.report}


class Described:
    """A backend's lane, as far as the report shows it."""

    def __init__(self, description: str) -> None:
        self.description = description


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(r.levelno, r.getMessage().split(": ", 1)[1]) for r in caplog.records]


async def test_what_breaks_is_replaced_when_nothing_of_it_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = Ends()
    first, second = ends.open("fast"), ends.open("fast")
    ends.settle()
    ends.lose(first, "reset")
    assert ends.active.name == "fast"
    await pass_time(LOG_DELAY_S / 2)
    ends.lose(second, "reset again")
    assert ends.active.name == ends.active.report.taken == "tcp"
    assert ends.reasons["tcp"] == "fast failed: reset again"
    assert ends.reasons["fast"] == "reset again"
    await pass_time(LOG_DELAY_S / 2)
    ends.active.lane_came_back(ends.open("fast"))
    assert ends.active.name == ends.active.report.taken == "fast"
    assert ends.reasons["tcp"] == "another was preferred"
    await pass_time(LOG_DELAY_S / 2)
    ends.active.lane_came_back(ends.open("fast"))
    assert ends.counters.lanes_restored == 2
    await pass_time(2 * LOG_DELAY_S)
    assert ends.counters.transport_fallbacks == 1, "coming back is none"
    assert ends.counters.lanes_failed == 2
    assert said(caplog) == [
        (logging.WARNING, "a lane of fast broke: reset"),
        (
            logging.WARNING,
            "fast failed, and the control link carries the data now: reset again",
        ),
        (logging.INFO, "fast is back and carries the data again"),
        (logging.INFO, "a lane of fast is back"),
    ]


async def test_what_breaks_before_the_first_choice_is_counted_once() -> None:
    ends = Ends()
    ends.lose(ends.open("fast"), "reset")
    ends.settle()
    assert ends.active.name == "tcp"
    await pass_time(2 * LOG_DELAY_S)
    assert ends.counters.transport_fallbacks == 1


async def test_a_peer_that_dies_is_no_failed_transport() -> None:
    """Its lanes end a moment before its connection does."""
    ends = Ends()
    lane = ends.open("fast")
    ends.settle()
    ends.lose(lane, "reset")
    await pass_time(LOG_DELAY_S / 2)
    ends.active.end()
    await pass_time(2 * LOG_DELAY_S)
    assert ends.counters.transport_fallbacks == ends.counters.lanes_failed == 0


async def test_what_is_said_is_said_a_moment_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    active = Ends().active
    active.log("one")
    await pass_time(LOG_DELAY_S / 2)
    active.log("two", logging.INFO)
    assert (said(caplog), active.pending) == ([], 2)
    await pass_time(LOG_DELAY_S)
    assert said(caplog) == [(logging.WARNING, "one"), (logging.INFO, "two")]
    assert active.pending == 0


async def test_what_is_not_said_before_the_end_is_never_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    active = Ends().active
    active.log("one")
    await pass_time(2 * LOG_DELAY_S)
    active.log("two")
    active.end()
    assert active.pending == 0
    await pass_time(2 * LOG_DELAY_S)
    assert said(caplog) == [(logging.WARNING, "one")]


@pytest.fixture(autouse=True)
def _every_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvwire")


async def test_in_mtls_the_report_says_who_can_read_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protected = {"tcp": "inside TLS", "fast": ""}
    monkeypatch.setattr(module, "protection", protected.__getitem__)
    ends = Ends(peer=replace(FAR, trust=TrustMode.MTLS))
    assert ends.reasons["fast"] == "offered by both sides; NOT ENCRYPTED"
    ends.settle()
    assert ends.reasons["tcp"] == "offered by both sides; inside TLS"
    ends.open("fast")
    assert ends.reasons["fast"] == "what fast is; NOT ENCRYPTED"
