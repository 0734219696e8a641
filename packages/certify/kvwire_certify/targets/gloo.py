"""torch's gloo: ``send`` and ``recv`` of a process group of two.

Gloo cannot cancel a message, so a cancelled call waits for the message's end, on a
thread. A call with a timeout uses the timeout of ``Work.wait``.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
from typing import Any, Final

import torch
from torch import distributed as dist

from kvwire_certify.targets.messages import MessageEnd

# Longer than any wait of the kit.
_FOREVER: Final = dt.timedelta(minutes=5)
# Otherwise Gloo would resolve this host's name.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class GlooEnd(MessageEnd):
    """A process group; the end with the smaller port hosts its store."""

    version = f"torch {torch.__version__}"

    async def open(self, memory: memoryview) -> bytes:
        self.store: Any = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        asked = await super().open(memory)
        self.mine = (int(asked), self.store.port)
        return b"%d %d" % self.mine

    async def connect(self, peer: bytes) -> None:
        asked, kept = map(int, peer.split())
        self.rank = int(self.mine > (asked, kept))
        self.group: Any = await asyncio.to_thread(self.grouped, kept)
        await super().connect(b"%d" % asked)

    def grouped(self, port: int) -> Any:
        if self.rank:
            self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        return dist.ProcessGroupGloo(self.store, self.rank, 2, _FOREVER)

    async def message(
        self, sends: bool, memory: memoryview, tag: int, timeout_s: float | None
    ) -> None:
        call = self.group.send if sends else self.group.recv
        work = call([torch.frombuffer(memory, dtype=torch.uint8)], 1 - self.rank, tag)
        limit = _FOREVER if timeout_s is None else dt.timedelta(seconds=timeout_s)
        waiting = asyncio.ensure_future(asyncio.to_thread(work.wait, limit))
        try:
            await asyncio.shield(waiting)
        finally:
            await asyncio.wait([waiting])

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.group.abort)
        self.group = None
        self.store = None


TARGET = GlooEnd
