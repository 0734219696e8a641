"""The arenas that a lane has shared with its peer, numbered in order.

An arena's descriptor travels on the socket before the first record that names the
arena. A peer that has an arena can read all of it.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

from kvwire.memory.arena import Arena
from kvwire_local.wire import ARENAS_MAX, LocalMessageType, LocalWire

ARENA_BODY: Final = struct.Struct("<I")


class ReadMethod(enum.IntFlag):
    """The methods by which one side reads the other's memory."""

    MEMORY = 1
    ARENA = 2


class SharedArenas:
    """The arenas of this side that the peer can map.

    Args:
        wire: The socket.
        methods: The methods by which the peer can read this side.
    """

    def __init__(self, wire: LocalWire, methods: ReadMethod) -> None:
        self.wire = wire
        self.methods = methods
        # The numbers of arenas that the peer has, by the arenas' serials.
        self._shared: dict[int, int] = {}

    def has_room_for(self, arena: Arena) -> bool:
        """Return whether the peer has an arena, or can still get it."""
        if ReadMethod.ARENA not in self.methods:
            return False
        return arena.serial in self._shared or len(self._shared) < ARENAS_MAX

    def share(self, arena: Arena) -> int:
        """Share an arena, unless the peer has it; return the peer's number for it."""
        number = self._shared.get(arena.serial)
        if number is None:
            number = len(self._shared)
            body = ARENA_BODY.pack(number)
            self.wire.send(LocalMessageType.ARENA, body, arena.fileno())
            self._shared[arena.serial] = number  # bounded: ARENAS_MAX
        return number
