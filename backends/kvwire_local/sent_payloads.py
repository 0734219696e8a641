"""The payloads that a lane has sent, kept until the peer has read them.

Each payload gets a descriptor at once, from the first of these rules that applies:

1. If its fragments are long enough and lie in one arena that the peer can map: their
   offsets in the arena.
2. If they are long enough, and the peer can read this process: their addresses.
3. If there is room in the lane's staging ring, the payload is copied into it: the place
   in the ring.
4. If the ring is full, or the lane is not open here yet: LATER, and the real descriptor
   follows on the socket.

The first two rules are for a peer that may read all memory of this process
(:func:`~kvwire_local.shared_arenas.refusal`): it can read all of an arena that it maps.
Every other peer gets copies.

Memory is released when the peer has read the payload, whatever its descriptor was.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvwire.backend import Payload
from kvwire.errors import ProtocolError
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, SPAN_BYTES_MAX
from kvwire.memory.arena import Arena, arena_of
from kvwire.memory.copy import as_fragments, copy
from kvwire_local.descriptor import LATER, RULE, PlaceKind, encode, encode_piece
from kvwire_local.shared_arenas import ReadMethod, SharedArenas
from kvwire_local.wire import LocalMessageType

# --- the staging ring -----------------------------------------------------------------

# Fragments of a few hundred bytes cost the reader more to look up than to copy, and
# some peers cannot read this process at all. Such payloads are gathered into a ring of
# shared memory, from which the peer reads each as one piece. Room is allocated in the
# order of sending, and freed in the same order.

# The most bytes that a lane can have in flight, so that gathering need not wait for the
# reader; it is half of a typical third-level cache.
STAGING_BYTES: Final = 2 * SPAN_BYTES_MAX


class Staging:
    """The staging ring of one lane."""

    def __init__(self, nbytes: int = STAGING_BYTES) -> None:
        self.arena: Arena | None = None
        self._nbytes = nbytes
        # The beginning and end of each payload, in the order of sending.
        self._rooms: deque[tuple[int, int]] = deque()
        self._view = memoryview(b"")
        # The ring's offset in the arena.
        self._base = 0

    def place(self, payload: Payload) -> int | None:
        """Copy a payload into the ring; return its offset in the arena, or None."""
        if payload.nbytes > self._nbytes or self.arena is None:
            if self._rooms:
                return None  # the arena is in use; wait until it can be replaced
            self._make(max(payload.nbytes, self._nbytes))
        begin = self._room_for(payload.nbytes)
        if begin is None:
            return None
        end = begin + payload.nbytes
        copy(payload, self._view[begin:end])
        self._rooms.append((begin, end))  # bounded: LANE_PAYLOADS_MAX
        return self._base + begin

    def give_back(self) -> None:
        """Free the space of the oldest placed payload."""
        self._rooms.popleft()

    def close(self) -> None:
        """Unmap the ring; the peer keeps the pages that it has mapped until it ends."""
        self._view.release()
        self._rooms.clear()
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def _make(self, nbytes: int) -> None:
        self.close()
        self.arena = Arena(nbytes, name="kvwire-staging")
        self._nbytes = self.arena.nbytes
        memory = self.arena.buffer(self._nbytes)
        self._base = int(memory.ctypes.data) - self.arena.address
        self._view = memory.data

    def _room_for(self, nbytes: int) -> int | None:
        """Return the start of this number of contiguous free bytes, or None."""
        if not self._rooms:
            return 0 if nbytes <= self._nbytes else None
        first = self._rooms[0][0]
        last = self._rooms[-1][1]
        if last <= first:  # both the end and the beginning of the ring are in use
            return last if first - last >= nbytes else None
        if self._nbytes - last >= nbytes:
            return last
        return 0 if first >= nbytes else None


# --- payloads -------------------------------------------------------------------------

# A mean length of fragments, from the table in docs/howto/same-host.md. Below it,
# gathering here and reading one piece there is faster than reading each fragment in
# place. In GB per second of the reader's processor time: 5.8 against 3.6 at 4 KiB, and
# 5.2 against 4.8 at 8 KiB; at 16 KiB it is 6.6 against 5.8, but then the writer spends
# time on gathering. The same holds for an arena, from which the reader would have to
# copy twice: 2.7 against 1.4 GB/s at 4 KiB.
_GATHER_BELOW_BYTES: Final = 8 * KIB
# The body of a READ record.
READ_COUNT: Final = struct.Struct("<Q")


@dataclass(slots=True)
class _Sent:
    payload: Payload
    token: object
    in_staging: bool = False
    # The arena that its descriptor names.
    arena: Arena | None = None


class SentPayloads:
    """The queue of sent payloads that the peer has not read."""

    def __init__(self) -> None:
        self.queued_bytes = 0
        self._arenas: SharedArenas | None = None
        self._unread: deque[_Sent] = deque()
        self._later: deque[_Sent] = deque()
        self._read_count = 0
        self._staging = Staging()

    def __len__(self) -> int:
        """Return the number of payloads that the peer has not read."""
        return len(self._unread)

    def come_up(self, arenas: SharedArenas) -> None:
        """Start sending, over the socket on which these arenas are shared."""
        self._arenas = arenas
        self.place_later()

    def send(self, payload: Payload, token: object) -> bytes:
        """Queue a payload of at least one byte; return its descriptor."""
        sent = _Sent(payload, token)
        self._unread.append(sent)  # bounded: LANE_PAYLOADS_MAX
        descriptor = None if self._later else self._descriptor(sent)
        if descriptor is None:
            self._later.append(sent)  # bounded: LANE_PAYLOADS_MAX
            self.queued_bytes += payload.nbytes
            return LATER
        return descriptor

    def place_later(self) -> None:
        """Send the peer the places of waiting payloads, as long as there is room."""
        while self._later:
            descriptor = self._descriptor(self._later[0])
            if descriptor is None:
                return
            sent = self._later.popleft()
            self.queued_bytes -= sent.payload.nbytes
            assert self._arenas is not None
            self._arenas.wire.send(LocalMessageType.PLACED, descriptor)

    def read(self, body: bytes) -> list[object]:
        """Handle the peer's report of read payloads; return their tokens.

        Raises:
            ProtocolError: It reports more than there are.
        """
        (count,) = READ_COUNT.unpack(body) if len(body) == READ_COUNT.size else (-1,)
        placed = len(self._unread) - len(self._later)
        if not 0 < count - self._read_count <= placed:
            raise ProtocolError(
                RULE,
                f"local: the peer reports {count} payloads as read, but only "
                f"{self._read_count} + {placed} exist",
            )
        tokens = []
        while self._read_count < count:
            sent = self._unread.popleft()
            self._read_count += 1
            if sent.in_staging:
                self._staging.give_back()
            if sent.arena is not None:
                assert self._arenas is not None
                self._arenas.release(sent.arena)
            tokens.append(sent.token)
        return tokens

    def sweep(self) -> None:
        """Let the peer unmap the arenas that were closed here."""
        if self._arenas is not None:
            self._arenas.sweep()

    def close(self) -> None:
        """Release all memory."""
        self._unread.clear()
        self._later.clear()
        self.queued_bytes = 0
        if self._arenas is not None:
            self._arenas.close()
        self._staging.close()

    def _descriptor(self, sent: _Sent) -> bytes | None:
        """Place a payload and return its descriptor; None if it has to wait."""
        arenas = self._arenas
        if arenas is None:
            return None
        fragments = as_fragments(sent.payload).merged()
        descriptor = self._in_place(sent, fragments, arenas)
        if descriptor is not None:
            return descriptor
        begin = self._staging.place(sent.payload)
        if begin is None:
            return None
        sent.in_staging = True
        arena = self._staging.arena
        assert arena is not None
        nbytes = sent.payload.nbytes
        if not arenas.has_room_for(arena):
            return encode_piece(PlaceKind.MEMORY, 0, arena.address + begin, nbytes)
        sent.arena = arena
        number = arenas.use(arena, payload=True)
        return encode_piece(PlaceKind.ARENA, number, begin, nbytes)

    def _in_place(
        self, sent: _Sent, fragments: Fragments, arenas: SharedArenas
    ) -> bytes | None:
        """Return the descriptor for reading a payload in place, or None."""
        count = len(fragments)
        if not arenas.whole or (
            count > 1 and fragments.nbytes < _GATHER_BELOW_BYTES * count
        ):
            return None
        arena = arena_of(fragments)
        if arena is not None and arenas.has_room_for(arena):
            offsets = fragments.shifted(-arena.address)
            number = arenas.use(arena, payload=True)
            descriptor = encode(PlaceKind.ARENA, number, offsets)
            if descriptor is not None:
                sent.arena = arena
                return descriptor
            arenas.release(arena)
        if ReadMethod.MEMORY in arenas.methods:
            return encode(PlaceKind.MEMORY, 0, fragments)
        return None
