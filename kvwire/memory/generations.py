"""The generations of a window's blocks: one random 64-bit number for each block.

A ticket names a block and its generation. As long as the table has this generation, the
block's bytes are those that the owner offered. To take a block back, the owner renews
its generation. A reader needs no answer from the owner: it copies the bytes, *then*
looks at the generation, and drops what it has copied unless the generation is still the
ticket's.

**Why a look after the bytes suffices.** The owner renews a generation (store, then
full fence) before it changes the block. The reader copies the bytes, then executes an
acquire fence, then loads the generation. Suppose it has read a byte that the owner
wrote after the renewal. Then the owner's fence synchronizes with the reader's, so the
reader's load comes after the renewal and yields the new generation, or a later one. No
generation is ever stored twice, apart from a chance of 2**-64 for each pair. So the
ticket's generation is not found, and the copy is dropped. Nor are the bytes too old:
the owner wrote them before it made the ticket, and whatever carried the ticket to the
reader keeps that order. (Boehm, "Can seqlocks get along with programming language
memory models?", 2012.)

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
import sys
import threading
from typing import Final

import numpy as np

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.fragments import Array
from kvwire.limits import KIB
from kvwire.memory.arena import Arena
from kvwire.memory.compiled import (
    CompiledFunction,
    as_argument,
    compiled_function,
)

ENTRY_BYTES: Final = 8
# Random numbers are drawn from the system so many at once.
_POOL: Final = KIB
# Processors whose stores, and whose loads, other processors see in their order.
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
        count: How many blocks there are, at least 1.

    Attributes:
        values: The generation of each block; read-only.
        address: The address of the first one.
        nbytes: The bytes of all.
        arena: The memory that the table lies in, so that peers can map it; None where
            memory cannot be shared, which is everywhere but on Linux.

    Raises:
        BackendUnavailable: Without compiled functions this processor does not keep the
            order that readers rely on.
        OSError: There is no memory for it.
    """

    def __init__(self, count: int) -> None:
        if renew_compiled is None:
            require_order()
        self.nbytes: int = ENTRY_BYTES * count
        self.arena: Arena | None = None
        if sys.platform == "linux":
            self.arena = Arena(self.nbytes, name="kvwire-generations")
            self._table: Array = self.arena.numpy(count, np.uint64)
        else:
            self._table = np.empty(count, np.uint64)
        self.address: int = self._table.__array_interface__["data"][0]
        self._count = count
        # Guards the pool; where nothing is compiled, its acquisition is the fence.
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
            fresh: Random numbers that were drawn for them; None to draw them here.

        Raises:
            UsageError: An id is not one of the table; the others are renewed.
        """
        places = _places(ids)
        with self._lock:
            if fresh is None:
                fresh = self._draw(places.size)
            if renew_compiled is not None:
                beyond = renew_compiled.held(
                    self.address,
                    self._count,
                    places.tobytes(),
                    fresh.tobytes(),
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

        It is not the generation of a block that does not exist. What this thread has
        read before, it read before this look.
        """
        places = _places(ids)
        if same_compiled is None:
            self._fence()
            same = places < self._count
            same[same] = self._table[places[same]] == generations[same]
            return same
        same = np.empty(places.size, np.bool_)
        same_compiled.held(
            self.address,
            self._count,
            places.tobytes(),
            generations.tobytes(),
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
        # A renewal on another thread is over, or finds no table any more.
        with self._lock:
            self._count = 0
            self._table = self.values = np.empty(0, np.uint64)
            if self.arena is not None:
                self.arena.release()

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
        """Execute a locked instruction, and let the compiler move nothing across it."""
        with self._lock:
            pass


def require_order() -> None:
    """Refuse a processor on which Python code cannot order memory accesses.

    Raises:
        BackendUnavailable: This is one.
    """
    machine = platform.machine().lower()
    if machine not in _ORDERED:
        raise BackendUnavailable(
            f"windows: on {machine} they need kvwire's compiled functions; install a C "
            f"compiler, then kvwire again: pip install --force-reinstall kvwire"
        )


def _places(ids: Ids) -> Array:
    """Return block ids; a negative id becomes larger than any table."""
    return np.asarray(ids, np.int64).view(np.uint64)


def _random(count: int) -> Array:
    return np.frombuffer(os.urandom(ENTRY_BYTES * count), np.uint64)
