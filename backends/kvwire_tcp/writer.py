"""A link's unsent bytes: a queue with marked frame borders.

Progress is counted in bytes since the link began, so a short write, wherever it ends,
is one addition. A frame with a token is complete when ``sent_bytes`` has reached the
position of its last byte.

An entry is a header (bytes), a header joined to its small payload (bytes), a payload
(memoryview), or a header together with fragments
(:class:`~kvwire.memory.iovec.Iovecs`). Payload memory is *lent* with a token, until the
token is given back. Without a token it is *borrowed*, until :meth:`SendQueue.own`
replaces the rest of it by a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvwire.backend import Payload
from kvwire.errors import UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import HEADER_BYTES, KIB, WAKEUP_BYTES
from kvwire.memory.iovec import Iovecs, simplest
from kvwire_tcp.wire import Wire

# Up to this size, a copy costs less than a second view in the system call.
JOINED_BYTES_MAX: Final = 4 * KIB
# Half of IOV_MAX: a longer list gains nothing, and takes time to create.
VIEWS_MAX: Final = 512

Entry = bytes | memoryview | Iovecs


class SendQueue:
    """The queue of unsent bytes of one link."""

    __slots__ = ("_borrowed", "_entries", "_first", "_tokens", "nbytes", "sent_bytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.sent_bytes = 0
        self._entries: deque[Entry] = deque()
        # Entries are numbered from 0 without end; this is the number of the leftmost.
        self._first = 0
        # The position of each frame's last byte, and its token.
        self._tokens: deque[tuple[int, object]] = deque()
        # Numbers of the entries that are borrowed memory.
        self._borrowed: list[int] = []

    def push(
        self, header: bytes, payload: Payload | None, token: object | None
    ) -> None:
        """Queue one frame."""
        entries = self._entries
        if isinstance(payload, Fragments):
            payload = simplest(payload)
        size = 0 if payload is None else payload.nbytes
        if payload is None or not size:
            entries.append(header)
        elif not isinstance(payload, memoryview):
            entries.append(Iovecs(payload, header))
        elif size <= JOINED_BYTES_MAX:
            entries.append(b"".join((header, payload)))
        else:
            if payload.format != "B" or payload.ndim != 1 or not payload.contiguous:
                raise _no_bytes(payload)
            entries.append(header)
            entries.append(payload)
        self.nbytes += HEADER_BYTES + size
        if token is not None:
            self._tokens.append((self.sent_bytes + self.nbytes, token))
        elif type(entries[-1]) is not bytes:
            self._borrowed.append(self._first + len(entries) - 1)

    def lend(self, payload: Payload, token: object) -> None:
        """Queue a payload without a frame, lent until its token is returned."""
        payload = simplest(payload)
        if isinstance(payload, memoryview):
            if payload.format != "B" or payload.ndim != 1 or not payload.contiguous:
                raise _no_bytes(payload)
            self._entries.append(payload)
        else:
            self._entries.append(Iovecs(payload))
        self.nbytes += payload.nbytes
        self._tokens.append((self.sent_bytes + self.nbytes, token))

    def transmit(self, wire: Wire) -> int:
        """Offer the head of the queue to the wire, once; return the accepted bytes."""
        entries = self._entries
        head = entries[0]
        if type(head) is Iovecs:
            return wire.send_list(head)
        if len(entries) == 1 and type(head) is bytes:
            return wire.send(head)
        # Up to the first list of fragments, and up to a wake-up's share of bytes.
        views: list[bytes | memoryview] = []
        room = WAKEUP_BYTES
        for entry in entries:
            if type(entry) is Iovecs or len(views) == VIEWS_MAX or room <= 0:
                break
            view = entry if len(entry) <= room else memoryview(entry)[:room]
            views.append(view)
            room -= len(view)
        return wire.sendmsg(views)

    def taken(self, count: int) -> Sequence[object]:
        """Count ``count`` bytes as sent; return the tokens of completed frames."""
        self.sent_bytes = sent = self.sent_bytes + count
        self.nbytes -= count
        if self.nbytes == 0:
            self._first += len(self._entries)
            self._entries.clear()
            self._borrowed.clear()
        else:
            self._drop(count)
        tokens = self._tokens
        if not tokens:
            return ()
        done = []
        while tokens and tokens[0][0] <= sent:
            done.append(tokens.popleft()[1])
        return done

    def own(self) -> None:
        """Replace borrowed memory that is still queued by a copy."""
        for number in self._borrowed:
            position = number - self._first
            if position >= 0:
                entry = self._entries[position]
                assert not isinstance(entry, bytes), "only payload memory is borrowed"
                self._entries[position] = entry.tobytes()
        self._borrowed.clear()

    def clear(self) -> None:
        """Drop everything unsent, and every reference to its memory."""
        self._entries.clear()
        self._tokens.clear()
        self._borrowed.clear()
        self.nbytes = 0

    def _drop(self, count: int) -> None:
        """Remove the first ``count`` bytes, fewer than are queued."""
        entries = self._entries
        while count:
            head = entries[0]
            size = len(head)
            if count < size:
                if type(head) is Iovecs:
                    head.rest -= count
                else:
                    entries[0] = memoryview(head)[count:]
                return
            count -= size
            entries.popleft()
            self._first += 1


def _no_bytes(view: memoryview) -> UsageError:
    """Return the error for a view whose `len` and slices do not count bytes."""
    return UsageError(
        f"payload: a view of format {view.format!r}, shape {view.shape}, is not a "
        f'1-D contiguous view of bytes; pass memoryview(x).cast("B")'
    )
