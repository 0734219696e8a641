"""Computed prompts that decode reads by ticket and then releases.

Engines negotiate nothing about such a prompt. This side only keeps its blocks until a
message frees them or their lease ends. Then the scheduler's side withdraws them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections import deque
from time import monotonic
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kvwire import Communicator, Connection
from kvwire.errors import ConnectionClosed, KVWireError
from kvwire_vllm.tickets import RELEASE_TAG

logger: logging.Logger = logging.getLogger("kvwire.vllm")


class Release(msgspec.Struct, frozen=True, array_like=True):
    """The message by which one of decode's ranks frees a prompt's blocks."""

    transfer_id: Annotated[str, Meta(max_length=256)]  # the transfer's name
    # The number of bytes that the rank has read.
    nbytes: Annotated[int, Meta(ge=0, lt=2**62)]


_DECODER: Final = msgspec.msgpack.Decoder(Release)


class PromptOffer:
    """One prompt whose blocks decode may read."""

    finished: Final = True
    quarantined: Final = False  # no link can hold its blocks

    def __init__(self, readers: int, until: float) -> None:
        self.until: float = until  # on the monotonic clock
        # Resolves once the blocks may be withdrawn, with the number of bytes that each
        # of decode's ranks has read; never fails.
        self.done: concurrent.futures.Future[list[int]] = concurrent.futures.Future()
        self._readers = readers
        self._read: list[int] = []

    def released(self, nbytes: int) -> bool:
        """Record a rank's release; return whether all ranks have released it."""
        self._read.append(nbytes)  # bounded: decode's ranks
        if len(self._read) < self._readers:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Release the blocks."""
        # The lease may end on the engine's thread just as a message arrives.
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.done.set_result(self._read)

    def abort(self, reason: str) -> bool:
        """End the offer; return False, since no link holds its blocks."""
        self.end()
        return False


class PromptOffers:
    """A worker's prompts that decode may read.

    Args:
        lease_s: How long blocks are kept for decode.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        # By the transfer's name; in the order in which their leases end.
        self._offers: dict[str, PromptOffer] = {}
        self._leases: deque[tuple[str, PromptOffer]] = deque()

    def add(self, transfer_id: str, readers: int) -> PromptOffer:
        """Keep a prompt until all `readers` have released it, or its lease ends."""
        offer = PromptOffer(readers, monotonic() + self._lease_s)
        self._offers[transfer_id] = offer  # bounded: blocks of the engine
        self._leases.append((transfer_id, offer))
        return offer

    def end_leases(self) -> None:
        """End the expired leases."""
        leases = self._leases
        while leases and (leases[0][1].done.done() or leases[0][1].until < monotonic()):
            transfer_id, offer = leases.popleft()
            self._offers.pop(transfer_id, None)
            offer.end()

    async def serve(self, communicator: Communicator) -> None:
        """Handle the messages that free prompts.

        Cancel safety: safe; it is cancelled with its loop.
        """
        async with asyncio.TaskGroup() as tasks:
            async for connection in communicator.connections():
                tasks.create_task(self._listen(connection))

    async def _listen(self, connection: Connection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                message = await connection.recv(RELEASE_TAG)
                try:
                    release = _DECODER.decode(message)
                except msgspec.MsgspecError as exc:
                    logger.warning("ignored a peer's message: %s", exc)
                    continue
                offer = self._offers.get(release.transfer_id)
                if offer is not None and offer.released(release.nbytes):
                    self._offers.pop(release.transfer_id, None)


def release(connection: Connection, transfer_id: str, nbytes: int) -> None:
    """Free a prompt's blocks at the other end of a connection, without an answer."""
    message = msgspec.msgpack.encode(Release(transfer_id, nbytes))
    with contextlib.suppress(KVWireError):  # without this message, the lease ends it
        connection.send(RELEASE_TAG, message)
