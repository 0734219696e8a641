"""One question or order to a store server."""

from __future__ import annotations

import kvwire
from kvwire.config import Config
from kvwire.errors import KVWireError
from kvwire.limits import STORE_REQUEST_BYTES_MAX, STORE_TIMEOUT_S
from kvwire.store.server.client import StoreClient
from kvwire.store.server.messages import (
    AnswerT,
    Delete,
    Stats,
    StatsReport,
    StoreDone,
)


async def ask_report(address: str, config: Config) -> StatsReport:
    """Return what a server has in its tiers, and who uses it.

    Cancel safety: safe, nothing stays connected.
    """
    return await _ask(address, config, Stats(1), StatsReport)


async def delete_all(address: str, config: Config, tenant: str) -> None:
    """Have a server forget all blocks of a tenant.

    Cancel safety: safe, it may be called again.
    """
    order = Delete(1, None, tenant=tenant)
    if reason := (await _ask(address, config, order, StoreDone)).reason:
        raise KVWireError(f"{address}: {reason}")


async def _ask(
    address: str, config: Config, request: Stats | Delete, kind: type[AnswerT]
) -> AnswerT:
    config = config.replace(message_bytes=STORE_REQUEST_BYTES_MAX, resume=False)
    async with kvwire.open(config) as communicator:
        client = StoreClient(communicator, address, STORE_TIMEOUT_S, lambda: None)
        try:
            await client.open()
            active = client.now()
            if isinstance(request, Delete) and not active.welcome.deletes:
                raise KVWireError(f"{address}: it is older, and cannot delete")
            return await active.call(request.number, request, kind)
        finally:
            await client.close()
