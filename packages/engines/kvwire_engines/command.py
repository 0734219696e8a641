"""``kvwire session``: sessions of llama.cpp's server that outlive it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Final

from cyclopts import App
from rich.console import Console

from kvwire.errors import without_password
from kvwire.types import Address
from kvwire_store import BlockStore

app: App = App(name="session", help="Keep the sessions of a llama-server in a store.")

_LISTEN: Final = "127.0.0.1:8081"


@app.command
def serve(
    *,
    engine: str,
    slots: Path,
    tier: list[str],
    listen: str = _LISTEN,
    weights: str = "",
    tenant: str = "",
) -> None:
    """Keep the sessions of a llama-server in a store; its clients use this address.

    Runs until Ctrl-C or SIGTERM; then it stores the answers so far.

    Args:
        engine: The server's URL, such as http://127.0.0.1:8080.
        slots: The server's --slot-save-path, such as /dev/shm/slots.
        tier: A tier of the store; repeat the option, fastest tier first: --tier
            memory:1GiB --tier 'disk:/var/kv?size=100GiB' or --tier
            kvwire://10.0.0.5:7500.
        listen: The address to listen on. It has no access control of its own: the
            server's API key is passed on.
        weights: A name for the weights, if the server's files are not on this machine
            or settings (RoPE, control vectors) change what the model computes; the same
            at all servers that share KV.
        tenant: The tenant that owns the blocks.
    """
    where = Address.parse(listen)
    asyncio.run(_serve(engine, slots, tier, where, weights, tenant))


async def _serve(
    engine: str,
    slots: Path,
    tiers: list[str],
    where: Address,
    weights: str,
    tenant: str,
) -> None:
    from kvwire_engines.llamacpp.front import SessionFront  # noqa: PLC0415 - an extra
    from kvwire_engines.llamacpp.sessions import LlamaCppSessions  # noqa: PLC0415

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with (
        BlockStore.open(tiers) as store,
        LlamaCppSessions(
            store, engine, slots, weights=weights, tenant=tenant
        ) as sessions,
        SessionFront(sessions, where.host, where.port) as front,
    ):
        # Not wrapped: scripts read the port from it.
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        shown = ", ".join(map(without_password, tiers))
        console.print(
            f"serving {sessions.url} on {front.url}, sessions in {shown}; Ctrl-C ends"
        )
        await stop.wait()
