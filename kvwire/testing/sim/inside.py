"""The only place that looks inside the core: tables, credit, and what must not be.

These are invariants that hold after every call into the core, whatever happened.
"""
# ruff: noqa: SLF001 - see above

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.proto import messages, regions, requests
from kvwire.proto.state import Phase
from kvwire.testing.sim.violation import demand

if TYPE_CHECKING:
    from kvwire.testing.sim.endpoint import Endpoint


def check(endpoint: Endpoint) -> None:
    """Demand everything that holds whenever the core has nothing more to say.

    Raises:
        Violation: Something does not.
    """
    core = endpoint.core
    _check_credit(endpoint)
    table = core._requests
    most = requests.REQUESTS_MAX
    ours = len(table._ours) + len(table._unmatched)
    # A RECV that has met its message leaves the room of those that have not.
    theirs = len(table._theirs)
    demand(ours <= most, "table", "too many requests of this side are open")
    demand(theirs <= 4 * most, "table", "too many requests of the peer are open")
    kept = len(table._deadlines)
    demand(kept <= max(most, 2 * (ours + theirs)) + 1, "table", "too many deadlines")
    demand(len(core._messages._announced) <= most, "table", "too many announcements")
    demand(len(core._grants) <= regions.GRANTS_MAX, "table", "too many grants")
    if core.phase in (Phase.FLUSHING, Phase.ANSWERING):
        demand(len(table), "close", "nothing is left to deliver, and no CLOSE was sent")
    elif core.phase is Phase.CLOSED:
        demand(core.error is not None, "closed", "closed without a reason")
        demand(not len(table), "closed", "requests are open on a closed connection")


def _check_credit(endpoint: Endpoint) -> None:
    box = endpoint.core._messages
    mine, theirs = box._credit, box._send_credit
    window, room = mine._messages, theirs._max_messages
    demand(0 <= theirs.messages <= room, "credit", "credit to send messages")
    demand(0 <= theirs.nbytes <= theirs._max_bytes, "credit", "credit to send bytes")
    demand(0 <= mine.left.messages <= window, "credit", "credit given for messages")
    demand(0 <= mine.left.nbytes <= mine._nbytes, "credit", "credit given for bytes")
    used = mine.left.messages + mine.due_messages + _held(box)
    demand(
        endpoint.core.closed or used == window,
        "credit",
        "credit given, due and in use do not add up to the window",
    )


def _held(box: messages.Messages) -> int:
    """Messages that have begun to arrive and were not taken."""
    held = sum(waiting.wire_id is None for q in box._waiting.values() for waiting in q)
    return held + _landing(box)


def _landing(box: messages.Messages) -> int:
    """Messages that are landing in memory of the receive they have met."""
    return sum(
        arrival.request is not None and arrival.request.wire_id is None
        for arrival in box._flows._landing
    )


def check_credit_agrees(sender: Endpoint, receiver: Endpoint) -> None:
    """With nothing on the way, both sides count the same credit.

    Raises:
        Violation: They do not.
    """
    has, given = sender.core._messages._send_credit, receiver.core._messages._credit
    demand(
        (has.messages, has.nbytes) == (given.left.messages, given.left.nbytes),
        "credit",
        f"{sender.name} has credit {has.messages, has.nbytes}, its peer has given "
        f"{given.left.messages, given.left.nbytes}",
    )


def landed_messages(endpoint: Endpoint) -> int:
    """Whole and intact messages that wait to be asked for."""
    waiting = [w for q in endpoint.core._messages._waiting.values() for w in q]
    return sum(w.wire_id is None and w.whole and not w.error for w in waiting)
