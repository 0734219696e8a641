"""The server of ``kvwire bench store``: a store in memory for each size of blocks."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, ClassVar, Final

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.sides.half import HOST, cpu_s
from kvwire.cli.bench.store_work import SETS, StoreWork

SERVER_CALLS: Final = frozenset({"start", "prepare", "cpu"})


class StoreServerSide:
    """One process with store servers.

    Attributes:
        work_type: What its works are.
    """

    work_type: ClassVar[type[Work]] = StoreWork

    def __init__(self) -> None:
        self._addresses: dict[int, str] = {}
        self._open = AsyncExitStack()

    async def start(self) -> dict[str, Any]:
        """Get ready; the answer is facts for the JSON document."""
        return {"kvwire": kvwire.__version__}

    async def prepare(self, work: Work) -> dict[str, Any]:
        """Serve a store for a work; ``address`` is where."""
        assert isinstance(work, StoreWork)
        address = self._addresses.get(work.nbytes)
        if address is None:
            opening = kvwire.BlockStore.open([work.memory(SETS)])
            store = await self._open.enter_async_context(opening)
            serving = kvwire.StoreServer(store, f"{HOST}:0")
            server = await self._open.enter_async_context(serving)
            address = f"{server.address.host}:{server.address.port}"
            self._addresses[work.nbytes] = address
        return {"address": address}

    async def cpu(self) -> dict[str, Any]:
        """CPU seconds of this process."""
        return cpu_s()

    async def close(self) -> None:
        """End the servers, then their stores."""
        await self._open.aclose()
