"""A lane's windows: exposed windows of this side, and opened windows of the peer.

An owner's description of a window is a number. The way to read it follows on the
socket, because it depends on facts that only the socket shows (the peer's user, and how
the peer can read this process), and because descriptors of arenas are sent there too::

    owner                                   reader
      expose(memory) -> number     ...        window(number, memory)
      ARENA, ARENA, WINDOW          ->        ready: the arenas are mapped
      conceal(memory): CONCEALED    ->        its readers end

A window's record: u32 number, u32 kind, and the data of that kind::

    ARENA    for each arena: u32 number, u32 zero, u64 its address at the owner
    MEMORY   nothing: the reader calls process_vm_readv
    DEVICE   the device's allocations: kvwire_local.device_blocks
    REFUSED  the reason, in UTF-8

**Who may read.** The reader of a window can read all of its arenas, or all of the
process. With ``one_sided_windows = "user"``, the kernel must report this process's user
as the peer's user (``SO_PEERCRED``); both sides check that. A user that is unknown in
this process's namespace appears as user 65534, whichever user it is, and is refused.

**After the end of a lane** a mapped window can still be read: its pages exist as long
as they are mapped, and the owner renews the generations of blocks before it writes to
them, whether there is a lane or not. A window in ordinary memory, or in device memory,
ends with its lane, whose cookie identifies the process.
"""

from __future__ import annotations

import asyncio
import enum
import struct
import weakref
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.backend import BlockRead, WindowMemory, WindowReader
from kvwire.errors import (
    BackendUnavailable,
    ConnectionLost,
    KVWireError,
    ProtocolError,
    again,
    printable,
    sayable,
)
from kvwire.kv.blocks import Bits
from kvwire.memory.arena import Arena, arena_at
from kvwire.types import OneSidedWindows
from kvwire_local.blocks import MappedBlocks, ProcessBlocks, WindowBlocks
from kvwire_local.descriptor import RULE
from kvwire_local.device_blocks import DeviceBlocks, shared_allocations
from kvwire_local.peer import PeerMemory
from kvwire_local.shared_arenas import ReadMethod, SharedArenas, refusal
from kvwire_local.wire import WINDOWS_MAX, LocalMessageType

_NUMBER: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<II")
_ARENA: Final = struct.Struct("<IIQ")


class _Kind(enum.IntEnum):
    REFUSED = 0
    ARENA = 1
    MEMORY = 2
    DEVICE = 3


_KINDS: Final = {int(kind): kind for kind in _Kind}


class ExposedWindows:
    """The windows of this side that a lane's peer may read.

    Args:
        allowed: The setting ``one_sided_windows``.
    """

    def __init__(self, allowed: OneSidedWindows) -> None:
        self._allowed: OneSidedWindows = allowed
        self._arenas: SharedArenas | None = None
        self._uid = -1
        self._numbers: dict[WindowMemory, int] = {}
        # The arenas in which each exposed window lies, by its number.
        self._lies_in: dict[int, list[Arena]] = {}
        self._count = 0
        # Windows exposed before the rendezvous; None for one that was concealed.
        self._early: dict[int, WindowMemory | None] = {}

    def come_up(self, arenas: SharedArenas, uid: int) -> None:
        """Announce the windows that were exposed before the rendezvous."""
        self._arenas = arenas
        self._uid = uid
        for number, memory in self._early.items():
            try:
                if memory is None:
                    raise BackendUnavailable("local: the peer has concealed the window")
                kind, body = self._way(number, memory, arenas)
            except BackendUnavailable as exc:
                kind = _Kind.REFUSED
                body = sayable(str(exc)).encode()
            _announce(arenas, number, kind, body)
        self._early.clear()

    def expose(self, memory: WindowMemory) -> bytes:
        """Let the peer read a window; return its description.

        Raises:
            BackendUnavailable: The peer cannot or may not read it.
        """
        _require_trust(self._allowed)
        if memory not in self._numbers:
            if max(len(self._numbers), len(self._early)) >= WINDOWS_MAX:
                raise BackendUnavailable(
                    f"local: a lane has {WINDOWS_MAX} windows at most"
                )
            if self._arenas is not None:
                kind, body = self._way(self._count, memory, self._arenas)
                _announce(self._arenas, self._count, kind, body)
            else:
                self._early[self._count] = memory  # bounded: WINDOWS_MAX
            self._numbers[memory] = self._count  # bounded: WINDOWS_MAX
            self._count += 1
        return _NUMBER.pack(self._numbers[memory])

    def conceal(self, memory: WindowMemory) -> None:
        """End the peer's readers of a window."""
        number = self._numbers.pop(memory, None)
        if number is None:
            return
        if self._arenas is None:
            self._early[number] = None  # bounded: WINDOWS_MAX
        else:
            self._arenas.wire.send(LocalMessageType.CONCEALED, _NUMBER.pack(number))
            for arena in self._lies_in.pop(number, ()):
                self._arenas.release(arena)

    def _way(
        self, number: int, memory: WindowMemory, arenas: SharedArenas
    ) -> tuple[_Kind, bytes]:
        """Share a window's memory with the peer, and return the reading method.

        Raises:
            BackendUnavailable: The peer cannot or may not read it.
        """
        _require_trust(self._allowed, self._uid)
        if memory.device is not None:
            if ReadMethod.MEMORY not in arenas.methods:
                raise BackendUnavailable(
                    "local: the peer cannot read this process, which is required to "
                    f"read the generations of a window on {memory.device}: "
                    "docs/howto/same-host.md"
                )
            return _Kind.DEVICE, shared_allocations(memory)
        if ReadMethod.ARENA in arenas.methods:
            found = _arenas_of(memory)
            if found is not None and arenas.has_room_for(*found):
                self._lies_in[number] = found  # bounded: WINDOWS_MAX
                return _Kind.ARENA, b"".join(
                    _ARENA.pack(arenas.use(arena, payload=False), 0, arena.address)
                    for arena in found
                )
        if ReadMethod.MEMORY in arenas.methods:
            return _Kind.MEMORY, b""
        raise BackendUnavailable(
            "local: the peer cannot read this process, and the window is not in arenas "
            "that it can map; put the cache into an Arena: docs/howto/same-host.md"
        )


