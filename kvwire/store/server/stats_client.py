"""One question to a store server."""

from __future__ import annotations

import kvwire
from kvwire.config import Config
from kvwire.limits import STORE_REQUEST_BYTES_MAX, STORE_TIMEOUT_S
from kvwire.store.server.client import StoreClient
from kvwire.store.server.messages import Stats, StatsReport


async def ask_report(address: str, config: Config) -> StatsReport:
    """Return what a server has in its tiers, and who uses it.

    Args:
        address: Where it listens, ``"host:port"``.
        config: Of the connection to it.

    Raises:
        KVWireError: It cannot be reached, or does not answer.

    Cancel safety: safe, nothing stays connected.
    """
    config = config.replace(message_bytes=STORE_REQUEST_BYTES_MAX, resume=False)
    async with kvwire.open(config) as communicator:
        client = StoreClient(communicator, address, STORE_TIMEOUT_S, lambda: None)
        try:
            await client.open()
            number = client.number()
            return await client.now().call(number, Stats(number), StatsReport)
        finally:
            await client.close()
