"""Receives the messages of a tag one after the other, without a task for each.

A server or client that answers small messages spends more time on waking a task for
each of them than on the message. So the function gets each message in the callback in
which its last byte arrives, and what it sends leaves in the same turn of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvwire.aio import LoopThread
from kvwire.errors import KVWireError
from kvwire.proto.records import RequestRecord

MessageAct = Callable[[memoryview], bool]
"""Acts on a message; returns whether the next one may come."""


class SinkOwner(Protocol):
    """The part of a connection that a sink uses."""

    @property
    def _thread(self) -> LoopThread:
        """The loop and thread on which it may be used."""

    def _post_sink(self, sink: MessageSink, tag: int) -> None:
        """Post the receive of the next message, and then act on present ones."""

    def _withdraw_sink(self, record: RequestRecord) -> None:
        """Withdraw a receive that has no message yet."""


class MessageSink:
    """One receive of a tag, which stays posted while messages are small.

    A large message ends it, and so does one that had arrived before; then it is posted
    again.

    Attributes:
        posted: The receive, while it is posted.
        over: Set when the function wants no more messages; or has the error of the
            connection, of a message, or of the function.
    """

    # It has no memory of its own for the message: see Request.
    _memory = None

    def __init__(self, connection: SinkOwner, tag: int, act: MessageAct) -> None:
        self._connection = connection
        self._tag = tag
        self._act = act
        self.posted: RequestRecord | None = None
        self.over = connection._thread.loop.create_future()

    def post(self) -> None:
        """Receive messages; the driver runs after this."""
        try:
            self._connection._post_sink(self, self._tag)
        except KVWireError as exc:
            self._end(exc)

    def close(self) -> None:
        """Receive no more."""
        posted = self.posted
        self.posted = None
        if posted is not None:
            self._connection._withdraw_sink(posted)

    def _complete(self, data: Any, error: KVWireError | None) -> None:
        """Act on a message, or on the error of a receive; see Request."""
        closed = self.posted is None
        self.posted = None
        if data is None:
            if not closed:
                self._end(error)
            return
        self._arrived(memoryview(data))
        if not (closed or self.over.done()):
            self.post()

    def _arrived(self, message: memoryview) -> None:
        """Act on a message; the receive may still be posted."""
        # Also if the wait was cancelled in this turn, or the message would be lost.
        try:
            if self._act(message):
                return
        except Exception as exc:  # noqa: BLE001 - raised where the sink is awaited
            self._end(exc)
        else:
            self._end(None)
        self.close()

    def _end(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


async def each_message(connection: SinkOwner, tag: int, act: MessageAct) -> None:
    """Call a function with each message of a tag, in the callback in which it arrives.

    Args:
        connection: The connection.
        tag: The messages' tag, which nothing else receives meanwhile.
        act: Gets each message. If it returns False, no further one is received, and
            this returns. It may send: its messages leave in the same turn of the loop.
            It cannot discard the tag, which is being received.

    Raises:
        KVWireError: As for :meth:`Connection.recv`; or what the function raised.

    Cancel safety: safe, a message of the same turn is still acted on, and later ones
    wait for another receive; only a large message that is arriving at this moment is
    dropped.
    """
    sink = MessageSink(connection, tag, act)
    sink.post()
    try:
        await sink.over
    finally:
        sink.close()
