"""One end of a connection without a loop: the harness of a core, for all that test one.

A subclass has the memory and the wire. It says where payload lies and how frames and
chunks travel, and answers the events that want an answer::

    arrival = end.header(raw)  # a header has come; None if it broke a rule
    end.land(arrival, body, now, intact=True)  # and all that follows it
    end.collect()  # after each other call of the core
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvwire.errors import ProtocolError
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.events import Event
from kvwire.proto.records import ChunkArrival, ChunkPlace
from kvwire.types import BufferId


class CoreEnd(ABC):
    """Feeds a core, and carries out what it says, in the order of the front."""

    core: ConnectionCore

    @abstractmethod
    def send_frame(self, header: bytes, body: bytes) -> None:
        """Put a control frame on the wire."""

    @abstractmethod
    def send_chunk(self) -> bool:
        """Put the next chunk on its way; False if there is none, or no room for it."""

    @abstractmethod
    def deal_with(self, event: Event) -> None:
        """Note an event, and answer it."""

    @abstractmethod
    def drained(self, buffer: BufferId) -> None:
        """Take memory back, which nothing touches any more."""

    def broke(self, error: ProtocolError) -> None:
        """The peer has broken a rule."""
        self.core.fail(error)
        self.collect()

    def header(self, raw: bytes) -> ChunkArrival | None:
        """A header has come; None if it broke a rule."""
        try:
            arrival = self.core.header_received(raw)
            if arrival.place is ChunkPlace.MARKED:
                self.deal_with_all()
                arrival = self.core.transfers.marked_place(arrival)
            return arrival
        except ProtocolError as exc:
            self.broke(exc)
            return None

    def land(
        self, arrival: ChunkArrival, body: bytes, now: float, *, intact: bool = True
    ) -> bool:
        """All that follows a header is in its place; False if it broke a rule."""
        try:
            self.core.body_received(arrival, now, body=body, intact=intact)
        except ProtocolError as exc:
            self.broke(exc)
            return False
        self.collect()
        return True

    def collect(self) -> None:
        """Carry out what the core has to say: frames, then chunks, then events."""
        core = self.core
        while True:
            self.send_frames()
            if self.send_chunk():
                continue
            if not core.outbox.events:
                break
            self.deal_with_all()
        # The core drains buffers of a dead link in no particular order.
        for buffer in sorted(core.holds.drained):
            self.drained(buffer)
        core.holds.drained.clear()

    def send_frames(self) -> None:
        """Put all control frames on the wire."""
        while self.core.outbox.frames:
            header, body = self.core.outbox.frames.popleft()
            self.send_frame(header, bytes(body))

    def deal_with_all(self) -> None:
        """Deal with all events that there are now."""
        events = self.core.outbox.events.copy()
        self.core.outbox.events.clear()
        for event in events:
            self.deal_with(event)
