"""The in-process transport: names to listen on, and links between event loops."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import threading
from collections.abc import Callable
from typing import ClassVar

from kvwire.backend import Availability, Backend, Capabilities, Link, Listener
from kvwire.backend.lane import Lane, LaneContext
from kvwire.types import Address
from kvwire_inproc.faults import FaultPlan, FaultyPipe, plan_here
from kvwire_inproc.lane import InprocLane
from kvwire_inproc.link import InprocLink, join
from kvwire_inproc.pipe import InprocPipe

_log = logging.getLogger("kvwire.inproc")


class InprocBackend(Backend):
    """Links between event loops of this process, at ``inproc://name``.

    Args:
        faults: The faults to inject into frames that this side sends; by default the
            plan of the surrounding :func:`~kvwire_inproc.faults.injected`, if there is
            one.
    """

    scheme: ClassVar[str] = "inproc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        lanes=True, same_process=True, same_host=True
    )

    def __init__(self, faults: FaultPlan | None = None) -> None:
        self._faults = faults if faults is not None else plan_here.get()
        self._pipe_numbers = itertools.count()

    @classmethod
    def rank(cls) -> int:
        """Return the first rank, since an inproc address is always in this process."""
        return 0

    @classmethod
    def availability(cls) -> Availability:
        """Return an availability that is always true."""
        return Availability(available=True, reason="part of kvwire, no dependencies")

    async def listen(
        self, address: Address, accept: Callable[[Link], None]
    ) -> Listener:
        """Listen on the name ``address.host``; "" and "0" choose a free one.

        Cancel safety: safe, it never waits.
        """
        listener = InprocListener(self, asyncio.get_running_loop(), accept)
        listener.name = _names.claim(address, listener)
        return listener

    async def connect(self, address: Address) -> Link:
        """Connect to the listener of that name.

        Cancel safety: safe, it never waits.
        """
        listener = _names.find(address)
        loop = asyncio.get_running_loop()
        lock = threading.RLock()
        pipes = (self._pipe(lock), listener.backend._pipe(lock))  # noqa: SLF001 - ours too
        left, right = join(loop, listener.loop, pipes, listener.address)
        for pipe, receiver in zip(pipes, (right, left), strict=True):
            if isinstance(pipe, FaultyPipe):
                pipe.wake_sender = receiver.wake_peer
                pipe.wake_receiver = receiver.wake
        try:
            listener.loop.call_soon_threadsafe(listener.take, right)
        except RuntimeError:  # the loop was closed a moment ago
            raise ConnectionRefusedError(*_NOBODY) from None
        return left

    def open_lane(self, context: LaneContext) -> Lane:
        """Open one endpoint of a lane within this process."""
        return InprocLane()

    def _pipe(self, lock: threading.RLock) -> InprocPipe:
        """Return a new pipe for the frames that one link of this side sends."""
        if self._faults is None:
            return InprocPipe(lock)
        return FaultyPipe(lock, self._faults, str(next(self._pipe_numbers)))


class InprocListener(Listener):
    """Accepts connections to a name in this process."""

    name: str

    def __init__(
        self,
        backend: InprocBackend,
        loop: asyncio.AbstractEventLoop,
        accept: Callable[[Link], None],
    ) -> None:
        self.backend = backend
        self.loop = loop
        self._accept = accept
        self._closed = False

    @property
    def address(self) -> Address:
        """Return the name as an address."""
        return Address(InprocBackend.scheme, self.name)

    def take(self, link: InprocLink) -> None:
        """Hand over a new link, on this listener's loop."""
        if self._closed:
            link.abort()
            return
        try:
            self._accept(link)
        except Exception:  # noqa: BLE001 - the callback's bug ends this link only
            _log.exception("%s: accept raised; the link is aborted", self.address)
            link.abort()

    async def close(self) -> None:
        """Release the name; links already accepted live on.

        Cancel safety: safe, it never waits.
        """
        self._closed = True
        _names.give_back(self)


class _Names:
    """The listeners by name; loops in several threads use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, InprocListener] = {}
        self._numbers = itertools.count(1)

    def claim(self, address: Address, listener: InprocListener) -> str:
        with self._lock:
            name = address.host
            if name in {"", "0"}:
                name = next(n for i in self._numbers if self._free(n := f"auto-{i}"))
            elif not self._free(name):
                raise OSError(errno.EADDRINUSE, "the name is taken")
            self._listeners[name] = listener
            return name

    def find(self, address: Address) -> InprocListener:
        with self._lock:
            if self._free(address.host):
                raise ConnectionRefusedError(*_NOBODY)
            return self._listeners[address.host]

    def give_back(self, listener: InprocListener) -> None:
        with self._lock:
            if self._listeners.get(listener.name) is listener:
                del self._listeners[listener.name]

    def _free(self, name: str) -> bool:
        """Return whether the name is unused, or the loop of its listener was closed."""
        listener = self._listeners.get(name)
        return listener is None or listener.loop.is_closed()


_NOBODY = (errno.ECONNREFUSED, "nothing in this process listens at that address")


_names = _Names()
