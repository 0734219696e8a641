"""What this side sends: payloads that lie here until the peer has read them.

Each payload gets a descriptor at once, by the first of these that holds:

1. its fragments are long enough and lie in one arena that the peer can map: where;
2. they are, and the peer reads this process: their addresses;
3. it is gathered into the lane's staging ring: where in the ring;
4. the ring is full, or the lane is not up here: LATER, and the descriptor follows on
   the socket.

Memory is given back when the peer has read the payload, whatever the descriptor was.
"""

from __future__ import annotations

import enum
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
from kvwire_local.peer import ARENA_BODY
from kvwire_local.wire import ARENAS_MAX, LocalMessageType, LocalWire

# --- the staging ring -----------------------------------------------------------------

# Fragments of a few hundred bytes cost the reader more to look up than to copy, and
# some peers cannot read this process at all. Such payloads are gathered into a ring of
# shared memory, from where the peer reads each in one piece. Room is given in the order
# of sending, and comes back in that order.

# What a lane has under way, so that gathering need not wait for the reader; half of a
# third-level cache of today.
STAGING_BYTES: Final = 2 * SPAN_BYTES_MAX


class Staging:
    """Manages the ring of one lane."""

    def __init__(self, nbytes: int = STAGING_BYTES) -> None:
        self.arena: Arena | None = None
        self._nbytes = nbytes
        # Where each payload begins and ends, in the order of sending.
        self._rooms: deque[tuple[int, int]] = deque()
        self._view = memoryview(b"")
        # Where the ring begins in the arena.
        self._base = 0

    def place(self, payload: Payload) -> int | None:
        """Copy a payload into the ring."""
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
        """Free the memory of the payload that was placed first."""
        self._rooms.popleft()

    def close(self) -> None:
        """Unmap it; the peer keeps the pages that it has mapped until it ends."""
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
        """Return where so many bytes in a row are free."""
        if not self._rooms:
            return 0 if nbytes <= self._nbytes else None
        first, last = self._rooms[0][0], self._rooms[-1][1]
        if last <= first:  # the end and the beginning of the ring are in use
            return last if first - last >= nbytes else None
        if self._nbytes - last >= nbytes:
            return last
        return 0 if first >= nbytes else None


# --- payloads -------------------------------------------------------------------------

# Mean length of fragments, from the table in docs/howto/same-host.md. Below it,
# gathering here and reading one piece there is faster than reading each in place: 5.8
# against 3.6 GB/s of the reader's processor time at 4 KiB, 5.2 against 4.8 at 8, 6.6
# against 5.8 at 16, where the writer has to gather for it. So it is in an arena, where
# the reader would have to copy twice: 2.7 against 1.4 GB/s at 4 KiB.
_GATHER_BELOW_BYTES: Final = 8 * KIB
_COUNT: Final = struct.Struct("<Q")


class ReadMethod(enum.IntFlag):
    """Names how a side can read the other one's payloads."""

    MEMORY = 1
    ARENA = 2


@dataclass(slots=True)
class _Sent:
    payload: Payload
    token: object
    in_staging: bool = False


class SentPayloads:
    """Queues the payloads that a lane has sent and the peer has not read."""

    def __init__(self) -> None:
        self.queued_bytes = 0
        self._wire: LocalWire | None = None
        self._methods = ReadMethod(0)
        self._unread: deque[_Sent] = deque()
        self._later: deque[_Sent] = deque()
        self._read_count = 0
        self._staging = Staging()
        # Numbers of the arenas that the peer has, by their serial numbers.
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        """Return how many payloads the peer has not read."""
        return len(self._unread)

    def come_up(self, wire: LocalWire, methods: ReadMethod) -> None:
        """Start sending: note how the peer reads and where it is told."""
        self._wire, self._methods = wire, methods
        self.place_later()

    def send(self, payload: Payload, token: object) -> bytes:
        """Queue a payload of at least one byte; returns its descriptor."""
        sent = _Sent(payload, token)
        self._unread.append(sent)  # bounded: LANE_PAYLOADS_MAX
        descriptor = None if self._later else self._descriptor(sent)
        if descriptor is None:
            self._later.append(sent)  # bounded: LANE_PAYLOADS_MAX
            self.queued_bytes += payload.nbytes
            return LATER
        return descriptor

    def place_later(self) -> None:
        """Tell the peer where payloads lie for which there is room now."""
        while self._later:
            descriptor = self._descriptor(self._later[0])
            if descriptor is None:
                return
            sent = self._later.popleft()
            self.queued_bytes -= sent.payload.nbytes
            assert self._wire is not None
            self._wire.say(LocalMessageType.PLACED, descriptor)

    def read(self, body: bytes) -> list[object]:
        """Note that the peer has read more; return the payloads' tokens."""
        (count,) = _COUNT.unpack(body) if len(body) == _COUNT.size else (-1,)
        placed = len(self._unread) - len(self._later)
        if not 0 < count - self._read_count <= placed:
            raise ProtocolError(
                RULE, f"local: {count} payloads read of {self._read_count} + {placed}"
            )
        tokens = []
        while self._read_count < count:
            sent = self._unread.popleft()
            self._read_count += 1
            if sent.in_staging:
                self._staging.give_back()
            tokens.append(sent.token)
        return tokens

    def close(self) -> None:
        """Let go of all memory."""
        self._unread.clear()
        self._later.clear()
        self.queued_bytes = 0
        self._staging.close()

    def _descriptor(self, sent: _Sent) -> bytes | None:
        """Say where a payload lies; None if that cannot be said now."""
        if self._wire is None:
            return None
        fragments = as_fragments(sent.payload).merged()
        descriptor = self._in_place(fragments)
        if descriptor is not None:
            return descriptor
        begin = self._staging.place(sent.payload)
        if begin is None:
            return None
        sent.in_staging = True
        arena = self._staging.arena
        assert arena is not None
        number = self._number_of(arena)
        if number is None:
            where = arena.address + begin
            return encode_piece(PlaceKind.MEMORY, 0, where, sent.payload.nbytes)
        self._share(arena, number)
        return encode_piece(PlaceKind.ARENA, number, begin, sent.payload.nbytes)

    def _in_place(self, fragments: Fragments) -> bytes | None:
        """Describe a payload that the peer can well read where it lies."""
        count = len(fragments)
        if count > 1 and fragments.nbytes < _GATHER_BELOW_BYTES * count:
            return None
        arena = arena_of(fragments)
        number = self._number_of(arena) if arena is not None else None
        if arena is not None and number is not None:
            offsets = fragments.shifted(-arena.address)
            descriptor = encode(PlaceKind.ARENA, number, offsets)
            if descriptor is not None:
                self._share(arena, number)
                return descriptor
        if ReadMethod.MEMORY in self._methods:
            return encode(PlaceKind.MEMORY, 0, fragments)
        return None

    def _number_of(self, arena: Arena) -> int | None:
        """Return the number under which the peer has an arena, or would get it."""
        if ReadMethod.ARENA not in self._methods:
            return None
        number = self._shared.get(arena.serial, len(self._shared))
        return number if number < ARENAS_MAX else None

    def _share(self, arena: Arena, number: int) -> None:
        """Give an arena to the peer, unless it has it."""
        if arena.serial not in self._shared:
            assert self._wire is not None
            self._wire.say(
                LocalMessageType.ARENA, ARENA_BODY.pack(number), arena.fileno()
            )
            self._shared[arena.serial] = number  # bounded: ARENAS_MAX


def read_so_far(count: int) -> bytes:
    """Return the body of a READ record."""
    return _COUNT.pack(count)
