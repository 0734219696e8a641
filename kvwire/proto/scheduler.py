"""Whose turn it is: what sends the next chunk of a connection.

A higher priority goes first. Within one priority whoever sends takes turns of
``turn_bytes``, and who is new goes before who has had a turn already: a message or a
short prompt beside eight long ones waits for what is on its way, and not for a turn of
each. That must not starve the long ones when short ones never end, so between two new
ones an old one has its turn. A lane may take more at once than is left of a turn; that
is made up for by turns that are passed over. So everybody sends as many bytes as the
others, in whatever pieces they lie.

A transfer has one turn, however many of its segments are marked, and sends them in the
order of their marks: so its first layer arrives first, and a broken link leaves at most
one segment half sent. One that has sent all that was marked is new again with its next
layer, which somebody is waiting for.

The scheme is deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) with the new
flows of FQ-CoDel (RFC 8290, section 4.2), but for the old one between two new ones.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter

from kvwire.limits import REQUESTS_MAX
from kvwire.proto.records import SegmentRecord
from kvwire.proto.requests import RequestRecord
from kvwire.proto.state import RequestStage

Mover = RequestRecord | SegmentRecord
"""What sends chunks: a request in one piece, or a segment of a transfer."""


class Scheduler:
    """Picks which mover of one connection sends next.

    Attributes:
        turn_bytes: What each may send in its turn.
        count: Movers that have or wait for a turn, those included that are over by now.
    """

    __slots__ = ("_behind", "_count_max", "_head", "_levels", "count", "turn_bytes")

    def __init__(self, turn_bytes: int) -> None:
        self.turn_bytes: int = turn_bytes
        self.count: int = 0
        # When to look for movers that are over.
        self._count_max = REQUESTS_MAX
        # Highest priority first.
        self._levels: list[_Level] = []
        # Segments that wait behind the one that has their transfer's turn.
        self._behind: dict[RequestRecord, deque[SegmentRecord]] = {}
        # Where the mover is whose turn it is.
        self._head: tuple[_Level, deque[Mover]] | None = None

    def add(self, request: RequestRecord) -> None:
        """Queue a request that has begun to send."""
        self._queue(request, 0)

    def add_segment(self, segment: SegmentRecord, priority: int) -> None:
        """Queue a segment behind the earlier ones of its transfer."""
        behind = self._behind.get(segment.request)
        if behind is not None:
            behind.append(segment)  # bounded: SEGMENTS_MAX
            return
        self._behind[segment.request] = deque()  # bounded: REQUESTS_MAX
        self._queue(segment, priority)

    def head(self) -> Mover | None:
        """Return the mover whose turn it is, after removing those that are over."""
        for level in self._levels:
            while level.new or level.old:
                take_old = level.old and (level.old_turn_due or not level.new)
                turn = level.old if take_old else level.new
                mover = turn[0]
                if mover.state is not RequestStage.MOVING:
                    self._left(turn.popleft())
                    continue
                request = _request(mover)
                if request.turn_bytes > 0:
                    self._head = level, turn
                    return mover
                # It has sent too much before: a turn passed over pays that back, and
                # each adds `turn_bytes`, so this loop ends.
                request.turn_bytes += self.turn_bytes
                turn.rotate(-1)
        return None

    def sent(self, length: int) -> None:
        """Charge the mover whose turn it is for so many bytes."""
        assert self._head is not None
        level, turn = self._head
        mover = turn[0]
        request = _request(mover)
        request.turn_bytes -= length
        # A transfer has one place among the turns: its next segment inherits it, and
        # what is left of the turn.
        following = mover if mover.moved < mover.nbytes else self._after(mover)
        if following is not None and request.turn_bytes > 0:
            turn[0] = following
            return
        turn.popleft()
        level.end_turn(turn)
        if following is None:
            self.count -= 1
        else:
            request.turn_bytes += self.turn_bytes
            level.old.append(following)  # bounded: REQUESTS_MAX

    def clear(self) -> None:
        """Remove every mover."""
        self.count = 0
        self._levels.clear()
        self._behind.clear()

    def _queue(self, mover: Mover, priority: int) -> None:
        if self.count >= self._count_max:
            self._drop_dead()
            # Not again before as many have come as are left: all may be alive.
            self._count_max = max(REQUESTS_MAX, 2 * self.count)
        self.count += 1
        _request(mover).turn_bytes = self.turn_bytes
        self._level(priority).new.append(mover)  # bounded: REQUESTS_MAX

    def _level(self, priority: int) -> _Level:
        for level in self._levels:
            if level.priority == priority:
                return level
        level = _Level(priority)
        self._levels.append(level)  # bounded: PRIORITY_MAX
        self._levels.sort(key=attrgetter("priority"), reverse=True)
        return level

    def _after(self, mover: Mover) -> SegmentRecord | None:
        """Return what takes the turn of a mover that is through."""
        if not isinstance(mover, SegmentRecord):
            return None
        behind = self._behind[mover.request]
        if behind:
            return behind.popleft()
        del self._behind[mover.request]
        return None

    def _left(self, mover: Mover) -> None:
        """Remove a mover that is over, and the rest of its transfer."""
        self.count -= 1
        if isinstance(mover, SegmentRecord):
            del self._behind[mover.request]

    def _drop_dead(self) -> None:
        """Forget movers that are over: a link that takes nothing never meets them.

        Otherwise a peer that asks, cancels and never reads would make the turns grow.
        """
        for level in self._levels:
            for turn in (level.new, level.old):
                for _ in range(len(turn)):
                    mover = turn.popleft()
                    if mover.state is RequestStage.MOVING:
                        turn.append(mover)
                    else:
                        self._left(mover)


class _Level:
    """Queues the movers of one priority.

    Attributes:
        new: Those that have not had a turn since they came.
        old: Those that have.
        old_turn_due: The next turn is an old one's.
    """

    __slots__ = ("new", "old", "old_turn_due", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.new: deque[Mover] = deque()
        self.old: deque[Mover] = deque()
        self.old_turn_due = False

    def end_turn(self, turn: deque[Mover]) -> None:
        """Decide whose turn is next: after a new one's an old one's, if any."""
        self.old_turn_due = turn is self.new and bool(self.old)


def _request(mover: Mover) -> RequestRecord:
    return mover.request if isinstance(mover, SegmentRecord) else mover
