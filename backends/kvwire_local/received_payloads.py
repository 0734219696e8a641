"""The payloads that a lane receives: read from the peer in descriptor order.

Payloads are read in batches of about a millisecond, so that the loop can run other
tasks. A batch counts only if the peer was still there after it (see
:mod:`kvwire_local.lane`). So :meth:`ReceivedPayloads.read` returns complete payloads
and reports nothing by itself.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvwire.backend import Landing
from kvwire.errors import ProtocolError
from kvwire.limits import KIB, LANE_PAYLOADS_MAX, MIB, SPAN_BYTES_MAX
from kvwire.memory.copy import as_fragments
from kvwire_local.descriptor import RULE, DescribedPlace, PlaceKind, decode
from kvwire_local.peer import PeerMemory, PeerRead

# Reading blocks the loop. A limit of bytes alone would not bound the time: fragments of
# 256 bytes are read at a twentieth of the rate of fragments of 1 MiB.
_BATCH_S: Final = 0.001
# The bytes between two checks of the clock. With long fragments, a whole span is one
# step, since it takes less than a batch. A step costs about 20 us, and after it this
# code is no longer in the processor's caches.
_STEP_BYTES: Final = 1 * MIB
_LONG_FRAGMENT_BYTES: Final = 64 * KIB


@dataclass(slots=True)
class _Arrival:
    landing: Landing
    place: DescribedPlace
    reading: PeerRead | None = None


class ReceivedPayloads:
    """The queue of payloads that a lane will receive."""

    def __init__(self) -> None:
        self.peer: PeerMemory | None = None
        self.received_bytes = 0
        self.count = 0
        self._arrivals: deque[_Arrival] = deque()
        # Descriptors that came on the socket, for payloads announced with LATER.
        self._placed: deque[bytes] = deque()

    def __len__(self) -> int:
        """Return the number of unread payloads."""
        return len(self._arrivals)

    def receive(self, descriptor: bytes, landing: Landing) -> None:
        """Queue a payload for reading."""
        place = decode(descriptor, landing.length)
        self._arrivals.append(_Arrival(landing, place))  # bounded: LANE_PAYLOADS_MAX

    def placed(self, descriptor: bytes) -> None:
        """Record the peer's descriptor for the oldest payload without a place."""
        if len(self._placed) >= LANE_PAYLOADS_MAX:
            raise ProtocolError(
                RULE, "local: the peer sent more descriptors than payloads"
            )
        self._placed.append(descriptor)  # bounded: LANE_PAYLOADS_MAX

    def read(self) -> list[Landing]:
        """Read one batch; return the landings that are complete."""
        whole: list[Landing] = []
        budget = SPAN_BYTES_MAX
        end = time.perf_counter() + _BATCH_S
        while self._arrivals and budget > 0 and time.perf_counter() < end:
            arrival = self._arrivals[0]
            if not self._is_ready(arrival):
                break
            if arrival.reading is not None:
                step_bytes = min(_step_bytes(arrival.place), budget)
                budget -= arrival.reading.step(step_bytes)
                if arrival.reading.rest:
                    continue
            self._arrivals.popleft()
            self.count += 1
            self.received_bytes += arrival.landing.length
            whole.append(arrival.landing)
        return whole

    @property
    def can_read(self) -> bool:
        """Return whether the next batch would read anything."""
        return bool(self._arrivals) and self._is_ready(self._arrivals[0])

    def close(self) -> None:
        """Release all memory."""
        self._arrivals.clear()
        self._placed.clear()
        if self.peer is not None:
            self.peer.close()
            self.peer = None

    def _is_ready(self, arrival: _Arrival) -> bool:
        """Return whether an arrival's place is known; create its reader."""
        if self.peer is None:
            return False
        if arrival.place.kind is PlaceKind.LATER:
            if not self._placed:
                return False
            place = decode(self._placed.popleft(), arrival.landing.length)
            if place.kind is PlaceKind.LATER:
                raise ProtocolError(
                    RULE, "local: the peer deferred the same place twice"
                )
            arrival.place = place
        payload = arrival.landing.payload
        if arrival.reading is None and payload is not None:
            destination = as_fragments(payload)
            arrival.reading = self.peer.reading(arrival.place, destination)
            return arrival.reading is not None
        return True


def _step_bytes(place: DescribedPlace) -> int:
    fragments = place.fragments
    assert fragments is not None
    long = fragments.nbytes >= _LONG_FRAGMENT_BYTES * len(fragments)
    return SPAN_BYTES_MAX if long else _STEP_BYTES