class OpenedWindows:
    """The peer's windows that this side reads.

    Args:
        allowed: The setting ``one_sided_windows``.
    """

    def __init__(self, allowed: OneSidedWindows) -> None:
        self._allowed: OneSidedWindows = allowed
        self._peer: PeerMemory | None = None
        # The way to read each of the peer's windows, by number.
        self._ways: dict[int, tuple[_Kind, bytes]] = {}
        self._count = 0
        self._readers: weakref.WeakSet[LocalWindowReader] = weakref.WeakSet()

    def come_up(self, peer: PeerMemory) -> None:
        """Use this peer process's memory from now on."""
        self._peer = peer

    def open(self, description: bytes, memory: WindowMemory) -> LocalWindowReader:
        """Return a reader of a window that the peer's lane has exposed.

        Raises:
            BackendUnavailable: It cannot or may not be read.
            ProtocolError: A correct lane would not make such a description.
        """
        _require_trust(self._allowed)
        reader = LocalWindowReader(_number(description), memory)
        if reader.number in self._ways:
            reader.begin(self._blocks(reader))
        elif reader.number < self._count:
            raise BackendUnavailable("local: the peer has concealed the window")
        self._readers.add(reader)  # bounded: those that the caller holds
        return reader

    def announced(self, body: bytes) -> None:
        """Handle the record of a window.

        Raises:
            ProtocolError: A correct lane would not send it.
        """
        if len(body) < _HEAD.size:
            raise ProtocolError(
                RULE,
                f"local: a window's record has {len(body)} bytes; it needs at least "
                f"{_HEAD.size}",
            )
        number, code = _HEAD.unpack_from(body)
        kind = _KINDS.get(code)
        if number != self._count or kind is None or len(self._ways) >= WINDOWS_MAX:
            raise ProtocolError(
                RULE,
                f"local: cannot open window {number} of kind {code}: the next number "
                f"is {self._count}, and {len(self._ways)} of at most {WINDOWS_MAX} "
                "are open",
            )
        self._count += 1
        self._ways[number] = (kind, body[_HEAD.size :])  # bounded: WINDOWS_MAX
        for reader in self._readers_of(number):
            try:
                reader.begin(self._blocks(reader))
            except KVWireError as exc:
                reader.end(exc)

    def concealed(self, body: bytes) -> None:
        """Handle the end of a window.

        Raises:
            ProtocolError: The peer has no such window.
        """
        number = _number(body)
        if self._ways.pop(number, None) is None:
            raise ProtocolError(RULE, f"local: window {number} is not open")
        for reader in self._readers_of(number):
            reader.end(ConnectionLost("local: the peer has concealed the window"))

    def close(self, *, peer_left: bool) -> None:
        """Handle the end of the lane; mapped windows can still be read."""
        for reader in list(self._readers):
            reader.lane_ended(peer_left=peer_left)
        self._readers.clear()
        self._ways.clear()
        self._peer = None

    def _readers_of(self, number: int) -> Iterator[LocalWindowReader]:
        return (reader for reader in list(self._readers) if reader.number == number)

    def _blocks(self, reader: LocalWindowReader) -> WindowBlocks:
        """Return the blocks of a window that was announced.

        Raises:
            BackendUnavailable: They cannot or may not be read.
            ProtocolError: A correct lane would not describe them like this.
        """
        peer = self._peer
        assert peer is not None, "records come from a peer"
        kind, body = self._ways[reader.number]
        if kind is _Kind.REFUSED:
            raise BackendUnavailable(printable(body.decode(errors="replace")))
        _require_trust(self._allowed, peer.uid)
        if kind is _Kind.MEMORY:
            return ProcessBlocks(reader.memory, peer)
        if kind is _Kind.DEVICE:
            return DeviceBlocks(reader.memory, body, peer)
        if len(body) % _ARENA.size:
            raise ProtocolError(
                RULE, f"local: {len(body)} bytes are not a list of arenas"
            )
        arenas = [
            (base, peer.arena(number)) for number, _, base in _ARENA.iter_unpack(body)
        ]
        return MappedBlocks(reader.memory, arenas, peer.pid)


