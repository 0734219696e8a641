"""Turns: the choice of the request that sends its next chunk.

Higher priorities go first. Within one priority, requests take turns of ``turn_bytes``,
and a new request goes before requests that have had a turn. So a message or a short
prompt beside eight long ones waits only for the chunks in flight, not for a turn of
each. To keep the long ones from starving while short ones keep coming, an old request
gets a turn between two new ones. A lane may take more bytes at once than are left in a
turn; then the request skips later turns in exchange. So all requests send at the same
rate, whatever the size of their pieces.

A transfer has one place among the turns, however many of its segments are marked, and
sends them in the order of their marks. So its first layer arrives first, and a broken
link leaves at most one segment incomplete. A transfer that has sent all its marked
segments counts as new again with its next layer, since a consumer is waiting for that.

The scheme is deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) with the new
flows of FQ-CoDel (RFC 8290, section 4.2); and between two new requests, an old one
has a turn.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import Final

from kvwire.limits import REQUESTS_MAX
from kvwire.proto.records import RequestRecord, SegmentRecord
from kvwire.proto.state import RequestStage

Mover = RequestRecord | SegmentRecord
"""The sender of chunks: a request as a whole, or a segment of a transfer."""

_MOVING: Final = RequestStage.MOVING


class Scheduler:
    """Chooses the request, or segment of a request, that sends next.

    Attributes:
        turn_bytes: The number of bytes that a request may send per turn.
        count: Requests that have or wait for a turn, including some that have ended.
    """

    __slots__ = ("_count_max", "_head", "_levels", "_segments", "count", "turn_bytes")

    def __init__(self, turn_bytes: int) -> None:
        self.turn_bytes: int = turn_bytes
        self.count: int = 0
        # When to remove ended requests.
        self._count_max = REQUESTS_MAX
        # Highest priority first.
        self._levels: list[_Level] = []
        # The queued segments of each transfer, oldest first; never an empty queue.
        self._segments: dict[RequestRecord, deque[SegmentRecord]] = {}
        # The queue with the request whose turn it is.
        self._head: tuple[_Level, deque[RequestRecord]] | None = None

    def add(
        self,
        request: RequestRecord,
        priority: int = 0,
        segment: SegmentRecord | None = None,
    ) -> None:
        """Queue a request that begins to send, or one more segment of it."""
        if segment is not None:
            segments = self._segments.get(request)
            if segments is not None:
                segments.append(segment)  # bounded: SEGMENTS_MAX
                return
            self._segments[request] = deque((segment,))  # bounded: REQUESTS_MAX
        if self.count >= self._count_max:
            self._drop_dead()
            # Not again before their number has doubled, since all may be alive.
            self._count_max = max(REQUESTS_MAX, 2 * self.count)
        self.count += 1
        request.turn_bytes = self.turn_bytes
        for level in self._levels:
            if level.priority == priority:
                break
        else:
            level = _Level(priority)
            self._levels.append(level)  # bounded: PRIORITY_MAX
            self._levels.sort(key=attrgetter("priority"), reverse=True)
        level.new.append(request)  # bounded: REQUESTS_MAX

    def head(self) -> Mover | None:
        """Return the mover whose turn it is, after removing ended movers."""
        # After: `_head` is the returned request's place, for `sent`; ended requests
        # before it have been removed.
        for level in self._levels:
            while level.new or level.old:
                take_old = level.old and (level.old_turn_due or not level.new)
                turn = level.old if take_old else level.new
                request = turn[0]
                if request.state is not _MOVING:
                    self._left(turn.popleft())
                    continue
                if request.turn_bytes > 0:
                    self._head = level, turn
                    segments = self._segments.get(request)
                    return segments[0] if segments else request
                # It has sent too much: skip its turn. Each skipped turn adds
                # `turn_bytes`, so this loop ends.
                request.turn_bytes += self.turn_bytes
                turn.rotate(-1)
        return None

    def sent(self, length: int) -> None:
        """Charge the mover whose turn it is for ``length`` bytes.

        Before: ``head`` has returned it, and ``moved`` includes these bytes already.
        After: it keeps its turn; or its request is at the end of the old ones; or it
        has left the turns because it has sent everything.
        """
        assert self._head is not None
        level, turn = self._head
        request = turn[0]
        request.turn_bytes -= length
        segments = self._segments.get(request)
        mover = segments[0] if segments else request
        goes_on = mover.moved < mover.nbytes
        if segments and not goes_on:
            # A transfer has one place among the turns: its next segment inherits the
            # place and the rest of the turn.
            segments.popleft()
            goes_on = bool(segments)
            if not goes_on:
                del self._segments[request]
        if goes_on and request.turn_bytes > 0:
            return
        turn.popleft()
        # After a new request's turn, an old request is next, if there is any.
        level.old_turn_due = turn is level.new and bool(level.old)
        if goes_on:
            request.turn_bytes += self.turn_bytes
            level.old.append(request)  # bounded: REQUESTS_MAX
        else:
            self.count -= 1

    def clear(self) -> None:
        """Remove every mover."""
        self.count = 0
        self._levels.clear()
        self._segments.clear()

    def _left(self, request: RequestRecord) -> None:
        """Remove a request that has left its turn, with its segments."""
        self.count -= 1
        self._segments.pop(request, None)

    def _drop_dead(self) -> None:
        """Remove ended requests.

        ``head`` also removes them, but only while the link takes chunks: without this
        method, a peer that asks, cancels and never reads would make the queues grow.
        """
        for level in self._levels:
            for turn in (level.new, level.old):
                for _ in range(len(turn)):
                    request = turn.popleft()
                    if request.state is _MOVING:
                        turn.append(request)
                    else:
                        self._left(request)


class _Level:
    """Queues the requests of one priority.

    Attributes:
        new: Requests that have not had a turn yet.
        old: Requests that have had a turn.
        old_turn_due: Whether the next turn belongs to an old request.
    """

    __slots__ = ("new", "old", "old_turn_due", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.new: deque[RequestRecord] = deque()
        self.old: deque[RequestRecord] = deque()
        self.old_turn_due = False
