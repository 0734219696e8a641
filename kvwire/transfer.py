"""The two ends of a KV transfer as their users see them, and several ends as one.

Each object holds the state machine of its end (:mod:`kvwire.transfers`) and passes
calls on to it; it has no members but the documented ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from threading import get_ident
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvwire.aio import FORKED, AsyncWith
from kvwire.errors import UsageError, shown, wrong_type
from kvwire.kv.blocks import Blocks
from kvwire.kv.outcome import Outcome, join_outcomes
from kvwire.transfers.description import traceparent
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.outgoing import OutgoingState
from kvwire.transfers.ready_log import Which


class _Transfer:
    """Offers what both ends have. Two objects of one end are equal."""

    __slots__ = ("_state",)

    _state: OutgoingState | IncomingState

    def __repr__(self) -> str:
        end, outcome = self._state, self._state.outcome
        peers = [shown(connection.peer.name) for connection in end.connections]
        said = f"<{type(self).__name__} {end.id!r} with {', '.join(peers) or 'nobody'}"
        if outcome is not None:
            return f"{said}, over: {outcome.state}>"
        layers = f"{end.progress.landed} of {end.progress.layers} layers landed"
        return f"{said} for {end.age_s:.1f} s, {layers}: {end.waits_for}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Transfer) and self._state is other._state

    def __hash__(self) -> int:
        return hash(self._state)

    def __await__(self) -> Generator[Any, Any, Outcome]:
        if self._state.outcome is None:
            self._state.thread.check(f"await {type(self).__name__}")
        return self._state.__await__()

    @property
    def id(self) -> str | bytes | int:
        """Return the name that both applications know the transfer by."""
        return self._state.id

    @property
    def traceparent(self) -> str:
        """Return W3C's name of the trace it is in; "" if nobody traces.

        The peer's, as soon as that is known. Both ends are in one trace, unless each
        was begun in a trace of its own.
        """
        return traceparent(self._state.peer_trace or self._state.trace)

    def done(self) -> bool:
        """Tell whether the outcome is known."""
        return self._state.outcome is not None

    @property
    def outcome(self) -> Outcome | None:
        """Return the outcome, or None while it is not known."""
        return self._state.outcome

    @property
    def is_drained(self) -> bool:
        """Tell whether nothing of kvwire can touch the transfer's blocks any more."""
        return self._state.is_drained

    async def drained(self) -> None:
        """Wait until nothing of kvwire can touch the transfer's blocks any more.

        Only from here may they be used for something else. Without deadline: a timeout
        would be a guess, and memory is either free or it is not.

        Cancel safety: safe, it only watches.
        """
        if get_ident() != self._state.thread.ident:
            self._state.thread.check(f"{type(self).__name__}.drained")
        if not self._state.is_drained:
            await self._state.drained()

    def abort(self, reason: str = "aborted") -> None:
        """End the transfer; the peer learns at once. Memory is free once drained."""
        if self._state.outcome is None:
            self._state.thread.check(f"{type(self).__name__}.abort")
            self._state.abort(reason)


