"""The memory behind the core's buffer numbers, with callbacks for its release."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvwire.backend import Payload
from kvwire.kv.fragments import Fragments
from kvwire.proto.holds import Holds
from kvwire.types import BufferId


class BufferTable:
    """All memory that users of one communicator have lent to kvwire.

    Attributes:
        holds: The holds that the protocol cores have on this memory.
    """

    __slots__ = ("_payloads", "_waiting", "holds")

    def __init__(self) -> None:
        self.holds: Holds = Holds()
        self._payloads: dict[BufferId, Payload] = {}
        self._waiting: dict[BufferId, list[Callable[[], None]]] = {}

    def __len__(self) -> int:
        """Count the buffers that have not drained."""
        return len(self._payloads)

    @property
    def quarantined_bytes(self) -> int:
        """The bytes of ended requests that a transport may still touch."""
        return sum(self._payloads[b].nbytes for b in self.holds.retired)

    def lend(self, payload: Payload) -> BufferId:
        """Add memory; it is kept alive until it has drained."""
        buffer = self.holds.new()
        self._payloads[buffer] = payload
        return buffer

    def take_back(self, buffer: BufferId) -> None:
        """Drop memory that was lent and never used."""
        self.holds.retire(buffer)
        self.collect()

    def whole(self, buffer: BufferId) -> Payload:
        """Return all of a buffer."""
        return self._payloads[buffer]

    def part(self, buffer: BufferId, offset: int, nbytes: int) -> Payload:
        """Return a byte range of a buffer."""
        payload = self._payloads[buffer]
        if not offset and nbytes == payload.nbytes:
            return payload
        if isinstance(payload, Fragments):
            return payload.slice(offset, nbytes)
        return payload[offset : offset + nbytes]

    def take(self, buffer: BufferId) -> Payload:
        """Remove a buffer that has no other user, and return its memory."""
        return self._payloads.pop(buffer)

    def undrained(self, buffers: Iterable[BufferId]) -> list[BufferId]:
        """Return the given buffers that a transport may still touch."""
        return [buffer for buffer in buffers if buffer in self._payloads]

    def on_drained(self, buffer: BufferId, call: Callable[[], None]) -> None:
        """Call a function once nothing can touch the buffer any more, or at once."""
        if buffer in self._payloads:
            self._waiting.setdefault(buffer, []).append(call)
        else:
            call()

    def collect(self) -> None:
        """Drop drained buffers, and call their waiting callbacks."""
        drained = self.holds.drained
        waiting = self._waiting
        while drained:
            buffer = drained.pop()
            self._payloads.pop(buffer, None)
            if waiting:
                for call in waiting.pop(buffer, ()):
                    call()
