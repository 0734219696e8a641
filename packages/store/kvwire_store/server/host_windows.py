"""The windows through which a client on a server's host reads its memory.

A server without tenants exposes three windows: its memory, its index, and the
generations of its slots. A client opens them after the welcome. Once a transport has
mapped them, the client looks up and copies blocks by itself. Until then, or if it is on
another host, it requests each block from the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import numpy as np

import kvwire
from kvwire.aio import gather_all
from kvwire.errors import UsageError
from kvwire.spi import memory_here
from kvwire_store.host_blocks import HostBlocks
from kvwire_store.limits import STORE_LOOK_S, STORE_LOOK_S_MAX

logger: logging.Logger = logging.getLogger("kvwire.store")

WINDOWS: Final = ("store.images", "store.index", "store.generations")
"""The names of a server's windows: its memory, and the two tables beside it."""


class HostWindows:
    """A client's windows on one connection to a server. Made by :meth:`open`.

    A lane may come up later, and no event reports that a transport has mapped the
    windows. So this object checks by itself, at growing intervals.

    Attributes:
        blocks: The server's blocks, once they are mapped; cancelled by ``close``.
    """

    def __init__(
        self,
        windows: Sequence[kvwire.RemoteWindow],
        slab_bytes: int,
        *,
        alone: bool,
    ) -> None:
        self._windows = windows
        self._slab_bytes = slab_bytes
        self._alone = alone
        self._pause_s = STORE_LOOK_S
        loop = asyncio.get_running_loop()
        self.blocks: asyncio.Future[HostBlocks] = loop.create_future()
        self._look = loop.call_soon(self._look_again)

    @classmethod
    async def open(
        cls,
        connection: kvwire.Connection,
        slab_bytes: int,
        *,
        alone: bool,
        timeout_s: float,
    ) -> HostWindows:
        """Open the windows of a server.

        Args:
            connection: The connection to it.
            slab_bytes: See :class:`HostBlocks`.
            alone: See :class:`HostBlocks`.
            timeout_s: The time limit for the answer, in seconds.

        Raises:
            KVWireError: The server has no windows.

        Cancel safety: safe, the windows end with the connection.
        """
        within = timedelta(seconds=timeout_s)
        opening = (connection.window(name, deadline=within) for name in WINDOWS)
        return cls(await gather_all(*opening), slab_bytes, alone=alone)

    async def close(self) -> None:
        """Close the windows; running copies keep their memory mapped.

        Cancel safety: safe, they are closed either way.
        """
        self._look.cancel()
        self.blocks.cancel()
        for window in self._windows:
            await window.close()

    def _look_again(self) -> None:
        """Report the server's blocks once they are mapped; otherwise check later."""
        images, words, generations = map(memory_here, self._windows)
        if images is None or words is None or generations is None:
            later = asyncio.get_running_loop().call_later
            self._look = later(self._pause_s, self._look_again)
            self._pause_s = min(2 * self._pause_s, STORE_LOOK_S_MAX)
            return
        try:
            blocks = HostBlocks(
                images,
                words.view(np.uint64),
                generations.view(np.uint64),
                self._slab_bytes,
                alone=self._alone,
            )
        except (UsageError, ValueError) as exc:
            logger.warning(
                "clients on this host cannot read the server's memory directly: %s", exc
            )
            return
        self.blocks.set_result(blocks)
