"""Staging of device memory, for transports that support only host memory.

Outbound, a chunk in device memory is first copied into a slot of pinned host memory,
and then sent from there like any other::

    core        a slot is free     copied                 sent
    next_chunk ----> stage ----------> ready ----> link or lane ----> slot is free again
                      | no slot
                      +--> waits; no further chunk is taken meanwhile

Inbound, a chunk lands in a slot, is verified there, and is then copied to its place.
Only then is it reported to the core as landed. The link is paused while no slot is
free, so there is a slot for every header that the link hands over.

The device may still touch memory after the core has released it, since an abort or the
end of the link ends the core's holds. So each copy has its own hold, from before it is
queued until its event has fired. After a device has failed, its events prove nothing,
so the memory of its copies stays held, in quarantine.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from kvwire.backend import Payload
from kvwire.driver.ports import PathOwner
from kvwire.errors import BackendUnavailable, ConnectionLost, WireCode
from kvwire.kv.fragments import Fragments
from kvwire.limits import SPAN_BYTES_MAX
from kvwire.memory.copy import copy
from kvwire.memory.device.copy_engine import CopyEngine, Done
from kvwire.memory.device.ops import device_errors
from kvwire.proto.chunks import Chunk
from kvwire.proto.records import ChunkArrival, RequestRecord
from kvwire.proto.state import RequestStage
from kvwire.types import BufferId, Device

# Slots in pinned memory for a device's chunks, per connection and direction: one is
# copied, one is on the wire, and one waits, so that neither copy nor wire is idle.
STAGING_SLOTS: Final = 3

logger: logging.Logger = logging.getLogger("kvwire.connections")


class DeviceStaging:
    """The slots of one connection, and the chunks in them.

    Attributes:
        ready: Chunks in host memory that wait to be sent, oldest first.
        landing: Arrivals that have a slot.
        leaving: Chunks that are sent from a slot.
        waiting: A chunk that waits for a slot; until it has one, no other is taken from
            the core.
    """

    def __init__(self, owner: PathOwner) -> None:
        self.ready: deque[Chunk] = deque()
        self._owner = owner
        self._core = owner.core
        self._link = owner.link
        self._buffers = owner.services.buffers
        self._devices = owner.services.devices
        # At most the number of devices in this host.
        self._slots: dict[Device, tuple[_Slots, _Slots]] = {}
        self.waiting: Chunk | None = None
        # Chunks and arrivals that have a slot; bounded: STAGING_SLOTS for each device
        self.leaving: dict[Chunk, _Slot] = {}
        self.landing: dict[ChunkArrival, _Slot] = {}
        self._copying = 0
        self._paused = False
        self._ended = False

    def open(self, device: Device) -> None:
        """Allocate the slots for a device before a transfer starts."""
        copy_engine = self._devices.copy_engine(device)
        if copy_engine.failed:
            raise BackendUnavailable(f"{device} has failed: {copy_engine.failed}")
        if device in self._slots:
            return
        if not self._link.pausable:
            raise BackendUnavailable(
                f"memory of {device}: the control link cannot be paused, so nothing "
                "would bound the bytes that wait to be copied; use another transport"
            )
        nbytes = self._core.agreement.parameters.chunk_bytes
        span_bytes = max(nbytes, SPAN_BYTES_MAX)
        with device_errors(device):
            both = _Slots(copy_engine, nbytes), _Slots(copy_engine, span_bytes)
        self._slots[device] = both  # bounded by the devices of this host

    @property
    def quiet(self) -> bool:
        """Whether no copy is running."""
        return not self._copying

    @property
    def paused(self) -> bool:
        """Whether this side paused the link, so that the peer's silence is normal."""
        return self._paused

    # --- outbound ---------------------------------------------------------------------

    def stage(self, chunk: Chunk, source: Fragments) -> None:
        """Copy a chunk to the host; afterwards the chunk is in ``ready``."""
        assert source.device is not None
        slots, _ = self._slots[source.device]
        if not slots.free:
            assert self.waiting is None
            self.waiting = chunk
            return
        slot = self.leaving[chunk] = slots.take(chunk.length)
        self._copy(
            chunk.buffer,
            lambda done: slots.copy_engine.to_host(source, slot.view, done),
            partial(self._gathered, chunk),
            slots.copy_engine,
        )

    def sent(self, chunk: Chunk) -> None:
        """Free the slot of a chunk that the transport has finished with."""
        slot = self.leaving.pop(chunk, None)
        if slot is not None:
            slot.give_back()
            self._stage_waiting()

    # --- inbound ----------------------------------------------------------------------

    def land(self, arrival: ChunkArrival, into: Fragments) -> memoryview:
        """Return the slot that a payload lands in; there is always one."""
        assert into.device is not None
        _, slots = self._slots[into.device]
        slot = self.landing[arrival] = slots.take(arrival.length)
        if not slots.free:
            self._paused = True
            self._link.pause()
        return slot.view

    def landed(
        self,
        arrival: ChunkArrival,
        then: Callable[[ChunkArrival], None],
        *,
        intact: bool,
    ) -> bool:
        """Copy a received payload to its place, and then call ``then``.

        Returns:
            Whether the payload was staged, so that ``then`` is called later.
        """
        slot = self.landing.pop(arrival, None)
        if slot is None or arrival.buffer is None:
            return False
        if not intact or arrival.buffer in self._buffers.holds.retired:
            # It is damaged, or no longer wanted.
            slot.give_back()
            self._resume()
            return False
        into = self._buffers.part(arrival.buffer, arrival.offset, arrival.length)
        self._scatter(slot, arrival.buffer, into, partial(then, arrival))
        return True

    def place(self, request: RequestRecord, held: memoryview) -> None:
        """Copy a held message into its receive's memory, and end the receive.

        It waits for a slot, and leaves one for the link, which is not paused meanwhile.
        """
        if request.over or not held.nbytes:
            # if the receive is over, its memory may be free already
            self._core.filled(request)
            return
        assert request.buffer is not None
        into = self._buffers.part(request.buffer, 0, held.nbytes)
        assert isinstance(into, Fragments)
        assert into.device is not None
        _, slots = self._slots[into.device]
        # bounded: EAGER_WINDOW_MESSAGES, since their credit is not given back
        slots.unplaced.append(_Held(request, held, into))
        self._place_held(slots)

    # --- the end ----------------------------------------------------------------------

    def lane_gone(self, number: int) -> None:
        """Free the slots of a lane that no longer touches memory."""
        for chunk in [c for c in self.leaving if c.lane == number]:
            self.sent(chunk)
        for arrival in [a for a in self.landing if a.lane == number]:
            slot = self.landing.pop(arrival)
            slot.give_back()
            self._resume()

    def link_gone(self) -> None:
        """Record the end of the control link; nothing is sent or reported any more."""
        self._ended = True
        self.waiting = None
        self.ready.clear()

    # --- inside -----------------------------------------------------------------------

    def _copy(
        self,
        buffer: BufferId,
        begin: Callable[[Done], None],
        then: Callable[[], None],
        copy_engine: CopyEngine,
        request: RequestRecord | None = None,
    ) -> None:
        """Begin a copy with its own hold, and call `then` when it ends.

        If the copy fails, the connection fails too, and so does ``request``: it may be
        a receive that was posted after the connection's end, for a message that arrived
        before.
        """
        holds = self._buffers.holds
        holds.take(buffer)
        self._copying += 1

        def done(error: Exception | None) -> None:
            self._copying -= 1
            try:
                if error is None:
                    holds.drop(buffer)
                    then()
                else:
                    self._failed(copy_engine, error, begin, request)
                self._owner.run()
            except Exception:
                # Only abort, and raise nothing, because the completion thread has more
                # calls to make.
                logger.exception("a bug of kvwire; its connection is aborted")
                self._link.abort()
            self._owner.check_ended()

        try:
            begin(done)
        except Exception as exc:  # noqa: BLE001 - whatever the device's library raises
            self._copying -= 1
            self._failed(copy_engine, exc, begin, request)

    def _gathered(self, chunk: Chunk) -> None:
        if self._ended:
            return
        if chunk.request.state is RequestStage.MOVING:
            self.ready.append(chunk)  # bounded: STAGING_SLOTS
        else:
            self.sent(chunk)
            self._core.chunk_sent(chunk)

    def _place_held(self, slots: _Slots) -> None:
        while slots.unplaced:
            request, held, into = slots.unplaced[0]
            done = partial(self._core.filled, request)
            if request.over:
                done()
            elif len(slots.free) < 2:  # the last slot is reserved for the link
                return
            else:
                assert request.buffer is not None
                slot = slots.take(held.nbytes)
                copy(held, slot.view)
                self._scatter(slot, request.buffer, into, done, request)
            slots.unplaced.popleft()

    def _scatter(
        self,
        slot: _Slot,
        buffer: BufferId,
        into: Payload,
        then: Callable[[], None],
        request: RequestRecord | None = None,
    ) -> None:
        assert isinstance(into, Fragments)
        self._copy(
            buffer,
            lambda done: slot.slots.copy_engine.to_device(slot.view, into, done),
            partial(self._scattered, slot, then),
            slot.slots.copy_engine,
            request,
        )

    def _scattered(self, slot: _Slot, then: Callable[[], None]) -> None:
        slot.give_back()
        then()
        self._resume()

    def _stage_waiting(self) -> None:
        chunk = self.waiting
        self.waiting = None
        if chunk is None:
            return
        if chunk.request.state is not RequestStage.MOVING:
            self._core.chunk_sent(chunk)  # no longer wanted
            return
        source = self._buffers.part(chunk.buffer, chunk.offset, chunk.length)
        assert isinstance(source, Fragments)
        self.stage(chunk, source)

    def _resume(self) -> None:
        # Held messages go before the link, which may need every slot.
        for _, slots in self._slots.values():
            if slots.unplaced:
                self._place_held(slots)
        if (
            self._paused
            and not self._ended
            and all(i.free and not i.unplaced for _, i in self._slots.values())
        ):
            self._paused = False
            self._link.resume()

    def _failed(
        self,
        copy_engine: CopyEngine,
        error: Exception,
        began: object,
        request: RequestRecord | None,
    ) -> None:
        """Fail the connection; the memory of the copy stays as it is for ever."""
        copy_engine.kept.append(began)  # bounded: STAGING_SLOTS for each connection
        if not copy_engine.failed:
            logger.error(
                "%s failed; the buffers of its copy stay held",
                copy_engine.ops.device,
                exc_info=error,
            )
            copy_engine.failed = str(error)
        # Transfers of other memory continue on the next link.
        why = f"{copy_engine.ops.device} failed: {error}"
        self._core.fail(ConnectionLost(why))
        if request is not None and not request.over:
            self._core.refuse(request, BackendUnavailable(why), WireCode.OTHER)


