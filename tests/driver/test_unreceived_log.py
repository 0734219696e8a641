"""A tag is named once, when the same message has been its oldest for long."""

from __future__ import annotations

from kvwire.driver.unreceived_log import Seen, overdue
from kvwire.limits import WAITING_LOG_S


def test_who_is_named_and_when() -> None:
    first, second = object(), object()
    seen: Seen = {}
    assert overdue(seen, {1: first, 2: first}, 100.0) == []
    late = 100.0 + WAITING_LOG_S
    # The first message of tag 2 was received meanwhile.
    assert overdue(seen, {1: first, 2: second}, late) == [1]
    assert overdue(seen, {1: first, 2: second}, late + 1) == []
    assert overdue(seen, {2: second}, late + WAITING_LOG_S) == [2]
    assert overdue(seen, {1: first}, late + WAITING_LOG_S) == []
    assert overdue(seen, {1: first}, late + 2 * WAITING_LOG_S) == [1]