class LocalWindowReader(WindowReader):
    """Reads a window of another process on this host.

    Attributes:
        number: The window's number on its lane.
        memory: The peer's addresses.
    """

    # Whether reads complete at once; known when the reader is ready.
    immediate = False
    way = "not ready"

    def __init__(self, number: int, memory: WindowMemory) -> None:
        self.number = number
        self.memory = memory
        # None once they are closed; a device may still be busy with the last ones.
        self._blocks: WindowBlocks | None = None
        self._last: WindowBlocks | None = None
        self._settled = asyncio.Event()
        self._error: KVWireError | None = None
        self._peer_left = False

    def begin(self, blocks: WindowBlocks) -> None:
        """Allow reading, unless the reader was closed meanwhile."""
        if self._error is not None:
            blocks.close()
            return
        self._blocks = blocks
        self._last = blocks
        self.immediate = blocks.immediate
        self.memory_kind = blocks.memory_kind
        self.way = blocks.way
        self.turn_bytes = blocks.turn_bytes
        self.outlives_lane = isinstance(blocks, MappedBlocks)
        self._settled.set()

    def end(self, error: KVWireError) -> None:
        """End reading for the given reason."""
        if self._error is None:
            self._error = error
        if self._blocks is not None:
            self._blocks.close()
            self.quiet = self._blocks.quiet
            self._blocks = None
        self._settled.set()

    def lane_ended(self, *, peer_left: bool) -> None:
        """Handle the end of the lane."""
        self._peer_left = peer_left
        if not isinstance(self._blocks, MappedBlocks):
            self.end(ConnectionLost("local: the window's lane has ended"))

    async def ready(self) -> None:
        await self._settled.wait()
        if self._error is not None:
            raise again(self._error)

    def read(self, batch: BlockRead) -> Bits | asyncio.Future[Bits]:
        # A read on another thread needs them until it has ended.
        blocks = self._blocks
        if blocks is None:
            raise ConnectionLost(str(self._error or "local: the window is not ready"))
        try:
            return blocks.read(batch)
        except ConnectionLost as exc:
            self._peer_left = True
            self.end(exc)
            raise

    def memory_here(self) -> npt.NDArray[np.uint8] | None:
        blocks = self._blocks
        return blocks.memory if isinstance(blocks, MappedBlocks) else None

    @property
    def owner_gone(self) -> bool:
        """Return whether the owner has left the lane, or its process has ended."""
        blocks = self._blocks
        return self._peer_left or (blocks is not None and blocks.owner_gone)

    @property
    def busy(self) -> bool:
        """Return whether a device may still touch memory."""
        return self._last is not None and self._last.busy

    def close(self) -> None:
        self.end(ConnectionLost("local: the reader is closed"))


def _announce(arenas: SharedArenas, number: int, kind: _Kind, body: bytes) -> None:
    arenas.wire.send(LocalMessageType.WINDOW, _HEAD.pack(number, kind) + body)


def _arenas_of(memory: WindowMemory) -> list[Arena] | None:
    """Return the arenas that contain a whole window, or None."""
    found: dict[int, Arena] = {}
    for first, nbytes in (*memory.spans, memory.table):
        arena = arena_at(first, first + nbytes)
        if arena is None:
            return None
        found[arena.serial] = arena
    return list(found.values())


def _number(body: bytes) -> int:
    """Return the number of a window.

    Raises:
        ProtocolError: The body is not a number.
    """
    if len(body) != _NUMBER.size:
        raise ProtocolError(RULE, f"local: {len(body)} bytes are not a window number")
    (number,) = _NUMBER.unpack(body)
    return int(number)


def _require_trust(allowed: OneSidedWindows, uid: int | None = None) -> None:
    """Refuse windows that the configuration does not allow.

    Args:
        allowed: The setting ``one_sided_windows``.
        uid: The peer's user; None while it is not known.

    Raises:
        BackendUnavailable: The setting allows no windows, or not for this user.
    """
    why = refusal(allowed, uid)
    if why:
        raise BackendUnavailable(f"local: windows are refused: {why}")
