"""The only place that looks inside the core: tables, credit, and what must not be.

These are invariants that hold after every call into the core, whatever happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.proto import messages
from kvwire.proto.state import CloseState
from tests.programs.sim import scale
from tests.programs.sim.memory import demand

if TYPE_CHECKING:
    from tests.programs.sim.endpoint import Endpoint


def check(endpoint: Endpoint) -> None:
    """Demand everything that holds whenever the core has nothing more to say."""
    core = endpoint.core
    table, phase = core._requests, core.phase
    if phase is CloseState.CLOSED:
        demand(core.error is not None, "closed", "closed without a reason")
        demand(not len(table), "closed", "requests are open on a closed connection")
        return
    _check_credit(core.messages, endpoint)
    most, grants_most = scale.requests_max(), scale.grants_max()
    ours = len(table._ours) + len(table._unmatched)
    theirs, kept = len(table._theirs), len(table._deadlines)
    demand(ours <= most, "table", "too many requests of this side are open")
    # Also those that only wait for a completion, and receives that met a message.
    demand(theirs <= 4 * most, "table", "too many requests of the peer are open")
    demand(kept <= 9 * most, "table", "too many deadlines are kept")
    demand(len(core.messages._announced) <= most, "table", "too many announcements")
    demand(len(core._grants) <= grants_most, "table", "too many grants")
    _check_windows(endpoint)
    if phase is not CloseState.OPEN and phase is not CloseState.CLOSE_SENT:
        demand(len(table), "close", "nothing is left to deliver, and no CLOSE was sent")


def _check_windows(endpoint: Endpoint) -> None:
    """While nothing is under way, both sides have the same windows open."""
    peer, end = endpoint.peer, endpoint.end
    mine = endpoint.core.windows
    demand(mine._opened == endpoint.opened.keys(), "window", "not those in the core")
    demand(mine._shown >= endpoint.shown.keys(), "window", "one the core forgot")
    if peer is None or peer.ended is not None or not end.out.wire.still:
        return
    for reader, owner in ((endpoint, peer), (peer, endpoint)):
        demand(
            reader.core.windows._opened == owner.core.windows._shown,
            "window",
            "a window that one side alone has open",
        )
        demand(
            all(o.ending or not o.window.closed for o in reader.opened.values()),
            "window",
            "a window whose owner has closed it, and its reader has not been told",
        )


def _check_credit(box: messages.Messages, endpoint: Endpoint) -> None:
    mine, theirs = box._credit, box._send_credit
    demand(0 <= theirs.messages <= theirs._max_messages, "credit", "to send messages")
    demand(0 <= theirs.nbytes <= theirs._max_bytes, "credit", "to send bytes")
    given, window = mine.left, mine._messages
    demand(0 <= given.messages <= window, "credit", "given for messages")
    demand(0 <= given.nbytes <= mine._nbytes, "credit", "given for bytes")
    used = window - given.messages - mine.due_messages
    if used or box._waiting:
        demand(
            used == _held(box) + _landing(box) + endpoint.passing,
            "credit",
            "credit given, due and in use do not add up to the window",
        )


def _held(box: messages.Messages) -> int:
    """Messages that have begun to arrive and were not taken."""
    return sum(
        waiting.wire_id is None for queue in box._waiting.values() for waiting in queue
    )


def _landing(box: messages.Messages) -> int:
    """Messages that are landing in memory of the receive they have met."""
    return sum(waiting is None for waiting in box._arriving.values())


def landed_messages(endpoint: Endpoint) -> int:
    """Whole and intact messages that wait to be asked for."""
    waiting = [w for q in endpoint.core.messages._waiting.values() for w in q]
    return sum(w.wire_id is None and w.whole and not w.error for w in waiting)
