"""The source of a migration: the engine that a request leaves.

A migration has three stages, and a failure has a different effect in each:

* *copying*: the request runs. After a failure it continues.
* *paused*: the last blocks are being copied. After a failure the request is resumed.
* *handed over*: the handover was sent, so this engine never goes on with the request,
  even if no answer comes. It gets the request back only if the target answers that it
  has not taken it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from time import monotonic
from typing import Any, Final, Literal, Protocol

import msgspec

from kvwire import Connection, Outgoing
from kvwire.errors import KVWireError, UsageError, shown
from kvwire.kv.paged import PagedCache
from kvwire.migration.messages import (
    MIGRATION_ROUNDS_MAX,
    MIGRATION_STATE_BYTES_MAX,
    MIGRATION_TAG,
    MOVE_BYTES,
    Handover,
    Message,
    Round,
    Withdrawal,
    decode,
    transfer_id,
)

# Rounds of copying while the request continues. A round takes a fraction of the one
# before, so four leave a block or less, unless the wire is slower than the engine.
MIGRATION_ROUNDS: Final = 8
# A prompt of 10 GB takes 10 s at 1 GB/s.
MIGRATION_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Written:
    """The part of a request whose KV is written.

    Attributes:
        blocks: Its blocks, in token order; blocks after ``tokens`` may be left out.
        tokens: The number of tokens whose KV is in them, in every layer.
    """

    blocks: Sequence[int]
    tokens: int


class RunningRequest(Protocol):
    """The interface by which :func:`migrate` controls a request of the engine.

    All methods are called on the communicator's loop. Until :func:`migrate` has
    returned, the engine keeps the request's blocks, even if the request ends meanwhile.
    """

    @property
    def name(self) -> str:
        """Return the request's name, the same at both engines."""

    @property
    def cache(self) -> PagedCache:
        """Return the cache that holds its blocks; it has one group."""

    def written(self) -> Written | None:
        """Return the part written so far; None if the request has ended."""

    async def pause(self) -> None:
        """Wait until the running step has ended, and start no further step.

        Cancel safety: the request goes on, or :meth:`resume` is called.
        """

    def resume(self) -> None:
        """Continue, because the request stays here."""

    def state(self) -> bytes:
        """Return the state that the target needs besides KV; called while paused."""

    def release(self) -> None:
        """Drop the request, which now belongs to the target, and free its blocks."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The result of a migration.

    Attributes:
        result: ``"moved"``: the request belongs to the other engine. ``"stayed"``: it
            continues here. ``"unknown"``: it was handed over and no answer came, so
            either the other engine has it or it is lost.
        reason: Why it did not move; empty if it did.
        rounds: Rounds of copying, the last one included.
        nbytes: Bytes of KV that were copied.
        paused_s: Seconds from the pause until the target's answer or the resume.
    """

    result: Literal["moved", "stayed", "unknown"]
    reason: str = ""
    rounds: int = 0
    nbytes: int = 0
    paused_s: float = 0.0


async def migrate(
    connection: Connection,
    request: RunningRequest,
    *,
    timeout_s: float = MIGRATION_TIMEOUT_S,
    rounds: int = MIGRATION_ROUNDS,
) -> Migration:
    """Move a running request to the engine at the other end of a connection.

    The other engine must serve the connection with a :class:`MigrationTarget`. Whatever
    the result, the blocks must not be reused before this has returned.

    Args:
        connection: The connection to the other engine.
        request: The request to move.
        timeout_s: Time limit; after it the request stays.
        rounds: The maximum number of copying rounds while the request continues.

    Raises:
        UsageError: The cache has several groups, or an argument is out of range.

    Cancel safety: before the handover the request stays and continues. After it, the
        answer is not awaited, and the request is released.
    """
    if len(request.cache.groups) != 1:
        raise UsageError(
            f"migrate: the cache has the groups {', '.join(request.cache.groups)}; "
            "requests of hybrid models cannot be moved yet"
        )
    whole = isinstance(rounds, Integral)
    if not (whole and 1 <= rounds < MIGRATION_ROUNDS_MAX):
        raise UsageError(
            f"migrate: rounds={rounds!r}; pass 1 to {MIGRATION_ROUNDS_MAX - 1}"
        )
    number = isinstance(timeout_s, Real)
    if not (number and timeout_s > 0):
        raise UsageError(f"migrate: timeout_s={timeout_s!r}; pass more than 0")
    move = _Move(connection, request)
    try:
        async with asyncio.timeout(timeout_s):
            await move.run(rounds)
    except TimeoutError:
        move.reason = f"it took longer than timeout_s={timeout_s:g}"
    except (_StaysError, KVWireError) as exc:
        move.reason = str(exc)
    finally:
        # Blocks must drain even if this task is cancelled again.
        await asyncio.shield(asyncio.ensure_future(move.settle()))
    return move.outcome()


class _StaysError(Exception):
    """Contains the reason why the request stays."""


_Place = Literal["copying", "paused", "handed over", "moved"]
_RESULTS: Final[dict[_Place, Literal["moved", "stayed", "unknown"]]] = {
    "copying": "stayed",
    "paused": "stayed",
    "handed over": "unknown",
    "moved": "moved",
}


