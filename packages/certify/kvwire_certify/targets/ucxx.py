"""ucxx's asyncio client: ``send`` and ``recv`` of an endpoint, with tags.

Its Python API has no reads and writes of remote memory. Cancelling a call cancels its
await. Each end sends on the endpoint that it has created, and receives on the other's.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import numpy as np
import ucxx

from kvwire_certify.targets.messages import MessageEnd

# The default is 5 seconds, which is too short on a busy machine.
_CONNECTS_S: Final = 20.0


class UcxxEnd(MessageEnd):
    """A listener, and one endpoint in each direction."""

    version = ucxx.__version__

    async def open(self, memory: memoryview) -> bytes:
        self.accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.listener: Any = ucxx.create_listener(
            self.accepted.set_result, connect_timeout=_CONNECTS_S
        )
        return b"%d %s" % (self.listener.port, await super().open(memory))

    async def connect(self, peer: bytes) -> None:
        port, asked = peer.split()
        self.outgoing: Any = await ucxx.create_endpoint(
            "127.0.0.1", int(port), connect_timeout=_CONNECTS_S
        )
        self.incoming: Any = await self.accepted
        await super().connect(asked)

    async def message(
        self, sends: bool, memory: memoryview, tag: int, timeout_s: float | None
    ) -> None:
        call = self.outgoing.send if sends else self.incoming.recv
        async with asyncio.timeout(timeout_s):
            await call(np.frombuffer(memory, np.uint8), tag, force_tag=True)

    async def close(self) -> None:
        await super().close()
        await self.outgoing.close()
        await self.incoming.close()
        self.listener.close()


TARGET = UcxxEnd
