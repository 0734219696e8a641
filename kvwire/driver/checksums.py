"""Checksums of payloads: which payloads get one, and how it is compared.

A payload's own header shows whether it has a checksum, so the sender decides alone. A
checksum reads the payload once more, from memory that is not in the CPU's cache: 0.05 s
per GiB on each side, or three times as long if the payload is in pieces of 4 KiB. If
this is too slow, checking one chunk in several still finds a cable, switch or memory
that flips bits. Within one host a checksum costs as much as moving the payload, and
there is no cable, so ``"auto"`` checks only some payloads.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.backend import Payload
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, LINK_QUEUE_BYTES
from kvwire.memory.buffers import mid_page_memory
from kvwire.memory.checksum import LOW_32_BITS, checksum, is_scattered, view_digest
from kvwire.memory.copy import copy
from kvwire.wire.header import Flag, Header

# Sampling then costs an eighth of the full check, and if all chunks are damaged, the
# 13th at the latest is detected.
SAMPLED_ONE_IN: Final = 8
# Of chunks up to this size, each gets a checksum, which takes less than its frame.
SHORT_BYTES: Final = 72 * KIB

CheckMode = Literal["auto", "on", "sampled", "off"]

_CHECKED: Final = int(Flag.CHECKED)
# The golden ratio of 2**32. Its multiples are spread evenly and have no common period
# with layers, blocks or powers of two, so over time every position of a transfer gets
# checked.
_STEP: Final = 0x9E3779B1
_TURN: Final = 2**32
# Capacities of copies are multiples of this, so memory kept from one chunk also fits
# the next.
_GRAIN_BYTES: Final = 64 * KIB

_Memory: TypeAlias = npt.NDArray[np.uint8]


class ScratchPool:
    """Memory for the copies that one connection makes, each lent to an owner.

    New memory is faulted in page by page, which on a virtual machine takes several
    times as long as the copy into it. So returned memory is kept for the next copy,
    until the connection's next tick; an idle connection keeps none.

    Attributes:
        lent_bytes: Memory of running copies.
        spare_bytes: Memory kept for the next copies.
    """

    __slots__ = ("_lent", "_spare", "lent_bytes", "spare_bytes")

    def __init__(self) -> None:
        self.lent_bytes: int = 0
        self.spare_bytes: int = 0
        self._lent: dict[object, _Memory] = {}
        self._spare: list[_Memory] = []

    def room(self, nbytes: int, owner: object) -> memoryview:
        """Lend uncleared memory of that size, until the owner gives it back."""
        if self._spare and self._spare[-1].nbytes >= nbytes:
            memory = self._spare.pop()
            self.spare_bytes -= memory.nbytes
        else:
            memory = mid_page_memory(-(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES)
        self._lent[owner] = memory  # bounded: LINK_QUEUE_BYTES
        self.lent_bytes += memory.nbytes
        return memory.data[:nbytes]

    def give_back(self, owner: object) -> None:
        """Take back an owner's memory, if it has any."""
        memory = self._lent.pop(owner, None)
        if memory is None:
            return
        self.lent_bytes -= memory.nbytes
        if self.spare_bytes < 2 * LINK_QUEUE_BYTES:
            self.spare_bytes += memory.nbytes
            self._spare.append(memory)  # bounded: LINK_QUEUE_BYTES

    def pass_on(self, owner: object, to: object) -> None:
        """Give an owner's memory, if any, to another owner."""
        memory = self._lent.pop(owner, None)
        if memory is not None:
            self._lent[to] = memory  # bounded: LINK_QUEUE_BYTES

    def trim(self) -> None:
        """Free the memory that is not in use."""
        self._spare.clear()
        self.spare_bytes = 0


class ChecksumPolicy:
    """Decides which of a connection's payloads are sent with a checksum.

    Args:
        mode: ``"on"``: all; ``"off"``: none; ``"sampled"``: all messages and short
            chunks, for which it costs almost nothing, and one in :data:`SAMPLED_ONE_IN`
            others; ``"auto"``: ``"sampled"`` if payload moves from memory to memory,
            else all.
    """

    __slots__ = ("_intact_share", "_share", "_short_bytes", "_turn")

    def __init__(self, mode: CheckMode) -> None:
        some = _TURN // SAMPLED_ONE_IN
        shares = {"auto": (_TURN, some), "on": (_TURN, _TURN), "sampled": (some, some)}
        self._share, self._intact_share = shares.get(mode, (0, 0))
        self._short_bytes = -1 if mode == "off" else SHORT_BYTES
        self._turn = 0

    def seal(
        self, payload: Payload, copies: ScratchPool, owner: object
    ) -> tuple[Payload, int | None]:
        """Return the payload to send, and its checksum or None.

        Small fragments are gathered into a copy: the checksum reads them anyway, the
        copy is still in the CPU's cache, and sending it costs a transport a third less
        than sending the fragments.
        """
        if isinstance(payload, memoryview):
            if (
                payload.nbytes > self._short_bytes
                and self._share < _TURN
                and not self._due(payload, self._share)
            ):
                return payload, None
            return payload, view_digest(payload) & LOW_32_BITS
        if not self._due(payload, self._share):
            return payload, None
        if is_scattered(payload):
            scattered = payload
            payload = copies.room(payload.nbytes, owner)
            copy(scattered, payload)
        return payload, checksum(payload)

    def of(self, payload: Payload, *, intact: bool = False) -> int | None:
        """Return the checksum for a payload, or None.

        ``intact`` means that the path goes only through memory.
        """
        share = self._intact_share if intact else self._share
        return checksum(payload) if self._due(payload, share) else None

    def _due(self, payload: Payload, share: int) -> bool:
        if payload.nbytes > self._short_bytes:
            turn = self._turn
            self._turn = (turn + _STEP) % _TURN
            if turn >= share:
                return False
        # The host cannot read device memory, so the transport is trusted to keep it
        # intact.
        return not isinstance(payload, Fragments) or payload.device is None


def landing_for(
    place: Payload, header: Header, copies: ScratchPool, owner: object
) -> Payload:
    """Return the memory in which to receive a payload for ``place``.

    A checked payload for small fragments is received in one piece, and :func:`arrived`
    copies it once it is known to be intact. :meth:`ChecksumPolicy.seal` explains why.
    """
    if header.flags & _CHECKED and is_scattered(place):
        return copies.room(place.nbytes, owner)
    return place


def arrived(received: Payload | None, place: Payload | None, header: Header) -> bool:
    """Copy a payload to its place if it is intact; return whether it is."""
    if not matches(received, header):
        return False
    if received is not place:
        assert received is not None
        assert place is not None
        copy(received, place)
    return True


def matches(payload: Payload | None, header: Header) -> bool:
    """Return whether a payload matches its header's checksum, if there is one."""
    if not header.flags & _CHECKED or payload is None:
        return True
    if type(payload) is memoryview:  # the fast path of nearly all small frames
        return view_digest(payload) & LOW_32_BITS == header.payload_check
    if payload.device is not None:
        return True  # the host cannot read it, so the transport is trusted
    return checksum(payload) == header.payload_check
