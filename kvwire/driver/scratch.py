"""Memory for copies of payloads on their way, which is used again and again.

New memory is faulted in page by page, and on a virtual machine that takes several times
as long as the copy that goes there. So what was given back is kept for the next copy,
until the connection has its next look at the clock: an idle one keeps none.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.limits import KIB, LINK_QUEUE_BYTES
from kvwire.memory.copy import mid_page_memory

# Capacities are multiples of this, so that a spare fits the next chunk as well.
_GRAIN_BYTES: Final = 64 * KIB

_Memory: TypeAlias = npt.NDArray[np.uint8]


class ScratchPool:
    """The copies of one connection, each on behalf of an owner.

    Attributes:
        lent_bytes: Of copies that are in use.
        spare_bytes: Of memory kept for the next ones.
    """

    __slots__ = ("_lent", "_spare", "lent_bytes", "spare_bytes")

    def __init__(self) -> None:
        self.lent_bytes: int = 0
        self.spare_bytes: int = 0
        self._lent: dict[object, _Memory] = {}
        self._spare: list[_Memory] = []

    def room(self, nbytes: int, owner: object) -> memoryview:
        """Memory of so many bytes until the owner gives it back; not cleared."""
        if self._spare and self._spare[-1].nbytes >= nbytes:
            memory = self._spare.pop()
            self.spare_bytes -= memory.nbytes
        else:
            memory = mid_page_memory(-(-nbytes // _GRAIN_BYTES) * _GRAIN_BYTES)
        self._lent[owner] = memory  # bounded: LINK_QUEUE_BYTES
        self.lent_bytes += memory.nbytes
        return memory.data[:nbytes]

    def give_back(self, owner: object) -> None:
        """What an owner has, if anything, is not used any more."""
        memory = self._lent.pop(owner, None)
        if memory is None:
            return
        self.lent_bytes -= memory.nbytes
        if self.spare_bytes < 2 * LINK_QUEUE_BYTES:
            self.spare_bytes += memory.nbytes
            self._spare.append(memory)  # bounded: LINK_QUEUE_BYTES

    def trim(self) -> None:
        """Keep no memory that is not in use."""
        self._spare.clear()
        self.spare_bytes = 0
