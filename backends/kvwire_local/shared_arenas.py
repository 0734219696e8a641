"""The arenas that a lane has shared with its peer, numbered in order.

An arena's descriptor travels on the socket before the first record that names the
arena. A peer that has an arena can read all of it, so only a peer that may read all
memory of this process gets the arenas of caches. Every other peer gets one arena, the
lane's staging ring, with copies of the payload for it.

The peer unmaps an arena when this side asks for it (UNSHARED): once no window is in it
and the peer has read every payload in it. An arena from which payload was sent stays
shared until it is closed here, since more payload will follow.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvwire.memory.arena import Arena
from kvwire.types import OneSidedWindows
from kvwire_local.wire import ARENAS_BYTES_MAX, ARENAS_MAX, LocalMessageType, LocalWire

ARENA_BODY: Final = struct.Struct("<I")
# The kernel's default for users that are unknown in a namespace: `overflowuid`.
_NOBODY: Final = 65534


class ReadMethod(enum.IntFlag):
    """The methods by which one side reads the other's memory."""

    MEMORY = 1
    ARENA = 2


def refusal(allowed: OneSidedWindows, uid: int | None = None) -> str:
    """Return why a process may not read all memory of this process; "" if it may.

    Args:
        allowed: The setting ``one_sided_windows``.
        uid: The process's user, according to the kernel; None if it is not known yet.
    """
    if allowed == "off":
        return 'one_sided_windows="off"'
    if uid is None or allowed == "peers":
        return ""
    if uid != os.geteuid() or uid == _NOBODY:
        return (
            f"the peer's process belongs to user {uid}, this one to {os.geteuid()}; "
            'one_sided_windows="peers" lets every peer of this host read'
        )
    return ""


@dataclass(slots=True)
class _SharedArena:
    arena: Arena
    number: int
    # The windows in it, and the payloads in it that the peer has not read.
    uses: int = 0
    sent_from: bool = False


class SharedArenas:
    """The arenas of this side that the peer can map.

    Args:
        wire: The socket.
        methods: The methods by which the peer can read this side.
        whole: Whether the peer may read all memory of this process.
        wake: Called on any thread when an arena that the peer has was closed; calls
            :meth:`sweep` on the lane's thread.
    """

    def __init__(
        self,
        wire: LocalWire,
        methods: ReadMethod,
        *,
        whole: bool,
        wake: Callable[[], object],
    ) -> None:
        self.wire = wire
        self.methods = methods
        self.whole = whole
        self._wake = wake
        # By the arenas' serials.
        self._shared: dict[int, _SharedArena] = {}
        self._bytes = 0
        self._count = 0

    def has_room_for(self, *arenas: Arena) -> bool:
        """Return whether the peer has these arenas, or can still get them."""
        new = [arena for arena in arenas if arena.serial not in self._shared]
        return (
            ReadMethod.ARENA in self.methods
            and len(self._shared) + len(new) <= ARENAS_MAX
            and self._bytes + sum(map(_file_bytes, new)) <= ARENAS_BYTES_MAX
        )

    def use(self, arena: Arena, *, payload: bool) -> int:
        """Share an arena, unless the peer has it; return the peer's number for it.

        It stays shared at least until :meth:`release` was called once for each use.

        Args:
            arena: The arena.
            payload: Whether it is used for a payload, rather than for a window.
        """
        shared = self._shared.get(arena.serial)
        if shared is None:
            shared = _SharedArena(arena, self._count)
            body = ARENA_BODY.pack(shared.number)
            self.wire.send(LocalMessageType.ARENA, body, arena.fileno())
            self._shared[arena.serial] = shared  # bounded: ARENAS_MAX
            self._count += 1
            self._bytes += _file_bytes(arena)
            arena.watchers.append(self._wake)  # bounded: one for each lane
        shared.uses += 1
        shared.sent_from = shared.sent_from or payload
        return shared.number

    def release(self, arena: Arena) -> None:
        """End one use of an arena."""
        shared = self._shared[arena.serial]
        shared.uses -= 1
        self._unshare_unused(shared)

    def sweep(self) -> None:
        """Let the peer unmap the arenas that were closed here."""
        for shared in tuple(self._shared.values()):
            self._unshare_unused(shared)

    def close(self) -> None:
        """Forget all of them, because the lane has ended."""
        for shared in self._shared.values():
            shared.arena.watchers.remove(self._wake)
        self._shared.clear()

    def _unshare_unused(self, shared: _SharedArena) -> None:
        arena = shared.arena
        if shared.uses or (shared.sent_from and not arena.closed):
            return
        arena.watchers.remove(self._wake)
        del self._shared[arena.serial]
        self._bytes -= _file_bytes(arena)
        self.wire.send(LocalMessageType.UNSHARED, ARENA_BODY.pack(shared.number))


def _file_bytes(arena: Arena) -> int:
    return arena.mapped_bytes
