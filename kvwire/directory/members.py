"""A watcher's table of members, which changes by entries and by time.

An entry is a key with a record's bytes, or a report that the key was removed. A
member's record must name the entry's key; other entries, and invalid records, are
ignored. A member has left if its entry was not written again within its lease, by the
watcher's own clock. Before it is removed, all entries are read again, since the watch
may have failed instead of the member. While the directory cannot be reached, no member
leaves. When the directory returns, members written since its previous return get a
whole new lease, and the others keep the rest of their old lease, so that dead members
disappear even if the directory fails again and again.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvwire.directory.limits import MEMBERS_MAX
from kvwire.directory.record import Record
from kvwire.directory.selector import Selector
from kvwire.errors import UsageError


class ChangeKind(enum.StrEnum):
    """How a member has changed."""

    JOINED = "joined"
    CHANGED = "changed"
    """Its record has changed, for example its load."""
    LEFT = "left"
    """It was withdrawn, its lease has expired, or the selector no longer matches it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one member.

    Attributes:
        kind: Whether it has joined, has changed, or has left.
        record: Its record; if it has left, its last record.
    """

    kind: ChangeKind
    record: Record


# How many expired lease entries are kept, beyond one for each member, so that each
# departure costs little.
_GONE_LEASES: Final = 64


@dataclass(slots=True)
class _Member:
    raw: bytes
    record: Record
    until: float
    written: bool = True  # since the directory was last reachable again
    doubted: bool = False  # its lease has expired, and all entries are being read again


class Members:
    """The members that match a selector."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self._members: dict[str, _Member] = {}
        # When each member's lease may expire: one entry per member, possibly too early,
        # and some entries of members that have left.
        self._leases: list[tuple[float, str]] = []
        self._suspended_at: float | None = None
        self.doubts: bool = False
        self.ignored: int = 0
        self.reason: str = ""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Record]:
        return (member.record for member in self._members.values())

    def put(self, key: str, raw: bytes, now: float) -> Change | None:
        """Apply an entry that was written at ``now``; return the change, if any."""
        known = self._members.get(key)
        if known is not None and known.raw == raw:
            known.until = now + known.record.lease_s
            known.written = True
            known.doubted = False
            return None
        try:
            record = Record.decode(raw)
            if record.key != key:
                raise UsageError("the record's key and its address differ")
            if known is None and len(self._members) >= MEMBERS_MAX:
                raise UsageError(f"the directory has more than {MEMBERS_MAX} members")
        except UsageError as exc:
            self.ignored += 1
            self.reason = str(exc)
            return None
        if not self._selector.matches(record):
            return self.remove(key)
        until = now + record.lease_s
        # bounded: MEMBERS_MAX
        self._members[key] = _Member(bytes(raw), record, until)
        if known is None:
            heapq.heappush(self._leases, (until, key))
            return Change(ChangeKind.JOINED, record)
        if until < known.until:
            # Its only entry may now be too late.
            self._index_leases()
        if record == known.record:
            return None
        return Change(ChangeKind.CHANGED, record)

    def remove(self, key: str) -> Change | None:
        """Remove a key; return the change, if any."""
        member = self._members.pop(key, None)
        if member is None:
            return None
        # Its lease is skipped when it expires, or removed together with others.
        if len(self._leases) > 2 * len(self._members) + _GONE_LEASES:
            self._index_leases()
        return Change(ChangeKind.LEFT, member.record)

    def expire(self, now: float) -> list[Change]:
        """Remove members whose lease has expired; return the changes."""
        changes: list[Change] = []
        while (member := self._first_over(now)) is not None:
            del self._members[heapq.heappop(self._leases)[1]]
            changes.append(Change(ChangeKind.LEFT, member.record))
        return changes

    def doubt(self, now: float) -> bool:
        """Return whether any lease has expired for the first time since its renewal.

        If so, ``doubts`` is set, and all entries have to be read again before
        :meth:`expire`, because a watch can fail silently.
        """
        first = self._first_over(now)
        if first is None or first.doubted:
            return False
        # Leases that expire together cost one read of all entries.
        for member in self._members.values():
            member.doubted = member.doubted or member.until <= now
        self.doubts = True
        return True

    def expires_in(self, now: float) -> float | None:
        """Return the seconds until the next lease may expire; None without leases."""
        if self._suspended_at is not None or not self._members:
            return None
        return max(0.0, self._leases[0][0] - now)

    def suspend(self, now: float) -> bool:
        """Suspend leases, as the directory is unreachable; return whether they ran."""
        if self._suspended_at is not None:
            return False
        self._suspended_at = now
        return True

    def resume(self, now: float) -> None:
        """Resume suspended leases, because the directory is reachable again."""
        if self._suspended_at is None:
            return
        away_s = now - self._suspended_at
        self._suspended_at = None
        for member in self._members.values():
            member.until += away_s
            if member.written:
                member.until = now + member.record.lease_s
            member.written = False
            member.doubted = False
        self._index_leases()

    def _first_over(self, now: float) -> _Member | None:
        """Return the member whose lease expired first, or None."""
        if self._suspended_at is not None:
            return None
        while self._leases and self._leases[0][0] <= now:
            key = self._leases[0][1]
            member = self._members.get(key)
            if member is None:
                heapq.heappop(self._leases)
            elif member.until > now:
                heapq.heapreplace(self._leases, (member.until, key))
            else:
                return member
        return None

    def _index_leases(self) -> None:
        self._leases = [(member.until, key) for key, member in self._members.items()]
        heapq.heapify(self._leases)
