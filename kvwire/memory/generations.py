"""The generations of a window's blocks: one random 64-bit number for each block.

A ticket names a block and its generation. As long as the table contains this
generation, the block's bytes are the ones that the owner offered. To take a block back,
the owner renews its generation. A reader needs no answer from the owner: it copies the
bytes, *then* reads the generation, and discards the copy unless the generation still
equals the ticket's.

**Why it suffices to read the generation after the bytes.** The owner renews a
generation (store, then full fence) before it changes the block. The reader copies the
bytes, then executes an acquire fence, then loads the generation. Suppose it has read a
byte that the owner wrote after the renewal. Then the owner's fence synchronizes with
the reader's, so the reader's load comes after the renewal and yields the new
generation, or a later one. So the reader does not find the ticket's generation, and
discards the copy. So the ticket's generation is not found, and the copy is dropped. Nor
are the bytes too old: the owner wrote them before it made the ticket, and the channel
that carried the ticket to the reader keeps that order. (Boehm, "Can seqlocks get along
with programming language memory models?", 2012.)

Every renewal draws a new number, and ``current`` gives it to the owner alone. Somebody
who was given no ticket cannot guess one.

**Without the compiled functions** the same holds on x86-64 only. Its processors execute
stores in order, and loads in order. Only stores past the caches may overtake others;
they wait for a locked instruction, and each acquisition of a Python lock has one. On
other processors there is no table without a C compiler.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import weakref
from typing import Final

import numpy as np

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.fragments import Array
from kvwire.limits import KIB
from kvwire.memory.arena import Arena, may_share
from kvwire.memory.compiled import (
    CompiledFunction,
    as_argument,
    compiled_function,
)

ENTRY_BYTES: Final = 8
# Random numbers are drawn from the system in batches of this size.
_POOL: Final = KIB
# Processors on which other processors see stores in program order, and loads as well.
_ORDERED: Final = frozenset({"x86_64", "amd64", "i386", "i686"})

_TABLE: Final = (ctypes.c_void_p, ctypes.c_size_t)
renew_compiled: CompiledFunction | None = compiled_function(
    "kvwire_renew",
    *_TABLE,
    *(ctypes.c_void_p,) * 2,
    ctypes.c_size_t,
    result=ctypes.c_size_t,
)
same_compiled: CompiledFunction | None = compiled_function(
    "kvwire_same",
    *_TABLE,
    *(ctypes.c_void_p,) * 2,
    ctypes.c_size_t,
    ctypes.c_void_p,
)


class Generations:
    """A table of generations, which any thread of its owner may use.

    Args:
        count: The number of blocks, at least 1.

    Attributes:
        values: The generation of each block; read-only.
        address: The address of the first generation.
        nbytes: The bytes of the whole table.
        arena: The memory that contains the table, so that peers can map it; None if
            memory cannot be shared, which is the case on every system but Linux.

    Raises:
        BackendUnavailable: There are no compiled functions, and this processor does not
            keep the order that readers rely on.
        OSError: There is not enough memory.
    """

    def __init__(self, count: int) -> None:
        if renew_compiled is None:
            require_order()
        self.nbytes: int = ENTRY_BYTES * count
        self.arena: Arena | None = None
        if may_share():
            self.arena = Arena(self.nbytes, name="kvwire-generations")
            self._table: Array = self.arena.numpy(count, np.uint64)
            # Called by `close`, or if the table is dropped without being closed.
            self._release = weakref.finalize(self, self.arena.release)
            self._release.atexit = False
        else:
            self._table = np.empty(count, np.uint64)
        self.address: int = self._table.__array_interface__["data"][0]
        self._count = count
        # Guards the pool; without compiled functions, acquiring it is also the fence.
        self._lock = threading.Lock()
        self._pool: Array = np.empty(0, np.uint64)
        self._drawn = 0
        self._table[:] = _random(count)
        self.values: Array = self._table.view()
        self.values.flags.writeable = False

    def current(self, ids: Ids) -> Array:
        """Return the generations of blocks, for their tickets."""
        return self._table[ids]

    def renew(self, ids: Ids, fresh: Array | None = None) -> None:
        """Give blocks new generations; afterwards their memory may be written to.

        Args:
            ids: The blocks.
            fresh: Random numbers drawn for this purpose; None to draw them here.

        Raises:
            UsageError: An id is outside the table; the other blocks are renewed.
            ValueError: There are more or fewer numbers than blocks.
        """
        places = _places(ids)
        with self._lock:
            if fresh is None:
                fresh = self._draw(places.size)
            _require_one_each(fresh, places)
            if renew_compiled is not None:
                beyond = renew_compiled.held(
                    self.address,
                    self._count,
                    _column(places),
                    _column(fresh),
                    places.size,
                )
            else:
                inside = places < self._count
                beyond = places.size - np.count_nonzero(inside)
                self._table[places[inside]] = fresh[inside]
        if renew_compiled is None:
            self._fence()
        if beyond:
            raise UsageError(
                f"generations: {beyond} of {places.size} ids are outside 0 to "
                f"{self._count - 1}"
            )

    def same(self, ids: Ids, generations: Array) -> Bits:
        """Return for each block whether its generation is unchanged.

        For a block that does not exist, the answer is no. Everything that this thread
        has read before the call was read before the generations.

        Raises:
            ValueError: There are more or fewer generations than blocks.
        """
        places = _places(ids)
        _require_one_each(generations, places)
        if same_compiled is None:
            self._fence()
            same = places < self._count
            same[same] = self._table[places[same]] == generations[same]
            return same
        same = np.empty(places.size, np.bool_)
        same_compiled.held(
            self.address,
            self._count,
            _column(places),
            _column(generations),
            places.size,
            as_argument(same),
        )
        return same

    def close(self) -> None:
        """Renew all generations, which ends every ticket, and free the table."""
        if not self._table.size:
            return
        self._table[:] = _random(self._count)
        self._fence()
        # A renewal on another thread has ended before, or finds the table gone
        # afterwards.
        with self._lock:
            self._count = 0
            self._table = self.values = np.empty(0, np.uint64)
            if self.arena is not None:
                self._release()

    def _draw(self, count: int) -> Array:
        """Return random numbers that were never returned before."""
        end = self._drawn + count
        if end > self._pool.size:
            if count > _POOL:
                return _random(count)
            self._pool = _random(_POOL)
            self._drawn = 0
            end = count
        fresh = self._pool[self._drawn : end]
        self._drawn = end
        return fresh

    def _fence(self) -> None:
        """Execute a locked instruction: no CPU moves a memory access across it."""
        with self._lock:
            pass


def require_order() -> None:
    """Refuse a processor on which Python code cannot order memory accesses.

    Raises:
        BackendUnavailable: This processor is such a one.
    """
    machine = platform.machine().lower()
    if machine not in _ORDERED:
        raise BackendUnavailable(
            f"windows: on {machine} they need kvwire's compiled functions; install a C "
            f"compiler, and repeat pip install with --force-reinstall --no-deps"
        )


def _require_one_each(numbers: Array, places: Array) -> None:
    """Refuse columns that a compiled function would read beyond."""
    if numbers.nbytes != places.nbytes:
        raise ValueError(
            f"{numbers.nbytes} bytes of generations of {places.size} blocks"
        )


def _places(ids: Ids) -> Array:
    """Return block ids; a negative id becomes larger than any table."""
    return np.ascontiguousarray(ids, np.int64).view(np.uint64)


def _column(numbers: Array) -> bytes | int:
    """Return numbers as an argument, which the caller's array keeps alive.

    A short column is copied in less time than its address takes. A long one has
    megabytes.
    """
    if numbers.size <= _POOL or not numbers.flags.c_contiguous:
        return numbers.tobytes()
    return int(numbers.__array_interface__["data"][0])


def _random(count: int) -> Array:
    return np.frombuffer(os.urandom(ENTRY_BYTES * count), np.uint64)
