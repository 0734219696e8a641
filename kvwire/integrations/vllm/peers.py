"""One connection to each peer, dialled when it is first needed and by nobody twice."""

from __future__ import annotations

import asyncio

from kvwire import Communicator, Connection


class Peers:
    """Keeps the connections that a worker has opened, by address, on one loop.

    Args:
        communicator: Whose they are.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._dials: dict[str, asyncio.Future[Connection]] = {}

    async def connection(self, address: str) -> Connection:
        """Return the connection to an address; the first caller dials it.

        Raises:
            KVWireError: As :meth:`kvwire.Communicator.connect`. The next call
                dials again.

        Cancel safety: safe; the dialling goes on for whoever else waits.
        """
        dial = self._dials.get(address)
        if dial is None or _useless(dial):
            dial = asyncio.ensure_future(self._communicator.connect(address))
            self._dials[address] = dial  # bounded by the engines of a deployment
        return await asyncio.shield(dial)


def _useless(dial: asyncio.Future[Connection]) -> bool:
    """Tell whether it failed, or what it made has ended since."""
    if not dial.done():
        return False
    return dial.cancelled() or dial.exception() is not None or dial.result().closed