class _Held(NamedTuple):
    """A message in host memory, for a receive into a device."""

    request: RequestRecord
    held: memoryview
    into: Fragments


class _Slots:
    """Pinned memory for one device and direction, divided into slots.

    If no slot is free, the next user waits. This is the only back-pressure, and it does
    not depend on numbers from a peer.
    """

    def __init__(self, copy_engine: CopyEngine, slot_bytes: int) -> None:
        self.copy_engine = copy_engine
        memory = copy_engine.ops.pinned(STAGING_SLOTS * slot_bytes)
        self._views = [
            memory[begin : begin + slot_bytes]
            for begin in range(0, len(memory), slot_bytes)
        ]
        # The slot that has been free longest is used next.
        self.free = deque(range(STAGING_SLOTS), maxlen=STAGING_SLOTS)
        self._used: set[int] = set()
        # Inbound: the copies that wait for a slot, besides the link's payloads.
        self.unplaced: deque[_Held] = deque()

    def take(self, nbytes: int) -> _Slot:
        """Take a free slot, cut to the required length; one must be free."""
        number = self.free.popleft()
        self._used.add(number)  # bounded: STAGING_SLOTS
        return _Slot(self, number, self._views[number][:nbytes])


class _Slot(NamedTuple):
    """A slot in use."""

    slots: _Slots
    number: int
    view: memoryview

    def give_back(self) -> None:
        """Free the slot, which nothing reads or fills any more."""
        self.slots._used.remove(self.number)  # noqa: SLF001 - of this file's class
        self.slots.free.append(self.number)  # bounded: STAGING_SLOTS
