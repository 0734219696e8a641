"""The windows through which a client on a server's host reads its memory.

A server with no tenants exposes three: its memory, its index, and the generations of
its slots. A client opens them once it is welcomed. As soon as a transport has mapped
them, the client looks blocks up and copies them by itself. As long as none has, or if
it is on another host, it asks for each block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import numpy as np

import kvwire
from kvwire.aio import gather_all
from kvwire.endpoint.remote_window import memory_here
from kvwire.errors import UsageError
from kvwire.store.host_blocks import HostBlocks

logger: logging.Logger = logging.getLogger("kvwire.store")

WINDOWS: Final = ("store.images", "store.index", "store.generations")
"""The names of a server's windows: its memory, and the two tables beside it."""


class HostWindows:
    """A client's windows of one connection to a server. Made by :meth:`open`."""

    def __init__(
        self, windows: Sequence[kvwire.RemoteWindow], slab_bytes: int, *, alone: bool
    ) -> None:
        self._windows = windows
        self._slab_bytes = slab_bytes
        self._alone = alone
        self._blocks: HostBlocks | None = None
        self._refused = False

    @classmethod
    async def open(
        cls,
        connection: kvwire.Connection,
        slab_bytes: int,
        *,
        alone: bool,
        timeout_s: float,
    ) -> HostWindows:
        """Open the windows of a server; see :class:`HostBlocks` for the arguments.

        Raises:
            KVWireError: The server has none.

        Cancel safety: safe, they end with the connection.
        """
        within = timedelta(seconds=timeout_s)
        opening = (connection.window(name, deadline=within) for name in WINDOWS)
        return cls(await gather_all(*opening), slab_bytes, alone=alone)

    async def close(self) -> None:
        """Close the windows; running copies keep the memory that they read.

        Cancel safety: safe, they are closed either way.
        """
        self._blocks = None
        self._refused = True
        for window in self._windows:
            await window.close()

    @property
    def blocks(self) -> HostBlocks | None:
        """The server's blocks; None as long as no transport has mapped its memory."""
        if self._blocks is not None or self._refused:
            return self._blocks
        images, words, generations = map(memory_here, self._windows)
        if images is None or words is None or generations is None:
            return None
        try:
            self._blocks = HostBlocks(
                images,
                words.view(np.uint64),
                generations.view(np.uint64),
                self._slab_bytes,
                alone=self._alone,
            )
        except (UsageError, ValueError) as exc:
            self._refused = True
            logger.warning("the store server cannot be read in place: %s", exc)
        return self._blocks
