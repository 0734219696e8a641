"""A lane over NIXL: the receiver reads the payloads that the sender offers.

::

    OPENED --join()--> UP --close(), all read--> ENDING --quiet--> ENDED
     |                |                           ^
     +--- abort() ----+--- abort(), peer gone ----+

Neither side writes to the other's memory, so a half that ends need not wait for the
peer (:mod:`kvwire_nixl.driver` explains how a reader detects the end). Each lane has
its own agent. Closing it closes its sockets and keys, and every other way in which a
peer could reach our memory.

**Who may read what.** Metadata and addresses are sent on the control link, under its
authentication. A peer receives the metadata of the arrays that contain its payloads, or
of staging slots alone (``expose = "staging"``, or ``one_sided_windows = "off"``); the
lane's secret proves whose memory was read. NIXL itself does not authenticate: over UCX
and TCP, anybody who can reach the agent's port can read this process. So the network
must be trusted, as NIXL requires.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable

from kvwire.backend import Landing, Payload
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.errors import BackendUnavailable, KVWireError
from kvwire.limits import KIB, MIB
from kvwire.memory.copy import as_fragments, copy
from kvwire.types import Role
from kvwire_nixl import library
from kvwire_nixl.driver import NixlDriver, NixlRead
from kvwire_nixl.ranges import NixlRange, NixlSlot, NixlSlots, Ranges
from kvwire_nixl.settings import parse
from kvwire_nixl.wire import LaneProofs, NixlBootstrap, NixlPlace

_log = logging.getLogger("kvwire.nixl")

# In addition to its bytes, a read costs two round trips and the wake-up of two threads:
# smaller payloads are faster on the control link.
_BYTES_MIN = 32 * KIB
_SPAN_BYTES = 4 * MIB
_WINDOW_BYTES = 4 * _SPAN_BYTES


class _Offer:
    """A payload that the peer may read."""

    __slots__ = ("payload", "slot", "token")

    def __init__(self, token: object, payload: Payload, slot: NixlSlot | None) -> None:
        self.token: object = token  # None after it was given back to the core
        self.payload: Payload | None = payload
        self.slot: NixlSlot | None = slot


class NixlLane(Lane):
    """One endpoint of a lane."""

    _ranges: Ranges
    _slots: NixlSlots

    bytes_min = _BYTES_MIN
    span_bytes = _SPAN_BYTES
    window_bytes = _WINDOW_BYTES

    def __init__(
        self, context: LaneContext, on_ended: Callable[[NixlLane], None]
    ) -> None:
        settings = parse(context.settings, context.windows)
        self._loop = asyncio.get_running_loop()
        self._role = context.role
        self._on_ended = on_ended
        self._own = NixlBootstrap(
            version=library.version(),
            plugin=settings.plugin,
            agent=secrets.token_hex(16),
        )
        self._proofs = LaneProofs(context.secret, context.role)
        self._driver = NixlDriver(
            settings,
            self._own,
            self._proofs,
            f"kvwire nixl {context.number}",
            call_soon=self._loop.call_soon_threadsafe,
            joined=self._driver_is_up,
            received=self._received,
            sent=self._sent,
            gone=self._gone,
        )
        self._bootstrap = self._own.encode()
        self._exposes = settings.exposes_caches
        # The agent's metadata, which the client's bootstrap could not contain; sent
        # with its first payload.
        self._unsent: tuple[bytes, ...] = ()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._came_up: asyncio.Future[None] = self._loop.create_future()
        self._handler: LaneHandler | None = None
        self._offers: deque[_Offer] = deque()
        # Offers that were copied to a slot: the core gets their memory back in the next
        # turn of the loop.
        self._copied: list[_Offer] = []
        self._offered = 0
        self._given_back = 0
        self._reads: list[NixlRead] = []
        self._received_bytes = 0
        self._closing = False
        self._aborting = False
        self._error: Exception | None = None
        self._started = False

    # --- coming up --------------------------------------------------------------------

    @property
    def bootstrap(self) -> bytes:
        """Return the bootstrap, and start creating the agent."""
        self._start()
        return self._bootstrap

    def _start(self) -> None:
        """Start creating the agent; both halves do this at the same time."""
        if not (self._started or self._aborting):
            self._driver.start()
            self._started = True

    @property
    def description(self) -> str:
        return f"NIXL {self._own.version}: {self._own.plugin}"

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Connect the two agents: a client reads the server's word.

        Cancel safety: safe, the lane is then closed without ``lane_closed``.
        """
        try:
            if self._aborting:
                raise BackendUnavailable("the lane was aborted")
            peer = NixlBootstrap.decode(bootstrap)
            peer.require_same(self._own)
            if self._role is Role.CLIENT and not peer.metadata:
                raise BackendUnavailable("the peer's bootstrap has no address")
            self._start()
            self._driver.meet(peer)
            await asyncio.shield(self._came_up)
            if self._aborting:  # ended since the agent connected
                raise BackendUnavailable("the lane was aborted")
            self._be_up()
        except BaseException:
            self.abort()
            raise
        self._handler = handler

    def _be_up(self) -> None:
        self._agent = self._driver.agent
        self._ranges = Ranges(self._agent)
        self._slots = NixlSlots(self._agent)
        full = self._driver.own.encode()
        if self._role is Role.SERVER:
            self._bootstrap = full
        else:
            self._unsent = (self._driver.own.metadata,)

    def _driver_is_up(self, error: Exception | None) -> None:
        if self._came_up.done():
            return
        if error is None:
            self._came_up.set_result(None)
        else:
            self._came_up.set_exception(BackendUnavailable(str(error)))
            self._came_up.exception()  # the join may have been cancelled

    # --- payloads ---------------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Return 0, because everything is offered at once."""
        return 0

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    def send(self, payload: Payload, token: object) -> bytes:
        if self._aborting or self._closing:
            return b""
        try:
            descriptor = self._offer_in_place(payload, token)
            if not descriptor:
                descriptor = self._offer_copy(payload, token)
        except (KVWireError, OSError) as exc:
            self._loop.call_soon(self.abort, exc)
            return b""
        self._offered += 1
        return descriptor

    def _offer_in_place(self, payload: Payload, token: object) -> bytes:
        ranges = self._ranges.covering(payload) if self._exposes else []
        if not ranges:
            return b""
        descriptor = self._describe(payload, ranges)
        if descriptor:
            self._offers.append(  # bounded: LANE_PAYLOADS_MAX
                _Offer(token, payload, None)
            )
        return descriptor

    def _offer_copy(self, payload: Payload, token: object) -> bytes:
        slot = self._slots.take(max(1, payload.nbytes))
        copied = slot.memory[: payload.nbytes]
        copy(payload, copied)
        offer = _Offer(token, copied, slot)
        self._offers.append(offer)  # bounded: LANE_PAYLOADS_MAX
        self._copied.append(offer)  # bounded: LANE_PAYLOADS_MAX
        return self._describe(copied, [slot.range])

    def _describe(self, payload: Payload, ranges: list[NixlRange]) -> bytes:
        pieces = as_fragments(payload)
        fresh = [each for each in ranges if not each.is_announced]
        news = tuple(self._agent.describe(r.address, r.nbytes) for r in fresh)
        place = NixlPlace(
            pieces.addresses,
            pieces.lengths,
            self._driver.own.word,
            (*self._unsent, *news),
        )
        descriptor = self._proofs.place(place)
        if descriptor:
            self._unsent = ()
            for each in fresh:
                each.is_announced = True
        return descriptor

    def receive(self, descriptor: bytes, landing: Landing) -> None:
        place = self._proofs.read_place(descriptor, landing.length)
        if self._aborting:
            return
        payload = landing.payload
        is_direct = payload is not None and bool(self._ranges.covering(payload))
        self._reads.append(  # bounded: LANE_PAYLOADS_MAX
            NixlRead(landing, place, is_direct=is_direct)
        )

    def flush(self) -> None:
        if self._aborting:
            return
        if self._copied:
            self._loop.call_soon(self._give_back_copied)
        reads = self._reads
        self._reads = []
        self._driver.read(reads, self._offered)

    def _received(self, landings: list[Landing]) -> None:
        for landing in landings:
            if self._aborting or self._handler is None:
                return
            self._received_bytes += landing.length
            self._report(self._handler.payload_received, landing)

    def _give_back_copied(self) -> None:
        copied = self._copied
        self._copied = []
        for offer in copied:
            self._give_back(offer)

    def _sent(self, count: int) -> None:
        """Take back the offers that the peer has read, in the order of sending."""
        while self._given_back < count and self._offers:
            self._given_back += 1
            offer = self._offers.popleft()
            offer.payload = None
            if offer.slot is not None:
                self._slots.give_back(offer.slot)
            self._give_back(offer)

    def _give_back(self, offer: _Offer) -> None:
        token = offer.token
        offer.token = None
        if token is not None and not self._aborting and self._handler is not None:
            self._report(self._handler.payload_sent, token)

    # --- ending -----------------------------------------------------------------------

    def close(self) -> None:
        if self._handler is None:
            self.abort()
            return
        self.flush()
        self._closing = True
        self._driver.close()

    def _report(self, call: Callable[..., None], what: object) -> None:
        try:
            call(self, what)
        except Exception as exc:  # noqa: BLE001 - a handler that raises loses its lane
            _log.error("a lane's handler raised; the lane is aborted", exc_info=exc)
            self.abort(exc)

    def abort(self, error: Exception | None = None) -> None:
        """End the lane now; `lane_closed` follows when the driver has ended."""
        if self._aborting:
            return
        self._aborting = True
        self._error = error
        self._driver.end(error)
        if not self._started:
            self._loop.call_soon(self._gone, error)

    def _gone(self, error: Exception | None) -> None:
        if not self._aborting:
            self._aborting = True
            self._error = error
        self._offers.clear()
        self._copied.clear()
        self._reads.clear()
        self.ended.set_result(None)
        self._on_ended(self)
        handler = self._handler
        self._handler = None
        if handler is None:
            return
        try:
            handler.lane_closed(self, self._error)
        except Exception:  # noqa: BLE001 - there is no more to end
            _log.exception("a lane's handler raised in lane_closed")
