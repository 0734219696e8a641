"""Connections to peers, each dialled once, and the base of a prompt's two ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from kvwire import (
    Communicator,
    Connection,
    Engine,
    Incoming,
    Outgoing,
    PagedCache,
    RemoteWindow,
)
from kvwire_vllm.metadata import PromptTransfer
from kvwire_vllm.tickets import WINDOW
from kvwire_vllm.topology import RankRoute

P = TypeVar("P", Outgoing, Incoming)


class Peers:
    """A worker's outgoing connections by address, all on one loop."""

    def __init__(self) -> None:
        self._dials: dict[str, asyncio.Future[Connection]] = {}
        self._windows: WeakKeyDictionary[Connection, asyncio.Future[RemoteWindow]] = (
            WeakKeyDictionary()
        )

    async def connection(self, communicator: Communicator, address: str) -> Connection:
        """Return the connection to an address; the first caller dials it.

        Cancel safety: safe; the dialling goes on for other callers.
        """
        dial = self._dials.get(address)
        if dial is None or _useless(dial):
            # Requests may name any number of addresses where nothing listens.
            kept = {at: one for at, one in self._dials.items() if not _useless(one)}
            dial = asyncio.ensure_future(communicator.connect(address))
            self._dials = {**kept, address: dial}
        return await asyncio.shield(dial)

    async def window(self, connection: Connection) -> RemoteWindow:
        """Return the window of the worker at the other end; the first caller opens it.

        Raises:
            KVWireError: The worker has no window, or the connection has ended.

        Cancel safety: safe; the opening goes on for other callers.
        """
        opening = self._windows.get(connection)
        if opening is None or (opening.done() and opening.exception() is not None):
            opening = asyncio.ensure_future(connection.window(WINDOW))
            self._windows[connection] = opening
        return await asyncio.shield(opening)


def _useless(dial: asyncio.Future[Connection]) -> bool:
    """Return whether dialling has failed, or the connection has ended since."""
    if not dial.done():
        return False
    return dial.cancelled() or dial.exception() is not None or dial.result().closed


class PromptEnd(Generic[P]):
    """The common base of a prompt's sender and receiver."""

    def __init__(self, engine: Engine, cache: PagedCache, route: RankRoute) -> None:
        self._engine = engine
        self._cache = cache
        self._route = route
        self._lock = threading.Lock()
        self._parts: Sequence[P] = ()
        self._begun = False
        self.reason = ""  # why it was aborted

    @property
    def quarantined(self) -> bool:
        """Whether it has ended, but a link may still touch its blocks."""
        return any(part.done() and not part.is_drained for part in self._parts)

    def abort(self, reason: str) -> bool:
        """Abort without waiting; return whether a link may have touched its blocks.

        If so, the blocks are free when ``done`` is set; if not, they are free now.
        """
        with self._lock:
            self.reason = reason
            begun = self._begun
        if begun:
            self._engine.start(self._abort())
        return begun

    def _follow(self, prompt: PromptTransfer) -> None:
        """Attach this task's transfers to the request's span."""
        if prompt.traceparent:
            try:
                from kvwire.observe.opentelemetry import (  # noqa: PLC0415 - an extra
                    follow,
                )
            except ImportError:
                return  # a broken tracer must not cost a transfer
            follow(prompt.traceparent)

    async def _abort(self) -> None:
        for part in self._parts:
            part.abort(self.reason or "not wanted any more")
