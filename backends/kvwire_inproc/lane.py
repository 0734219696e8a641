"""Lanes between event loops of one process: a link whose frames are the payloads.

A frame's header is its payload's descriptor. The payload's destination arrives by the
control link; while no payload is expected the link is paused, and payloads wait in
their sender's memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from itertools import count
from typing import Final

from kvwire.backend import Landing, Link, LinkHandler, Payload
from kvwire.backend.lane import Lane, LaneHandler
from kvwire.errors import BackendUnavailable, ConnectionLost, MalformedFrame
from kvwire.limits import HEADER_BYTES
from kvwire_inproc.link import InprocLink, join
from kvwire_inproc.pipe import InprocPipe

_PREFIX: Final = b"inproc lane "
_NUMBER_BYTES: Final = 8

_lock = threading.Lock()
_numbers = count(1)
_endpoints: dict[bytes, InprocLane] = {}


class InprocLane(Lane, LinkHandler):
    """One endpoint of a lane."""

    intact = True
    _handler: LaneHandler

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._bootstrap = _PREFIX + next(_numbers).to_bytes(_NUMBER_BYTES, "little")
        # The side that joins first makes both ends of the link; the other side's `join`
        # takes its end from here.
        self.made: InprocLink | None = None
        self._link: InprocLink | None = None
        self._sent = self._given_back = self._received_bytes = 0
        # Descriptors with their landings, in order; the first payload may be arriving
        # now.
        self._awaited: deque[tuple[bytes, Landing]] = deque()
        self._is_coming = False
        self._closing = False
        self._ended = False
        self._error: Exception | None = None
        with _lock:
            _endpoints[self._bootstrap] = self  # bounded: LANES_MAX

    @property
    def bootstrap(self) -> bytes:
        """Return the number of this endpoint."""
        return self._bootstrap

    @property
    def description(self) -> str:
        return "a copy within the process"

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Join the endpoint of the other side.

        Cancel safety: safe, it never waits.
        """
        with _lock:
            peer = _endpoints.get(bootstrap)
            if self._ended:
                raise BackendUnavailable("the lane was aborted")
            if peer is not None and self.made is peer.made is None:
                lock = threading.RLock()
                pipes = InprocPipe(lock), InprocPipe(lock)
                self.made, peer.made = join(self.loop, peer.loop, pipes, None)
        if peer is None or self.made is None:
            self.abort()
            raise BackendUnavailable("the peer is not in this process")
        self._handler = handler
        self._link = self.made
        self._link.pause()
        self._link.start(self)

    def send(self, payload: Payload, token: object) -> bytes:
        if self._ended or self._closing or self._link is None:
            return b""
        self._sent += 1
        descriptor = self._sent.to_bytes(_NUMBER_BYTES, "little")
        self._link.send(descriptor.ljust(HEADER_BYTES, b"\0"), payload, token)
        return descriptor

    def receive(self, descriptor: bytes, landing: Landing) -> None:
        if len(descriptor) != _NUMBER_BYTES:
            raise MalformedFrame(
                "KVW-LN-07",
                f"a descriptor has {len(descriptor)} bytes instead of {_NUMBER_BYTES}",
            )
        if not self._ended:
            self._awaited.append((descriptor, landing))  # bounded: LANE_PAYLOADS_MAX

    def flush(self) -> None:
        if self._link is not None:
            self._link.flush()
            if len(self._awaited) > self._is_coming:
                self._link.resume()

    def close(self) -> None:
        self._closing = True
        self.flush()
        self._end_if_done()

    @property
    def queued_bytes(self) -> int:
        return self._link.queued_bytes if self._link is not None else 0

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    # --- callbacks of the link --------------------------------------------------------

    def header_received(self, link: Link, header: memoryview) -> Landing:
        descriptor, landing = self._awaited[0]
        if header[:_NUMBER_BYTES] != descriptor:
            self.abort(
                ConnectionLost("the peer sent another payload than it announced")
            )
        elif len(self._awaited) == 1:
            link.pause()
        self._is_coming = True
        return landing

    def body_received(self, link: Link, landing: Landing) -> None:
        self._awaited.popleft()
        self._is_coming = False
        self._received_bytes += landing.length
        self._handler.payload_received(self, landing)
        self._end_if_done()

    def frame_sent(self, link: Link, token: object) -> None:
        self._given_back += 1
        self._handler.payload_sent(self, token)
        self._end_if_done()

    def link_writable(self, link: Link) -> None:
        self._handler.lane_writable(self)

    def link_closed(self, link: Link, error: Exception | None) -> None:
        if not self._ended:
            self.abort(error or ConnectionLost("the other endpoint has ended"))
        self.loop.call_soon(self._handler.lane_closed, self, self._error)

    def _end_if_done(self) -> None:
        """End a closed lane once all its sends and receives are done."""
        if self._closing and not self._awaited and self._given_back == self._sent:
            self.abort()

    def abort(self, error: Exception | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._awaited.clear()
        with _lock:
            del _endpoints[self._bootstrap]
        if self._link is not None:
            self._link.abort()
