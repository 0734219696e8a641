"""Reads the blocks of a window, from mapped memory or from another process.

Both ways copy the bytes of a batch, and then read the generations of its blocks.
:mod:`kvwire.memory.generations` shows why that suffices, provided that the generations
are read after the bytes in the order that other processors see. This order holds:

* **Mapped.** The compiled function executes a full fence between the bytes and the
  generations. An acquire fence would suffice, as both are loads; but copying functions
  use string instructions, and the manuals do not state the order of their loads as
  clearly. Stores that bypass the caches need a separate fence, for the next reader of
  the destination. The argument does not depend on that fence.
* **From another process.** One system call reads the bytes, then the generations, then
  a cookie. The kernel handles the pieces in this order, and takes the lock of the
  process's address space for each. x86-64 executes loads in order, and there the lock
  is a full fence as well. On other processors, a second call reads the generations,
  behind a fence. If a batch needs several calls, the last one reads its generations.
* **Without the compiled functions**, both ways exist on x86-64 only, where loads are
  executed in order. A lock acquired between the bytes and the generations is a full
  fence there.

**Which process is read.** Only the process that the lane has met has the cookie at that
address, and a process that has ended does not come back. So if the cookie, which is
read last, is right, all calls of the batch have read that process.

**Which memory is read.** If the window is mapped, each address lies in one of its
tensors, and the tensor lies in a mapping whose size is sealed
(:mod:`kvwire_local.templates`). Another process's addresses are resolved in that
process only; a wrong one gives EFAULT.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import select
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.backend import BlockRead, WindowMemory
from kvwire.errors import BackendUnavailable, ConnectionLost
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Array
from kvwire.limits import KIB, MIB
from kvwire.memory import cma
from kvwire.memory.arena import SharedMapping
from kvwire.memory.compiled import (
    CompiledFunction,
    as_argument,
    compiled_function,
)
from kvwire.memory.generations import ENTRY_BYTES, require_order
from kvwire.memory.iovec import IOVECS_MAX
from kvwire.memory.pieces import copy_pieces
from kvwire.types import MemoryKind
from kvwire_local.peer import PeerMemory
from kvwire_local.templates import (
    Span,
    WindowTemplate,
    WindowTemplates,
    arguments,
    checked_spans,
    checked_table,
)

# Copying this many bytes with the GIL held takes some 50 us from other threads.
# Releasing it may cost this thread another thread's switch interval, 5 ms.
HELD_BYTES: Final = 512 * KIB
# The struct `kvwire_process` of _copy.c.
_PROCESS: Final = struct.Struct("=2Q16s")

# Arguments: the window, the offsets, the tickets, and the result.
_KINDS: Final = (
    *(ctypes.c_void_p,) * 3,
    *(ctypes.c_uint64,) * 2,
    *(ctypes.c_void_p,) * 2,
    ctypes.c_uint64,
    ctypes.c_void_p,
)
mapped_compiled: CompiledFunction | None = compiled_function(
    "kvwire_read_mapped", *_KINDS
)
process_compiled: CompiledFunction | None = compiled_function(
    "kvwire_read_process", *_KINDS, ctypes.c_void_p, result=ctypes.c_int
)
MappedArena = tuple[int, SharedMapping]
"""An arena's address at its owner, and its mapping here."""


class WindowBlocks(ABC):
    """Reads the blocks of a window."""

    way: str
    """The name of this way of reading, for reports."""
    turn_bytes: int
    """The most bytes that take no more than about 0.2 ms."""
    immediate: bool = True
    """Whether ``read`` returns bits instead of a future."""
    memory_kind: MemoryKind = MemoryKind.HOST
    """The kind of memory of the window, and of the destinations."""
    quiet: asyncio.Future[None] | None = None
    """After ``close``: done once everything is released; None if that is so already."""

    @abstractmethod
    def read(self, batch: BlockRead) -> Bits | asyncio.Future[Bits]:
        """Read blocks, and return which have landed.

        Raises:
            ConnectionLost: The owner is gone.
        """

    @property
    def owner_gone(self) -> bool:
        """Return whether the owner's process is known to have ended."""
        return False

    @property
    def busy(self) -> bool:
        """Return whether a device may still touch memory, after ``close`` too."""
        return False

    def close(self) -> None:  # noqa: B027 - other processes need no descriptor
        """Release the resources of ``owner_gone``; a running read continues."""


