"""A server's memory for the transfers of one client.

Blocks move between a client and its berths; between berths and the store they are
copied. So what a client holds while it is slow, or dead without anybody knowing yet, is
memory that only it could use, and never a slot of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class TransferBuffers:
    """Lends pieces of memory, which is taken when it is first used. One event loop."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._room = asyncio.Semaphore(count)
        self._used: list[Bytes] = []

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[Bytes]:
        """Lend a buffer; at the end of the block nothing may touch it.

        Cancel safety: safe while it waits. A block that is cancelled while something
        may touch the berth leaves it to that, and there is another one in its place.
        """
        async with self._room:
            berth = self._used.pop() if self._used else np.empty(self.nbytes, np.uint8)
            yield berth
            # Not after an exception: nobody has said then that it is free.
            self._used.append(berth)
