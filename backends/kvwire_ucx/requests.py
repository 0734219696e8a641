"""The operations that UCX has, and the memory that is therefore not free.

UCX never holds a reference to memory. What it was given stays here until UCX says that
the operation is over: done, failed, or cancelled. To cancel is only to ask: a receive
that has met its message, a send, a put and a get run on, and end by themselves or with
their endpoint (https://github.com/openucx/ucx/issues/7290).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import final

from kvwire_ucx import binding
from kvwire_ucx.binding import IN_PROGRESS, OK
from kvwire_ucx.library import Ucp

# Gets the status and, of a receive, the bytes received.
OnDone = Callable[[int, int], None]


@final
class UcxRequest:
    """Follows one operation.

    Attributes:
        number: What UCX calls back with.
        handle: UCX's own, or 0 while it has none.
        on_done: Called once, when UCX does not touch the memory any more.
        keeps: The memory, and whatever else must live as long.
    """

    __slots__ = ("handle", "keeps", "number", "on_done")

    def __init__(self, number: int, on_done: OnDone, keeps: object) -> None:
        self.number = number
        self.handle = 0
        self.on_done = on_done
        self.keeps = keeps


@final
class UcxRequests:
    """Holds the operations of one worker that are not over, by number."""

    def __init__(self, ucp: Ucp) -> None:
        self._ucp = ucp
        self._open: dict[int, UcxRequest] = {}
        self._numbers = itertools.count(1)
        # (number, status, bytes) that UCX has called back with and nobody was told.
        self._over: list[tuple[int, int, int]] = []
        self.on_sent = binding.SendCallback(self._sent)
        self.on_received = binding.ReceiveCallback(self._received)

    def __len__(self) -> int:
        """Return how many operations are not over."""
        return len(self._open)

    @property
    def over(self) -> bool:
        """Tell whether an operation is over whose caller has not been told."""
        return bool(self._over)

    def new(self, on_done: OnDone, keeps: object = None) -> UcxRequest:
        """Make an operation that is about to be posted."""
        request = UcxRequest(next(self._numbers), on_done, keeps)
        self._open[request.number] = request
        return request

    def posted(self, request: UcxRequest, result: int | None) -> None:
        """Note what the posting call returned."""
        status, request.handle = binding.request_of(result)
        if status != IN_PROGRESS:
            self._over.append((request.number, status, 0))

    def tell(self) -> None:
        """Tell those whose operations are over by now, but none that follow."""
        over, self._over = self._over, []
        for number, status, nbytes in over:
            request = self._open.pop(number)
            if request.handle:
                self._ucp.request_free(request.handle)
            request.keeps = None
            request.on_done(status, nbytes)

    def abandon(self) -> None:
        """End every operation: the worker is gone."""
        told = {number for number, _, _ in self._over}
        missing = [number for number in self._open if number not in told]
        self._over += [(number, binding.ERR_CANCELED, 0) for number in missing]
        for request in self._open.values():
            request.handle = 0  # freed with the worker
        self.tell()

    # UCX calls these from within its own functions. They must not raise, and what they
    # would do may post again: so they only take notes.

    def _sent(self, _request: int, status: int, number: int) -> None:
        self._over.append((number, status, 0))

    def _received(self, _request: int, status: int, info: object, number: int) -> None:
        # Of a receive that failed, UCX says nothing there, whatever it is.
        nbytes = info[0].length if status == OK else 0  # type: ignore[index]
        self._over.append((number, status, nbytes))