class _Move:
    def __init__(self, connection: Connection, request: RunningRequest) -> None:
        self.reason = ""
        self._connection = connection
        self._request = request
        self._move = os.urandom(MOVE_BYTES)
        self._reply = int.from_bytes(os.urandom(8), "big") >> 1
        self._answer: asyncio.Future[bytearray] = asyncio.ensure_future(
            connection.recv(self._reply)
        )
        self._parts: list[Outgoing] = []
        self._blocks = 0
        self._nbytes = 0
        self._paused_at = 0.0
        self._paused_s = 0.0
        self._place: _Place = "copying"

    async def run(self, rounds: int) -> None:
        """Copy, pause, copy the rest, hand over, and wait for the answer."""
        size = self._request.cache.spec.block_tokens
        for _ in range(rounds):
            full = self._written().tokens // size
            if full - self._blocks <= 1 and self._parts:
                break
            if full > self._blocks:
                await self._copy(full * size)
        self._place = "paused"
        self._paused_at = monotonic()
        await self._request.pause()
        tokens = self._written().tokens
        if tokens < max(1, self._blocks * size):
            # Without a round, the target would not know what is handed over.
            raise _StaysError(
                f"{tokens} of its tokens are written, and {self._blocks * size} were "
                "copied"
            )
        if tokens > self._blocks * size:
            await self._copy(tokens)
        state = self._request.state()
        if len(state) > MIGRATION_STATE_BYTES_MAX:
            raise _StaysError(
                f"its state has {len(state)} bytes; at most "
                f"{MIGRATION_STATE_BYTES_MAX} are allowed"
            )
        await self._hand_over(state)

    async def _copy(self, tokens: int) -> None:
        """Push the blocks that were not copied yet, up to a number of tokens."""
        request = self._request
        size = self._request.cache.spec.block_tokens
        first = self._blocks
        index = len(self._parts)
        blocks = self._written().blocks[first : -(-tokens // size)]
        tokens -= first * size
        body = _body(
            Round(
                self._move,
                request.name,
                self._reply,
                index,
                len(blocks),
                tokens,
                size,
            )
        )
        self._connection.send(MIGRATION_TAG, body)
        name = transfer_id(self._move, index)
        part = self._connection.push(name, request.cache, blocks, tokens=tokens)
        self._parts.append(part)
        part.ready()
        part.finish()
        over = asyncio.ensure_future(part)
        either: set[asyncio.Future[Any]] = {over, self._answer}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if self._answer.done():
            raise _StaysError(_refusal(await self._answer))
        outcome = await part
        if not outcome.complete:
            raise _StaysError(
                f"its KV did not arrive: {'; '.join(outcome.missing.reasons)}"
            )
        self._blocks += len(blocks)
        self._nbytes += outcome.nbytes

    async def _hand_over(self, state: bytes) -> None:
        if self._answer.done():
            raise _StaysError(_refusal(await self._answer))
        body = _body(Handover(self._move, state))
        self._place = "handed over"
        self._connection.send(MIGRATION_TAG, body)
        answer = await self._answer
        if answer:
            self._place = "paused"
            raise _StaysError(_refusal(answer))
        self._place = "moved"

    async def settle(self) -> None:
        """Resume or release the request; return when its blocks have drained."""
        moving = self._place in {"handed over", "moved"}
        if self._paused_at:
            self._paused_s = monotonic() - self._paused_at
        try:
            if not moving:
                self._stay()
        finally:
            if not self._answer.done():
                self._answer.cancel()
            await asyncio.gather(
                *(part.drained() for part in self._parts),
                self._answer,
                return_exceptions=True,
            )
            # An answer that arrives later is dropped.
            self._connection.discard(self._reply)
        if moving:
            self._request.release()

    def _stay(self) -> None:
        for part in self._parts:
            part.abort("the migration has ended")
        self._connection.send(MIGRATION_TAG, _body(Withdrawal(self._move)))
        if self._place == "paused":
            # The request may now write to a block that an aborted transfer still reads.
            # The data read by that transfer is never used.
            self._request.resume()

    def outcome(self) -> Migration:
        """Return the result, after :meth:`settle`."""
        result = _RESULTS[self._place]
        return Migration(
            result, self.reason, len(self._parts), self._nbytes, self._paused_s
        )

    def _written(self) -> Written:
        written = self._request.written()
        if written is None:
            raise _StaysError("the request has ended")
        return written


def _body(message: Message) -> bytes:
    """Return the bytes of a message, which the target can read.

    Raises:
        _StaysError: It could not read them, and would ignore the message.
    """
    try:
        body = msgspec.msgpack.encode(message)
        decode(body)
    except (TypeError, UnicodeEncodeError, msgspec.MsgspecError) as exc:
        raise _StaysError(f"what the engine gave cannot be sent: {exc}") from None
    return body


def _refusal(answer: bytearray) -> str:
    return f"the other engine: {shown(answer.decode(errors='replace'))}"
