"""One connection's messages, puts and gets in device memory.

The bytes move like those of a transfer, through the slots of
:mod:`kvwire.driver.device_staging`. But when a verb is called, the caller's streams may
still use the memory: kernels may still write the bytes to send, or read the bytes to
overwrite. So each request records an event behind these kernels, and does not touch the
memory before the event has fired::

    send    ANNOUNCE at once;             bytes behind READY and the event
    recv    takes its message in order;   READY, or the copy, behind the event
    put     PUT behind the event
    get     GET behind the event

A send and a recv take their place in the order at once, so messages stay in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.endpoint.request import Request
from kvwire.errors import BackendUnavailable, WireCode
from kvwire.memory.device.ops import Event, device_errors
from kvwire.memory.device.registry import device_ops
from kvwire.proto.events import MemoryWanted
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestKind
from kvwire.types import BufferId, Device, Grant
from kvwire.wire.control import AccessBody


class DeviceRequests:
    """Posts requests with device memory, and continues each when its event has fired.

    Attributes:
        unready: Requests whose event has not fired, each with its next action.
    """

    def __init__(self, driver: ConnectionDriver) -> None:
        self._driver = driver
        self._core = driver.core
        self._devices = driver.services.devices
        # bounded: REQUESTS_MAX, and those that ended while their device was busy
        self.unready: dict[RequestRecord, Callable[[], None] | None] = {}

    def post(
        self, request: Request[int], device: Device, buffer: BufferId
    ) -> RequestRecord:
        """Start a request in the core; its memory is not touched before its event.

        Raises:
            BackendUnavailable: The device does not work, or this connection cannot move
                its memory.
            KVWireError: The core refuses the request.
        """
        core = self._core
        kind = request._kind
        what = request._what
        at = request._deadline
        assert request._memory is not None
        nbytes = request._memory.nbytes
        self._driver.staging.open(device)
        after = request._after or self._devices.queued(device)
        request._after = None
        with device_errors(device):
            fired = after.query()
        ask: Callable[[], None] | None = None
        if kind is RequestKind.SEND:
            record = core.send(what, buffer, nbytes, deadline=at, on_device=True)
        elif kind is RequestKind.RECV:
            record = core.recv(what, buffer, nbytes, deadline=at, on_device=True)
        else:
            record = core.reserve(kind, buffer, nbytes, deadline=at)
            ask = partial(core.ask, record, target_of(what, nbytes))
        if not fired:
            self.unready[record] = ask
            self._wait(device, after, record)
        elif ask is not None:
            ask()
        return record

    def wanted(self, event: MemoryWanted) -> None:
        """Let a message use its memory as soon as the device permits."""
        use = partial(self._use, event)
        if event.request in self.unready:
            self.unready[event.request] = use
        else:
            use()

    # --- inside -----------------------------------------------------------------------

    def _wait(self, device: Device, after: Event, record: RequestRecord) -> None:
        done = partial(self._settled, device, record)
        try:
            self._devices.waiters(device_ops(device)).wait(after, done)
        except Exception as exc:  # noqa: BLE001 - whatever the device's library raises
            # Not now, because the caller does not have the record yet.
            self._driver.services.loop.call_soon(done, exc)

    def _settled(
        self, device: Device, record: RequestRecord, error: Exception | None
    ) -> None:
        step = self.unready.pop(record)
        if error is not None:
            failed = BackendUnavailable(
                f"work queued on {device} before the {record.kind.value} failed: "
                f"{error}"
            )
            self._core.refuse(record, failed, WireCode.OTHER)
        # Also if the request has ended: a message held for it must be released.
        if step is not None:
            step()
        self._driver.run()

    def _use(self, event: MemoryWanted) -> None:
        record = event.request
        driver = self._driver
        if event.held is None:
            assert record.buffer is not None
            self._core.messages.provide(record, record.buffer)
        else:
            held = driver.held.pop(event.held)
            driver.staging.place(record, held)
        driver.run()


def target_of(grant: Grant, nbytes: int) -> AccessBody:
    """Return the peer's memory that a put or get addresses."""
    return AccessBody(grant.grant, grant.generation, grant.token, grant.offset, nbytes)
