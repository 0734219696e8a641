"""The peer process, and the ways to read its memory.

Its pid comes from the kernel. A cookie shows that the pid still belongs to the process
that opened the lane: 16 bytes derived from the lane's secret, at an address that the
peer has sent. Another process that gets the same pid later does not have these bytes at
that address.
"""

from __future__ import annotations

import fcntl
import os

from kvwire.errors import ConnectionLost, ProtocolError
from kvwire.kv.fragments import Fragments
from kvwire.memory import cma
from kvwire.memory.arena import SEALS, SharedMapping
from kvwire.memory.copy import address_of, copy
from kvwire.memory.iovec import Iovecs
from kvwire_local.descriptor import RULE, DescribedPlace, PlaceKind
from kvwire_local.shared_arenas import ARENA_BODY
from kvwire_local.wire import ARENAS_BYTES_MAX, ARENAS_MAX, PeerProcess


class PeerMemory:
    """The memory of one lane's peer."""

    def __init__(self, who: PeerProcess, cookie_address: int, cookie: bytes) -> None:
        self.pid: int = who.pid  # 0 if it is not visible from here
        self.uid: int = who.uid
        self.cookie_address = cookie_address
        self.cookie = cookie
        self._arenas: dict[int, SharedMapping] = {}
        self._count = 0

    def refusal(self) -> str:
        """Return why the peer's memory cannot be read in place; "" if it can."""
        if self.pid < 1:
            return "the peer is in another pid namespace"
        try:
            found = cma.read_bytes(self.pid, self.cookie_address, len(self.cookie))
        except OSError as exc:
            return cma.reason(exc)
        if found != self.cookie:
            return f"pid {self.pid} is another process here"
        return ""

    def adopt(self, body: bytes, fd: int) -> None:
        """Map an arena that the peer shares, read-only.

        Raises:
            ProtocolError: Its number is not the next one, there would be too many
                arenas or bytes, or its descriptor is not sealed like an arena's, so
                pages could vanish while they are read.
            OSError: It cannot be mapped.
        """
        try:
            number = self._count
            if body != ARENA_BODY.pack(number) or len(self._arenas) >= ARENAS_MAX:
                raise ProtocolError(
                    RULE,
                    f"local: the next arena must have number {number}, and "
                    f"{len(self._arenas)} of at most {ARENAS_MAX} are shared",
                )
            if _seals(fd) & SEALS != SEALS:
                raise ProtocolError(RULE, "local: the descriptor is not a sealed arena")
            nbytes = os.fstat(fd).st_size
            mapped = sum(arena.nbytes for arena in self._arenas.values())
            if mapped + nbytes > ARENAS_BYTES_MAX:
                raise ProtocolError(
                    RULE,
                    f"local: an arena of {nbytes} bytes beside {mapped} bytes is more "
                    f"than {ARENAS_BYTES_MAX}",
                )
            arena = SharedMapping(fd, nbytes, writable=False)
        finally:
            os.close(fd)
        self._arenas[number] = arena  # bounded: ARENAS_MAX
        self._count += 1

    def forget(self, body: bytes) -> None:
        """Drop an arena that the peer no longer shares.

        It is unmapped once no read, window or array refers to it.

        Raises:
            ProtocolError: The peer does not share it.
        """
        (number,) = ARENA_BODY.unpack(body) if len(body) == ARENA_BODY.size else (-1,)
        if self._arenas.pop(number, None) is None:
            raise ProtocolError(RULE, f"local: arena {number} is not shared")

    def reading(self, place: DescribedPlace, destination: Fragments) -> PeerRead | None:
        """Return the reader of a payload; None until its arena is announced.

        Raises:
            ProtocolError: The payload extends beyond its arena, or the peer no longer
                shares this arena.
        """
        fragments = place.fragments
        assert fragments is not None
        if place.kind is PlaceKind.MEMORY:
            return MemoryReading(self, fragments, destination)
        if place.arena >= self._count:
            return None
        arena = self.arena(place.arena)
        ends = fragments.addresses + fragments.lengths
        if int(ends[0] if len(fragments) == 1 else ends.max()) > arena.nbytes:
            raise ProtocolError(
                RULE, f"local: the range is beyond the arena's {arena.nbytes} bytes"
            )
        return MappedReading(arena, fragments.shifted(arena.address), destination)

    def arena(self, number: int) -> SharedMapping:
        """Return an arena that the peer has shared.

        Raises:
            ProtocolError: It does not share such an arena.
        """
        arena = self._arenas.get(number)
        if arena is None:
            raise ProtocolError(RULE, f"local: arena {number} is not shared")
        return arena

    def close(self) -> None:
        """Drop the peer's arenas, and unmap the ones that no window uses."""
        self._arenas = {}


class MemoryReading:
    """Reads the peer's address space, many fragments with one system call.

    The last call reads the cookie as well, after the payload.
    """

    def __init__(
        self, peer: PeerMemory, source: Fragments, destination: Fragments
    ) -> None:
        self._peer = peer
        self._remote = Iovecs(source)
        self._local = Iovecs(destination)
        self._cookie = bytearray(len(peer.cookie))
        self._tails = (
            (peer.cookie_address, len(peer.cookie)),
            (address_of(self._cookie), len(peer.cookie)),
        )
        self.rest = source.nbytes

    def step(self, bytes_max: int) -> int:
        """Read at most ``bytes_max`` more bytes; return how many.

        Raises:
            ConnectionLost: The payload is gone, or the pid no longer names the peer.
        """
        remote = self._remote.window(bytes_max, self._tails[0])
        local = self._local.window(bytes_max, self._tails[1])
        try:
            moved = min(cma.read(self._peer.pid, local, remote), self.rest)
        except OSError as exc:
            raise ConnectionLost(
                f"local: a payload can no longer be read: {cma.reason(exc)}"
            ) from exc
        self.rest -= moved
        self._remote.rest = self._local.rest = self.rest
        if not self.rest and self._cookie != self._peer.cookie:
            raise ConnectionLost(f"local: pid {self._peer.pid} is no longer the peer")
        return moved


class MappedReading:
    """Reads an arena of the peer that is mapped here."""

    def __init__(
        self, arena: SharedMapping, source: Fragments, destination: Fragments
    ) -> None:
        # It stays mapped until the payload was read, whatever the peer sends.
        self._arena = arena
        self._source = source
        self._destination = destination
        self.rest = source.nbytes

    def step(self, bytes_max: int) -> int:
        """Read at most ``bytes_max`` more bytes; return how many."""
        done = self._source.nbytes - self.rest
        length = min(self.rest, bytes_max)
        part = self._source.slice(done, length)
        copy(part, self._destination.slice(done, length))
        self.rest -= length
        return length


PeerRead = MemoryReading | MappedReading
"""Copies one payload from the peer's memory into ours, step by step."""


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0  # not a memfd
