"""What judges a side under test, be it of a link or of a lane.

A witness holds every callback against what both contracts share: on the loop's thread,
not from inside a call unless that call may call back, never before the beginning, and
nothing after the end; each token given back once; no byte wrong, and none written
beside its destination. What is wrong goes to :attr:`Verdicts.found` and fails the check
that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from kvwire.testing.conformance.content import Cut, Memory, pattern


class Verdicts:
    """Broken promises found outside the check's own coroutine, and a wake-up for it.

    Attributes:
        found: What was wrong, first things first.
        inside: Calls and callbacks of all sides on this loop under way, the innermost
            last: what one link calls from inside a call to another re-enters as well.
        changed: Called after every callback.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.inside: list[tuple[object, str]] = []
        self.changed: Callable[[], None] = lambda: None

    def add(self, text: str) -> None:
        """Note a broken promise."""
        self.found.append(text)
        self.changed()


class Token:
    """What a payload is sent with. Backends must give it back and not look at it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: int, memory: Memory | None) -> None:
        self.number = number
        self.memory = memory

    def __repr__(self) -> str:
        return f"the token of payload {self.number}"

    def __eq__(self, other: object) -> bool:
        raise TypeError("a token belongs to the handler; compare it with `is`")


class Witness:
    """One side of what is under test.

    Args:
        name: For messages.
        subject: The link or the lane.
        verdicts: Where broken promises go.

    Attributes:
        begun: Callbacks may come: the link was started, or the lane has joined.
        arrived: Numbers of what arrived as it was sent, in order.
        sent: Tokens given back, in order.
        writable: How often it said that it is writable.
        closed: What the last callback was told; one entry in the end.
        on_sent: Called when a token has been given back.
        on_writable: Called when it is writable.
        on_closed: Called when it has closed.
    """

    kind: ClassVar[str]
    """What is under test: "link" or "lane"."""
    begins_with: ClassVar[str]
    """The call before which there are no callbacks."""
    within_flush: ClassVar[frozenset[str]]
    """The callbacks that may come from inside a flush of the same side."""

    def __init__(self, name: str, subject: Any, verdicts: Verdicts) -> None:
        self.name = name
        self.begun = False
        self.arrived: list[int] = []
        self.sent: list[Token] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self.on_sent: Callable[[Token], None] = nothing
        self.on_writable: Callable[[], None] = nothing
        self.on_closed: Callable[[], None] = nothing
        self._subject = subject
        self._verdicts = verdicts
        self._thread = threading.get_ident()
        self._next_number = 0
        self._lent: list[Token] = []
        self._aborted = False

    @property
    def lent(self) -> int:
        """Tokens that have not been given back."""
        return len(self._lent)

    @property
    def received_bytes(self) -> int:
        """Bytes that have come in, as the link or the lane says."""
        count: int = self._subject.received_bytes
        return count

    def forget(self) -> None:
        """Let go of what was lent and will not be given back."""
        self._lent.clear()

    def wrong(self, text: str) -> None:
        """Note a promise that this side saw broken."""
        self._verdicts.add(f"{self.name}: {text}")

    # --- what a check does ------------------------------------------------------------

    def queue(self, length: int, cut: Cut | None = None) -> Token:
        """Send ``length`` pseudo-random bytes, without a flush."""
        raise NotImplementedError

    def send(self, length: int, cut: Cut | None = None) -> Token:
        """Send ``length`` pseudo-random bytes, and flush."""
        raise NotImplementedError

    def queue_many(
        self, count: int, length: int, cut: Cut | None = None
    ) -> list[Token]:
        """Call :meth:`queue` so many times."""
        return [self.queue(length, cut) for _ in range(count)]

    def send_many(self, count: int, length: int, cut: Cut | None = None) -> list[Token]:
        """Call :meth:`send` so many times."""
        return [self.send(length, cut) for _ in range(count)]

    def flush(self) -> None:
        """Flush the subject."""
        with self._calling("flush"):
            self._subject.flush()

    def close(self) -> None:
        """Close the subject."""
        with self._calling("close"):
            self._subject.close()

    def abort(self) -> None:
        """Abort the subject."""
        self._aborted = True
        with self._calling("abort"):
            self._subject.abort()

    # --- for the side -----------------------------------------------------------------

    def _number(self, number: int | None) -> int:
        """Return the next payload's number; by default one more than of the last."""
        number = self._next_number if number is None else number
        self._next_number = number + 1
        return number

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        """Note a call to the subject."""
        self._verdicts.inside.append((self, what))
        try:
            yield
        finally:
            self._verdicts.inside.pop()

    @contextmanager
    def _told(self, what: str, subject: object) -> Iterator[None]:
        """Judge a callback of the subject."""
        inside = self._verdicts.inside
        allowed = what in self.within_flush and inside[-1:] == [(self, "flush")]
        if inside and not allowed:
            self.wrong(f"{what} was called from inside {inside[-1][1]}")
        if threading.get_ident() != self._thread:
            self.wrong(f"{what} was called on another thread than the loop's")
        if subject is not self._subject:
            self.wrong(f"{what} was called with another {self.kind}")
        if not self.begun:
            self.wrong(f"{what} was called before {self.begins_with}")
        if self.closed:
            self.wrong(f"{what} was called after {self.kind}_closed")
        inside.append((self, what))
        try:
            yield
        finally:
            inside.pop()
            self._verdicts.changed()

    def _given_back(self, what: str, token: object) -> None:
        """Take back a token, with the callback named."""
        index = next((i for i, t in enumerate(self._lent) if t is token), None)
        if index is None or not isinstance(token, Token):
            self.wrong(f"{what} for {token!r}, which is not lent (any more)")
            return
        del self._lent[index]
        self.sent.append(token)
        self.on_sent(token)
        token.memory = None

    def _judge(
        self, what: str, number: int, memory: Memory, *, bytes_too: bool = True
    ) -> None:
        """Look at a payload that has just arrived, as the callback named says."""
        nbytes = memory.nbytes
        if bytes_too and (at := memory.differs_at(pattern(number, nbytes))) is not None:
            self.wrong(
                f"payload {number} of {nbytes} bytes is wrong at {what}, first at byte "
                f"{at}"
            )
        if not memory.gaps_are_whole():
            self.wrong(f"payload {number}: memory beside its destination was written")


def nothing(*_: object) -> None:
    """Do nothing, where a check does not listen to a callback."""
