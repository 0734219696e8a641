"""Named buffers that other processes fetch: the transport's core, without Ray.

The owner *offers* a buffer under a name, which moves nothing. A fetcher requests it by
name, gets a grant for its memory, and reads it with a single get, even if the buffer
has many pieces. *Withdrawing* an offer ends its grants and waits until nothing can
touch its memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.directory.dialable import check_dialable
from kvwire.kv.fragments import Fragments

Bytes = npt.NDArray[np.uint8]

# All questions have the same tag; each question contains the tag of its answer.
_ASK: Final = 1
_ANSWERS: Final = 16
# Ray's ids are 56 characters.
_NAME_CHARACTERS_MAX: Final = 256


class _Ask(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=_NAME_CHARACTERS_MAX)]
    tag: Annotated[int, msgspec.Meta(ge=_ANSWERS, lt=2**62)]


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    grant: bytes = b""  # empty if there is no such offer


_ASKS: Final = msgspec.msgpack.Decoder(_Ask)
_ANSWER: Final = msgspec.msgpack.Decoder(_Answer)


@dataclass(slots=True)
class _Offer:
    buffers: Sequence[Bytes]
    region: kvwire.Region | None = None  # set by the first question


class NoSuchOffer(kvwire.RequestError):
    """Reports that no buffer is offered under this name, or no longer."""


class FetchAborted(kvwire.RequestError):
    """Reports that a fetch was aborted on this side."""


class TensorExchange:
    """Offers buffers and fetches other processes' buffers, from any thread."""

    def __init__(self, listen: str = "127.0.0.1:0", **options: Any) -> None:
        self._engine = kvwire.Engine(**options)
        self._offers: dict[str, _Offer] = {}  # bounded: what the user holds
        # The running fetches by name; used on the loop only.
        self._fetching: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)
        self._tags = itertools.count(_ANSWERS)
        try:
            bound = self._engine.listen(listen)
            check_dialable(bound)
        except BaseException:
            self._engine.close()
            raise
        self.address: str = str(bound)  # for other processes
        self._serving = self._engine.start(self._serve(self._engine.communicator))

    # --- the owner's side -------------------------------------------------------------

    def offer(self, name: str, buffers: Sequence[Bytes]) -> None:
        """Let others fetch these bytes, which must not change until ``withdraw``.

        Offering a name again changes nothing.
        """
        self._offers.setdefault(name, _Offer([one for one in buffers if one.size]))

    def withdraw(self, name: str) -> None:
        """End an offer, and wait until nothing can touch its memory.

        Gets that are still running at other processes fail.
        """

        async def end() -> None:
            # On the loop, so that no question can be between finding the offer and
            # granting it.
            offer = self._offers.pop(name, None)
            if offer is not None and offer.region is not None:
                await offer.region.close()

        if name in self._offers:
            self._engine.run(end())

    async def _serve(self, comm: kvwire.Communicator) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for connection in comm.connections():
                tasks.create_task(self._answer(comm, connection))

    async def _answer(
        self, comm: kvwire.Communicator, connection: kvwire.Connection
    ) -> None:
        try:
            while True:
                ask = _ASKS.decode(await connection.recv(_ASK))
                answer = _Answer(self._grant(comm, connection, ask.name))
                await connection.send(ask.tag, msgspec.msgpack.encode(answer))
        except kvwire.ConnectionClosed:
            pass  # the fetcher asks again on a new connection
        except Exception as exc:  # noqa: BLE001 - one peer's question ends no other's
            connection.abort(f"not a question of TensorExchange: {exc}")

    def _grant(
        self, comm: kvwire.Communicator, connection: kvwire.Connection, name: str
    ) -> bytes:
        offer = self._offers.get(name)
        if offer is None:
            return b""
        if offer.region is None:
            offer.region = comm.register(_memory_of(offer.buffers), "read")
        return offer.region.grant(connection).to_bytes()

    # --- the fetcher's side -----------------------------------------------------------

    def fetch(
        self, address: str, name: str, into: Sequence[Bytes]
    ) -> concurrent.futures.Future[None]:
        """Start reading another process's offer.

        Args:
            address: The address on which the other exchange listens.
            name: The offer's name.
            into: Pieces of any size, with as many bytes in total as the offer. They
                belong to
                the fetch until the future is done, even if it fails.

        Returns:
            A future; it fails with the errors of :meth:`kvwire.Connection.get`, or with
            ConnectError, :exc:`NoSuchOffer` or :exc:`FetchAborted`. To stop it, call
            :meth:`abort`; cancelling the future would not wait for the memory.
        """
        pieces = [one for one in into if one.size]
        return self._engine.start(
            self._fetch(self._engine.communicator, address, name, pieces)
        )

    def abort(self, name: str) -> None:
        """Abort all fetches under a name; their futures end with FetchAborted."""

        async def end() -> None:
            for task in self._fetching.get(name, ()):
                task.cancel()

        self._engine.run(end())

    async def _fetch(
        self,
        comm: kvwire.Communicator,
        address: str,
        name: str,
        into: Sequence[Bytes],
    ) -> None:
        if not into:
            return
        task = asyncio.current_task()
        assert task is not None
        self._fetching[name].add(task)
        try:
            connection = await comm.peer(address).connect()
            grant = await self._ask(connection, address, name)
            request = connection.get(grant, _memory_of(into))
            try:
                await request
            finally:
                request.cancel()
                await request.released()
        except asyncio.CancelledError:
            raise FetchAborted(
                f"the fetch of {name} from {address} was aborted"
            ) from None
        finally:
            self._fetching[name].discard(task)
            if not self._fetching[name]:
                del self._fetching[name]

    async def _ask(
        self, connection: kvwire.Connection, address: str, name: str
    ) -> kvwire.Grant:
        ask = _Ask(name, next(self._tags))
        answering = connection.recv(ask.tag)
        try:
            await connection.send(_ASK, msgspec.msgpack.encode(ask))
            answer = _ANSWER.decode(await answering)
        finally:
            answering.cancel()
        if not answer.grant:
            raise NoSuchOffer(f"{address} offers no {name}: its owner has freed it")
        return kvwire.Grant.from_bytes(answer.grant)

    # --- the end ----------------------------------------------------------------------

    def close(self) -> None:
        """End all offers and fetches; then only the caller can touch the memory."""
        self._engine.close()
        self._offers.clear()
        with contextlib.suppress(kvwire.KVWireError, concurrent.futures.CancelledError):
            self._serving.result()


def _memory_of(buffers: Sequence[Bytes]) -> Fragments:
    """Return pieces as one memory, for a single request."""
    addresses = [one.__array_interface__["data"][0] for one in buffers]
    return Fragments(
        np.array(addresses, np.uint64),
        np.array([one.nbytes for one in buffers], np.uint64),
        owner=buffers,
        writable=all(one.flags.writeable for one in buffers),
    )
