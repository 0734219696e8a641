"""The target of a migration: the engine that receives requests."""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvwire import Communicator, Connection, Incoming
from kvwire.aio import start_task
from kvwire.errors import ConnectionClosed, UsageError, shown
from kvwire.kv.paged import PagedCache
from kvwire.migration.messages import (
    MIGRATION_TAG,
    Handover,
    Message,
    Round,
    Withdrawal,
    decode,
    transfer_id,
)

# Requests that arrive over one connection at once; each may hold blocks of the engine.
MIGRATIONS_MAX: Final = 256

logger = logging.getLogger("kvwire.migration")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has arrived, and belongs to this engine from now on.

    Attributes:
        name: Its name, the same at both engines.
        blocks: Its blocks, in token order; the engine returns them to its pool.
        tokens: The number of tokens whose KV is in them.
        state: The other engine's state for it.
    """

    name: str
    blocks: tuple[int, ...]
    tokens: int
    state: bytes


class MigrationTarget:
    """Receives requests that other engines move here.

    A peer that may migrate to this engine can take its blocks and start requests, so
    serve only connections within your own trust domain.

    Args:
        communicator: This engine's communicator.
        cache: The cache that receives requests; it has one group.
        take: Called with a number of blocks; returns their ids, or None if too few are
            free. After None or an exception the request stays at its source.
        give_back: Called with taken blocks that are not needed, once nothing can touch
            them any more.
        start: Called with a request that has arrived. It must return soon, since the
            source waits for it. If it raises, the request is refused and continues at
            its source.

    Raises:
        UsageError: The cache has several groups.
    """

    def __init__(
        self,
        communicator: Communicator,
        cache: PagedCache,
        *,
        take: Callable[[int], Sequence[int] | None],
        give_back: Callable[[Sequence[int]], None],
        start: Callable[[Arrival], None],
    ) -> None:
        if len(cache.groups) != 1:
            raise UsageError(
                "MigrationTarget: the cache has the groups "
                f"{', '.join(cache.groups)}; requests of hybrid models cannot be "
                "moved yet"
            )
        self._communicator = communicator
        self._cache = cache
        self._take = take
        self._give_back = give_back
        self._start = start

    async def serve(self, connection: Connection) -> None:
        """Receive requests over one connection until it ends.

        Cancel safety: safe. Requests that were not handed over stay where they are;
            their blocks are given back once they have drained.
        """
        arriving: dict[bytes, _Arriving] = {}
        # Handovers in progress, and blocks that are draining.
        tasks: set[asyncio.Task[None]] = set()

        def run(move: bytes, message: Message) -> None:
            task = start_task(self._act(connection, arriving, move, message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        try:
            while True:
                raw = await connection.recv(MIGRATION_TAG)
                try:
                    message = decode(raw)
                except msgspec.MsgspecError as exc:
                    peer = shown(connection.peer.name)
                    logger.warning("ignored a message from %s: %s", peer, exc)
                    continue
                match message:
                    case Round():
                        self._expect(connection, arriving, message, run)
                    case Handover() | Withdrawal():
                        run(message.move, message)
        except ConnectionClosed:
            pass
        finally:
            for move in list(arriving):
                if not arriving[move].handed_over:
                    run(move, Withdrawal(move))
            while tasks:
                # Not `gather`: since Python 3.12 it finishes at once if all its tasks
                # are done, and they would never get the loop turn that forgets them.
                await asyncio.wait(tasks)

    def _expect(
        self,
        connection: Connection,
        arriving: dict[bytes, _Arriving],
        message: Round,
        run: Callable[[bytes, Message], None],
    ) -> None:
        """Allocate memory for a round, or refuse the request."""
        move = message.move
        if message.index == 0 and move not in arriving:
            arriving[move] = _Arriving(message.request, message.reply)
        request = arriving.get(move)
        if request is None or request.handed_over:
            return  # it was refused, and its source will soon notice
        reason = self._why_not(message, request, len(arriving))
        if not reason:
            try:
                self._receive(message, request)
                return
            except UsageError as exc:
                reason = str(exc)
        _answer(connection, request.reply, reason)
        run(move, Withdrawal(move))

    def _receive(self, message: Round, request: _Arriving) -> None:
        """Allocate blocks for a round, and expect its transfer into them."""
        try:
            taken = self._take(message.blocks)
            blocks = None if taken is None else [*map(operator.index, taken)]
        except Exception as exc:
            logger.warning(
                "found no free blocks for %s", shown(request.name), exc_info=True
            )
            raise UsageError(f"{type(exc).__name__}: {exc}") from None
        if blocks is None:
            raise UsageError(
                f"{message.blocks} more blocks are needed, and fewer are free"
            )
        request.blocks += blocks
        request.tokens += message.tokens
        name = transfer_id(message.move, message.index)
        request.parts.append(
            self._communicator.expect(name, self._cache, blocks, tokens=message.tokens)
        )

    def _why_not(self, message: Round, request: _Arriving, arriving: int) -> str:
        size = self._cache.spec.block_tokens
        if arriving > MIGRATIONS_MAX:
            return f"{MIGRATIONS_MAX} requests are on their way here already"
        if message.block_tokens != size:
            return f"block_tokens: {message.block_tokens} at the source, {size} here"
        if message.index != len(request.parts) or request.tokens % size:
            return f"round {message.index} came out of turn"
        if -(-message.tokens // size) != message.blocks:
            return f"{message.tokens} tokens are not in {message.blocks} blocks"
        return ""

    async def _act(
        self,
        connection: Connection,
        arriving: dict[bytes, _Arriving],
        move: bytes,
        message: Message,
    ) -> None:
        """Start a request that was handed over, or drop one that stays."""
        request = arriving.get(move)
        if request is None or request.handed_over:
            return
        request.handed_over = True
        reason = "withdrawn"
        if isinstance(message, Handover):
            reason = await self._begin(request, message.state)
            _answer(connection, request.reply, reason)
        if reason:
            for part in request.parts:
                part.abort(reason)
            for part in request.parts:
                await part.drained()
            self._give_back(request.blocks)
        del arriving[move]

    async def _begin(self, request: _Arriving, state: bytes) -> str:
        """Start a request; return the reason if that failed, or ""."""
        for part in request.parts:
            outcome = await part
            if not outcome.complete:
                return f"its KV: {'; '.join(outcome.missing.reasons)}"
            await part.drained()
        try:
            self._start(
                Arrival(request.name, tuple(request.blocks), request.tokens, state)
            )
        except Exception as exc:
            logger.warning("could not start %s", shown(request.name), exc_info=True)
            return f"{type(exc).__name__}: {exc}"
        return ""


@dataclass(slots=True)
class _Arriving:
    """A request whose KV is still arriving."""

    name: str  # the request's name
    reply: int  # tag of the answer
    blocks: list[int] = field(default_factory=list)  # blocks taken for it
    tokens: int = 0  # tokens of its rounds so far
    parts: list[Incoming] = field(default_factory=list)  # the transfers of its rounds
    # Set once it is being started or dropped; its other messages are then ignored.
    handed_over: bool = False


# A source shows less of a reason than this.
_REASON_BYTES = 1024


def _answer(connection: Connection, reply: int, reason: str) -> None:
    connection.send(reply, reason.encode()[:_REASON_BYTES])