class Outgoing(_Transfer, AsyncWith):
    """Sends a transfer that this side produces. Made by ``publish`` and ``push``.

    Await it for its :class:`~kvwire.Outcome`: a partial or failed transfer is an
    outcome and not an exception. ``async with out:`` finishes at the end of the block,
    and aborts if the block is left by an exception. All methods belong to the loop of
    the communicator, unless they say otherwise.
    """

    __slots__ = ()

    _state: OutgoingState

    def __init__(self, state: OutgoingState) -> None:
        self._state = state

    def extend(self, blocks: Blocks) -> None:
        """Name the next blocks of a growing transfer. Thread-safe and non-blocking.

        Args:
            blocks: Their ids, or ``{group: ids}``. They follow those named before.

        Raises:
            UsageError: The transfer is not growing, they are more than ``tokens`` need,
                or one of them is out of range or named before.
        """
        self._state.thread.check_process("Outgoing.extend")
        self._state.extend(blocks)

    def ready(
        self,
        layers: Which = None,
        blocks: Which = None,
        *,
        group: str | None = None,
        after: Any = None,
    ) -> None:
        """Mark a part of the cache that will not change any more; it flows at once.

        Thread-safe and non-blocking. The memory may be neither written nor reused until
        :meth:`drained`.

        Args:
            layers: A layer by the model's index, or a slice of them; None for all.
            blocks: A position in the transfer's block list (not a block id), or a
                slice; None for all.
            group: Of a hybrid model's cache; None where there is one group.
            after: The part is ready when this is done: a future, or a torch or CuPy
                event that was recorded on the stream that writes it. The caller does
                not wait, nor does the device.

        Raises:
            UsageError: There is no such part, or it was marked before.
        """
        if self._state.thread.ident == FORKED:
            self._state.thread.check_process("Outgoing.ready")
        self._state.ready_log.add(layers, blocks, group, after)

    def finish(self, *, partial: bool = False) -> None:
        """Commit: no more marks. Thread-safe and non-blocking.

        Does nothing once the transfer is over, so a forward pass that was left early
        because of :meth:`done` need not remember that.

        Args:
            partial: Commit although parts were not marked; the outcome names them.

        Raises:
            UsageError: Parts were not marked, and ``partial`` is not set.
        """
        if self._state.thread.ident == FORKED:
            self._state.thread.check_process("Outgoing.finish")
        if self._state.outcome is None:
            self._state.ready_log.finish(partial=partial)

    def renew_lease(self) -> None:
        """Hold the blocks for a whole lease more, although a consumer is missing.

        For a producer that knows that its consumer will still come. Does nothing once
        the transfer is over.
        """
        self._state.thread.check("Outgoing.renew_lease")
        self._state.renew_lease()

    async def __aenter__(self) -> Self:
        """Return the transfer itself."""
        self._state.thread.check("async with Outgoing")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, or abort if the block was left by an exception.

        Raises:
            UsageError: Parts were not marked; the transfer is aborted.
        """
        if self._state.thread.ident == FORKED:
            return  # it is its parent's
        if kind is not None:
            self.abort(f"{kind.__name__} in the producer")
        else:
            try:
                self.finish()
            except UsageError as exc:
                self.abort(str(exc))
                raise


class Incoming(_Transfer):
    """Receives a transfer that this side consumes. Made by ``pull`` and ``expect``.

    Await it for its :class:`~kvwire.Outcome`: a partial or failed transfer is an
    outcome and not an exception. All methods belong to the loop of the communicator.
    """

    __slots__ = ()

    _state: IncomingState

    def __init__(self, state: IncomingState) -> None:
        self._state = state

    @property
    def met(self) -> bool:
        """Tell whether the peer has published or pushed it, and the two sides fit."""
        return self._state.planned

    @property
    def carries(self) -> Mapping[str, tuple[range, range]]:
        """Return the model's layers and KV heads that it brings, by group.

        Those that both sides hold; nothing before it is :attr:`met`.
        """
        groups = self._state.plan.groups if self.met else ()
        return {walk.group: (walk.layers, walk.heads) for walk in groups}

    async def layer(self, layer: int, group: str | None = None) -> None:
        """Wait until a layer of every block has landed, and may be read.

        Args:
            layer: By the model's index.
            group: Of a hybrid model's cache; None for every group that has the layer.

        Raises:
            UsageError: There is no such layer or group.
            RequestError, ConnectionClosed: The transfer ended without it, for this
                reason; the outcome says what is here. Among them RequestCancelled:
                :meth:`abort` was called. PeerCancelled: the producer ended it, or did
                not mark the layer ready. DeadlineExceeded: its deadline or its lease.
            ProfileMismatch: The two sides do not fit; names the fields.

        Cancel safety: safe, it only watches.
        """
        if get_ident() != self._state.thread.ident:
            self._state.thread.check("Incoming.layer")
        await self._state.layer(layer, group)

    def layer_event(self, layer: int, group: str | None = None) -> Any:
        """Return an event behind which a layer that has landed may be read.

        For streams of the device that the cache lies on. The layer has landed for the
        host as well, so the event has fired: it names the order for tools and for
        streams of other devices, and costs the stream that waits for it nothing.

        Returns:
            An event of the library that moves the cache: torch's or CuPy's.

        Raises:
            UsageError: There is no such layer, it has not landed, or the cache lies in
                host memory.
        """
        self._state.thread.check("Incoming.layer_event")
        return self._state.layer_event(layer, group)

    def layer_landed(self, layer: int, group: str | None = None) -> bool:
        """Tell whether a layer of every block has landed.

        Raises:
            UsageError: There is no such layer or group.
        """
        return self._state.layer_landed(layer, group)


class Joined:
    """Joins several incoming transfers of the same blocks. Made by :func:`join`.

    A tensor-parallel producer group sends each rank's heads of the same blocks; the
    consumer waits for all of them, layer by layer, and gets one outcome.
    """

    def __init__(self, parts: tuple[Incoming, ...]) -> None:
        self._parts = parts

    def __await__(self) -> Generator[Any, Any, Outcome]:
        return self._outcome().__await__()

    def done(self) -> bool:
        """Tell whether the outcome is known, which is when every part's is."""
        return all(part.done() for part in self._parts)

    @property
    def is_drained(self) -> bool:
        """Tell whether nothing of kvwire can touch the blocks any more."""
        return all(part.is_drained for part in self._parts)

    def layer_landed(self, layer: int, group: str | None = None) -> bool:
        """Tell whether a layer has landed from every producer.

        Raises:
            UsageError: There is no such layer or group.
        """
        return all(part.layer_landed(layer, group) for part in self._parts)

    async def layer(self, layer: int, group: str | None = None) -> None:
        """Wait until a layer has landed from every producer.

        Raises:
            UsageError: There is no such layer or group.
            RequestError, ConnectionClosed, ProfileMismatch: One of them ended without
                it, for this reason; the others are not waited for.

        Cancel safety: safe, it only watches.
        """
        gates = [
            asyncio.ensure_future(part.layer(layer, group)) for part in self._parts
        ]
        try:
            await asyncio.gather(*gates)
        finally:
            for gate in gates:
                gate.cancel()
            await asyncio.gather(*gates, return_exceptions=True)

    async def drained(self) -> None:
        """Wait until nothing of kvwire can touch the blocks any more.

        Cancel safety: safe, it only watches.
        """
        for part in self._parts:
            await part.drained()

    def abort(self, reason: str = "aborted") -> None:
        """End all of them."""
        for part in self._parts:
            part.abort(reason)

    async def _outcome(self) -> Outcome:
        return join_outcomes([await part for part in self._parts])


def join(*parts: Incoming) -> Joined:
    """Follow several incoming transfers of the same blocks as one.

    Raises:
        UsageError: There is none, or their block lists differ.
    """
    if not parts:
        raise UsageError("join: pass the Incoming of each producer")
    for part in parts:
        if not isinstance(part, Incoming):
            raise wrong_type("join", part, "the Incoming of a producer")
        _require_same_lists(parts[0], part)
    return Joined(parts)


def _require_same_lists(one: Incoming, another: Incoming) -> None:
    first, other = one._state, another._state  # noqa: SLF001 - of this file's class
    if first.lists.keys() != other.lists.keys():
        raise UsageError(
            f"join: {first.id!r} has the groups {', '.join(first.lists)}, "
            f"{other.id!r} has {', '.join(other.lists)}"
        )
    for group, ids in first.lists.items():
        if not np.array_equal(ids, other.lists[group]):
            raise UsageError(
                f"join: the block lists of {first.id!r} and {other.id!r} differ in "
                f"group {group!r}"
            )