class MappedBlocks(WindowBlocks):
    """A window in its owner's arenas, which are mapped here.

    Args:
        memory: The window.
        arenas: The arenas that may contain it.
        pid: The owner's process; 0 if it is not visible from here.

    Raises:
        BackendUnavailable: A tensor or the table is in none of the arenas.
        ProtocolError: A correct owner would not have such tensors or such a table.
    """

    way = "mapped"
    turn_bytes = 2 * MIB

    def __init__(
        self, memory: WindowMemory, arenas: Sequence[MappedArena], pid: int
    ) -> None:
        if mapped_compiled is None:
            require_order()
        spans = checked_spans(memory.spans)
        shifts = [_shift(span, arenas) for span in spans]
        first, end = checked_table(memory.table)
        table = first + _shift((first, end), arenas)
        entries = (end - first) // ENTRY_BYTES
        self._templates = WindowTemplates(spans, shifts, table, entries)
        self._generations: Array = np.frombuffer(
            memoryview((ctypes.c_char * (end - first)).from_address(table)), np.uint64
        )
        self._spans = spans
        # They stay mapped as long as they are referenced, also by a running read.
        self._arenas = arenas
        self._process = _process_descriptor(pid)
        # A window may also be dropped without being closed.
        self._release = weakref.finalize(self, _close, self._process)
        self._release.atexit = False

    @property
    def memory(self) -> npt.NDArray[np.uint8] | None:
        """The memory of a window of one tensor; it keeps its arena mapped."""
        if len(self._spans) > 1:
            return None
        first, end = self._spans[0]
        base, mapping = _arena_of((first, end), self._arenas)
        return mapping.array(first - base, end - first)

    def read(self, batch: BlockRead) -> Bits:
        template = self._templates.of(batch)
        if mapped_compiled is None:
            return self._read_in_python(template, batch)
        landed = np.empty(batch.entries.size, np.bool_)
        held, released = mapped_compiled
        read = held if batch.nbytes <= HELD_BYTES else released
        read(template.packed, *arguments(batch), as_argument(landed))
        return landed

    def _read_in_python(self, template: WindowTemplate, batch: BlockRead) -> Bits:
        landed = template.inside(batch)
        self._keep_current(batch, landed)
        origin, target = template.addresses(batch, landed)
        if origin.size:
            lengths = np.full(origin.size, batch.run, np.uint64)
            copy_pieces(origin, target, lengths, batch.run * origin.size)
        self._look_again(batch, landed)
        return landed

    def _look_again(self, batch: BlockRead, landed: Bits) -> None:
        with _fence:
            self._keep_current(batch, landed)

    def _keep_current(self, batch: BlockRead, landed: Bits) -> None:
        """Keep the blocks whose generation equals the ticket's."""
        found = self._generations[batch.entries[landed]]
        landed[landed] = found == batch.generations[landed]

    @property
    def owner_gone(self) -> bool:
        """Return whether the owner's process is known to have ended."""
        if self._process < 0:
            return False
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._process = -1
        self._release()


class ProcessBlocks(WindowBlocks):
    """A window in its owner's ordinary memory.

    Args:
        memory: The window.
        peer: The owner's process.

    Raises:
        BackendUnavailable: This process may not read that one.
        ProtocolError: A correct owner would not have such tensors or such a table.
    """

    way = "process_vm_readv"
    turn_bytes = 1 * MIB

    def __init__(self, memory: WindowMemory, peer: PeerMemory) -> None:
        if process_compiled is None:
            require_order()
        refusal = peer.refusal()
        if refusal:
            raise BackendUnavailable(f"local: {refusal}")
        spans = checked_spans(memory.spans)
        self._table, end = checked_table(memory.table)
        entries = (end - self._table) // ENTRY_BYTES
        shifts = [0] * len(spans)
        self._templates = WindowTemplates(spans, shifts, self._table, entries)
        self._peer = peer
        self._packed = _PROCESS.pack(peer.pid, peer.cookie_address, peer.cookie)

    def read(self, batch: BlockRead) -> Bits:
        template = self._templates.of(batch)
        if process_compiled is None:
            return self._read_in_python(template, batch)
        landed = np.empty(batch.entries.size, np.bool_)
        held, released = process_compiled
        read = held if batch.nbytes <= HELD_BYTES else released
        argument = as_argument(landed)
        error = read(template.packed, *arguments(batch), argument, self._packed)
        if error:
            raise _lost(error)
        return landed

    def _read_in_python(self, template: WindowTemplate, batch: BlockRead) -> Bits:
        landed = template.inside(batch)
        if self._read_chosen(template, batch, landed):
            return landed
        # Some of the memory does not exist. Read each block separately.
        for block in np.flatnonzero(landed).tolist():
            alone = np.zeros_like(landed)
            alone[block] = True
            there = self._read_chosen(template, batch, alone)
            landed[block] = there and alone[block]
        if not self._read_chosen(template, batch, np.zeros_like(landed)):
            raise _lost(errno.EFAULT)
        return landed

    def _read_chosen(
        self, template: WindowTemplate, batch: BlockRead, chosen: Bits
    ) -> bool:
        """Read the chosen blocks; blocks that have landed remain chosen.

        Returns False if some of the memory does not exist.
        """
        origin, target = template.addresses(batch, chosen)
        entries = batch.entries[chosen] * np.uint64(ENTRY_BYTES)
        found = np.empty(entries.size, np.uint64)
        cookie = np.zeros(len(self._peer.cookie), np.uint8)
        # In this order: the bytes, the generations, the cookie.
        lengths = np.repeat(
            np.array((batch.run, ENTRY_BYTES, cookie.size), np.uint64),
            (origin.size, found.size, 1),
        )
        here = np.arange(found.size, dtype=np.uint64) * np.uint64(ENTRY_BYTES)
        here += np.uint64(found.ctypes.data)
        local = _iovecs(lengths, target, here, cookie.ctypes.data)
        there = entries + np.uint64(self._table)
        remote = _iovecs(lengths, origin, there, self._peer.cookie_address)
        try:
            for first in range(0, lengths.size, IOVECS_MAX):
                rows = lengths[first : first + IOVECS_MAX]
                moved = cma.read(
                    self._peer.pid,
                    (local[first:].ctypes.data, rows.size),
                    (remote[first:].ctypes.data, rows.size),
                )
                if moved < int(rows.sum()):
                    return False
        except OSError as exc:
            if exc.errno == errno.EFAULT:
                return False
            raise _lost(exc.errno or 0) from exc
        if cookie.tobytes() != self._peer.cookie:
            raise _lost(errno.ESRCH)
        self._look_again(batch, chosen, found)
        return True

    def _look_again(self, batch: BlockRead, chosen: Bits, found: Array) -> None:
        """Keep the blocks whose generation, as it was read, equals the ticket's."""
        chosen[chosen] = found == batch.generations[chosen]


_fence: Final = threading.Lock()


def _shift(span: Span, arenas: Sequence[MappedArena]) -> int:
    """Return the offset that converts the owner's addresses of a span to local ones.

    Raises:
        BackendUnavailable: No arena contains it.
    """
    base, mapping = _arena_of(span, arenas)
    return mapping.address - base


def _arena_of(span: Span, arenas: Sequence[MappedArena]) -> MappedArena:
    """Return the arena that contains a span, with its address at the owner.

    Raises:
        BackendUnavailable: No arena contains it.
    """
    first, end = span
    for base, mapping in arenas:
        if base <= first and end <= base + mapping.nbytes:
            return base, mapping
    raise BackendUnavailable(
        f"local: {end - first} bytes of the window at {first:#x} are in no arena that "
        f"the peer shares"
    )


def _process_descriptor(pid: int) -> int:
    """Return a descriptor that becomes readable when a process ends, or -1."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _iovecs(lengths: Array, bytes_: Array, generations: Array, cookie: int) -> Array:
    """Return a table of iovecs."""
    last = np.array((cookie,), np.uint64)
    addresses = np.concatenate((bytes_, generations, last))
    return np.stack((addresses, lengths), axis=1)


def _lost(code: int) -> ConnectionLost:
    error = OSError(code, os.strerror(code))
    return ConnectionLost(f"local: the window's owner has ended: {cma.reason(error)}")
