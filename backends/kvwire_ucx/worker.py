"""A UCX worker on an event loop: it sleeps until UCX has something to do.

::

    wake() --call_soon--> turn: progress until nothing moves, report the ends
                            ^                |               |
             event fd -----+                |               +-- time is up: call_soon
                                            v
                                    arm: BUSY? again. OK? sleep

UCX signals its file descriptor only between a successful ``arm`` and the next event,
and ``arm`` returns BUSY while there is progress to make. So a turn ends in a successful
``arm``, or schedules another turn. And any code that posts an operation calls
:meth:`Worker.wake`, since posting may consume an event. Nothing is polled: with
receives pending and nothing arriving, no Python code runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import re
import time
from collections.abc import Callable
from typing import Final, final

from kvwire.backend.contexts import without_context
from kvwire.backend.pacing import unpace
from kvwire.errors import BackendUnavailable
from kvwire_ucx import binding
from kvwire_ucx.binding import ERR_BUSY, OK, Post, RequestParams
from kvwire_ucx.bootstrap import UcxBootstrap
from kvwire_ucx.context import Context, printed
from kvwire_ucx.requests import (
    MemoryHandles,
    OnDone,
    UcxRanges,
    UcxRequest,
    UcxRequests,
)
from kvwire_ucx.settings import OLD

# The length of one turn of the loop: about 4 MiB at memory speed, 1 MiB over TCP.
TURN_S: Final = 400e-6
# Each turn moves at least half a MiB if there is data to move; a lane's window is 8
# MiB.
IDLE_TURNS: Final = 64
# UCX 1.13 aborts the process if a worker is destroyed while its answer to a newly
# connected peer waits to be sent over TCP ("send.wireup.type"). It does not report such
# connections; they open in a few milliseconds if the peer is alive.
OLD_SETTLE_S: Final = 0.1
_ALL_BITS: Final = 2**64 - 1
_OF_MEMORY: Final = binding.OP_DATATYPE | binding.OP_MEMORY_TYPE


@final
class Worker:
    """Posts operations, and reports their ends. Used on its loop only.

    Raises:
        BackendUnavailable: UCX refuses, or this process was forked from a process that
            used UCX.
    """

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        _check_process()
        self.context = context
        self.requests = UcxRequests(context.library.ucp)
        self._ucp = context.library.ucp
        self._loop = loop
        self._scheduled = False
        self._turning = False
        self._closed = False
        self._on_idle: Callable[[], None] | None = None
        # Whether anything has ever moved; if not, no answer from UCX can be waiting.
        self._used = False
        self._patience = 0
        self._failed: list[tuple[int, int]] = []
        # By an endpoint's number: the callback for its failure, called with the status.
        self._endpoints: dict[int, Callable[[int], None]] = {}
        self._on_failed = binding.ErrorCallback(self._endpoint_failed)
        on_sent = self.requests.on_sent
        on_received = self.requests.on_received
        # Filled in again for each operation, because UCX reads them only while it is
        # posted.
        self._sending = _params(on_sent, _OF_MEMORY)
        self._receiving = _params(on_received, _OF_MEMORY | binding.OP_NO_IMMEDIATE)
        self._other = _params(on_sent)
        self._closing = _params(on_sent, binding.OP_FLAGS)
        # Whether UCX may end the process if it frees an endpoint without an answer.
        # Debian's 1.13 does ("send.wireup.type"), if messages that connect RC queue
        # pairs wait for UD ones.
        self.is_fragile = bool(context.rdma) and context.library.version < OLD
        self.handle = self._create()
        try:
            self.address = self._own_address()
            self._event_fd = self._get_event_fd()
        except BaseException:
            self._ucp.worker_destroy(self.handle)
            raise
        without_context(loop.add_reader, self._event_fd, self._turn)
        self.wake()

    # --- operations -------------------------------------------------------------------

    def send(
        self,
        endpoint: int,
        memory: MemoryHandles,
        tag: int,
        on_done: OnDone,
        *,
        eager: bool = False,
    ) -> UcxRequest:
        """Send a message; the request ends when the peer has a receive for it.

        An eager message has few bytes, and ends when UCX has accepted them.
        """
        request = self.requests.new(on_done, memory)
        params = self._moving(self._sending, memory, request)
        post = self._ucp.tag_send_nbx if eager else self._ucp.tag_send_sync_nbx
        result = post(endpoint, memory.address, memory.count, tag, params)
        return self._posted(request, result)

    def receive(self, memory: MemoryHandles, tag: int, on_done: OnDone) -> UcxRequest:
        """Receive the message with exactly this tag."""
        request = self.requests.new(on_done, memory)
        params = self._moving(self._receiving, memory, request)
        result = self._ucp.tag_recv_nbx(
            self.handle, memory.address, memory.count, tag, _ALL_BITS, params
        )
        return self._posted(request, result)

    def cancel(self, request: UcxRequest) -> None:
        """Request an early end; :attr:`UcxRequest.on_done` reports the actual end."""
        if request.handle and not self._closed:
            self._ucp.request_cancel(self.handle, request.handle)
            self.wake()

    def post(self, on_done: OnDone, keeps: object, call: Post) -> UcxRequest:
        """Post any other operation; ``call`` gets the parameters."""
        request = self.requests.new(on_done, keeps)
        self._other.user_data = request.number
        return self._posted(request, call(ctypes.byref(self._other)))

    def get(
        self, endpoint: int, ranges: UcxRanges, on_done: OnDone, keeps: object
    ) -> None:
        """Get ranges of the peer's memory.

        Args:
            endpoint: The endpoint to the peer.
            ranges: Their addresses, there and here.
            on_done: Called once all have ended, with the first status that is an error.
            keeps: Objects that must live as long, such as the memory.
        """
        self.requests.get(endpoint, ranges, on_done, keeps)
        self.wake()

    # --- endpoints --------------------------------------------------------------------

    def connect(
        self, address: bytes, number: int, on_failed: Callable[[int], None]
    ) -> int:
        """Create an endpoint to a peer's worker; UCX connects at the first use.

        Raises:
            BackendUnavailable: UCX has no route to the peer.
        """
        params = binding.EndpointParams(
            field_mask=binding.EP_REMOTE_ADDRESS
            | binding.EP_ERR_MODE
            | binding.EP_ERR_HANDLER,
            address=address,
            err_mode=binding.ERR_MODE_PEER,
            err_callback=ctypes.cast(self._on_failed, ctypes.c_void_p),
            err_arg=number,
        )
        handle = ctypes.c_void_p()
        status = self._ucp.ep_create(
            self.handle, ctypes.byref(params), ctypes.byref(handle)
        )
        self.wake()
        if status != OK or not handle.value:
            text = self.context.library.status_text(status)
            raise BackendUnavailable(
                f"UCX cannot reach the peer: {text}; both sides need a common "
                f"transport that connects them (here: {self._resources()})"
            )
        self._endpoints[number] = on_failed
        return handle.value

    def disconnect(
        self, endpoint: int, number: int, on_done: OnDone, *, force: bool
    ) -> None:
        """Close an endpoint; ``on_done`` is called when UCX has released it."""
        self._endpoints.pop(number, None)
        request = self.requests.new(on_done)
        params = self._closing
        params.flags = binding.CLOSE_FORCE if force else 0
        params.user_data = request.number
        self._posted(request, self._ucp.ep_close_nbx(endpoint, ctypes.byref(params)))

    def unpace(self) -> None:
        """Turn off TCP pacing for connections within this host."""
        unpace([self._event_fd])

    # --- the loop ---------------------------------------------------------------------

    def wake(self) -> None:
        """Make sure that a turn is scheduled."""
        if not (self._scheduled or self._turning or self._closed):
            self._scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when UCX only waits for events.

        It is also called after some turns, since over shared memory UCX never stops
        trying to reach a peer that is gone. An old UCX gets some more time.
        """
        self._on_idle = callback
        self._patience = IDLE_TURNS
        self.wake()

    def abandon(self) -> None:
        """Leave the worker and its context as they are; their memory is never freed.

        Only without operations that reach memory of others.
        """
        if self._closed:
            return
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._event_fd)
        self._endpoints.clear()
        self._on_idle = None
        self.requests.forget()  # the callbacks refer to the lane's connection
        self.context.keep(self)

    def close(self) -> None:
        """Destroy the worker; running operations then end, and are reported.

        Call it only after :meth:`when_idle`, because UCX aborts the process if copies
        are running ("ucs_arbiter_group_is_empty"), and not from within a turn.
        """
        if self._closed:
            return
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._event_fd)
        self._ucp.worker_destroy(self.handle)
        self._endpoints.clear()
        self.requests.abandon()

    def _scheduled_turn(self) -> None:
        self._scheduled = False
        self._turn()

    def _turn(self) -> None:
        if self._turning or self._closed:
            return
        self._turning = True
        try:
            sleeping = self._work_until(time.monotonic() + TURN_S)
        finally:
            self._turning = False
        if not sleeping:
            self._patience -= 1
            if not self._patience:
                self._report_idle()
            self.wake()

    def _work_until(self, deadline: float) -> bool:
        """Progress, report and arm; return False if the time ran out before idle."""
        ucp = self._ucp
        handle = self.handle
        self.requests.look()
        while not self._closed:
            moved = self.requests.progress(handle)
            self._used = self._used or bool(moved)
            if self.requests.over or self._failed:
                self._report()
            elif not moved:
                status = ucp.worker_arm(handle)
                if status == OK:
                    self._report_idle()
                    return True
                if status != ERR_BUSY:
                    self._failed += [(number, status) for number in self._endpoints]
            if time.monotonic() > deadline:
                return False
        return True

    def _report_idle(self) -> None:
        callback = self._on_idle
        self._on_idle = None
        if callback is not None:
            settles = self._used and self.context.library.version < OLD
            self._loop.call_later(OLD_SETTLE_S if settles else 0, callback)

    def _report(self) -> None:
        self.requests.report_ended()
        failed = self._failed
        self._failed = []
        for number, status in failed:
            on_failed = self._endpoints.pop(number, None)
            if on_failed is not None:
                on_failed(status)

    def _endpoint_failed(self, number: int, _endpoint: int, status: int) -> None:
        """Record a failure; UCX calls this from inside its own functions."""
        self._failed.append((number, status))

    @property
    def closed(self) -> bool:
        """Return whether the worker was destroyed."""
        return self._closed

    # --- inside -----------------------------------------------------------------------

    def _moving(
        self, params: RequestParams, memory: MemoryHandles, request: UcxRequest
    ) -> object:
        params.datatype = memory.datatype
        params.memory_type = memory.memory_type
        params.user_data = request.number
        return ctypes.byref(params)

    def _posted(self, request: UcxRequest, result: int | None) -> UcxRequest:
        self.requests.posted(request, result)
        self.wake()
        return request

    def _create(self) -> int:
        params = binding.WorkerParams(
            field_mask=binding.WORKER_THREAD_MODE | binding.WORKER_FLAGS,
            thread_mode=binding.THREAD_MODE_SINGLE,
            flags=binding.WORKER_IGNORE_REQUEST_LEAK,
        )
        handle = ctypes.c_void_p()
        status = self._ucp.worker_create(
            self.context.handle, ctypes.byref(params), ctypes.byref(handle)
        )
        self._check(status, "no worker")
        return handle.value or 0

    def _own_address(self) -> bytes:
        attributes = binding.WorkerAttr(field_mask=binding.WORKER_ATTR_ADDRESS)
        status = self._ucp.worker_query(self.handle, ctypes.byref(attributes))
        self._check(status, "no address")
        address = ctypes.string_at(attributes.address, attributes.address_length)
        self._ucp.worker_release_address(self.handle, attributes.address)
        return address

    def _get_event_fd(self) -> int:
        fd = ctypes.c_int()
        status = self._ucp.worker_get_efd(self.handle, ctypes.byref(fd))
        self._check(status, "no file descriptor to wait on")
        return fd.value

    def _check(self, status: int, what: str) -> None:
        if status != OK:
            library = self.context.library
            text = library.status_text(status)
            raise BackendUnavailable(
                f"UCX {library.version}: {what}: {text} (with {self._resources()})"
            )

    def _resources(self) -> str:
        return ", ".join(map(str, self.context.resources))


# The process that created the first worker, or 0.
_first_process = 0


def _check_process() -> None:
    """Refuse to run in a child forked from a process that used UCX.

    UCX has a thread for its timers and connections, which a fork does not copy: in the
    child no connection would ever open.

    Raises:
        BackendUnavailable: This process is such a child.
    """
    global _first_process  # noqa: PLW0603 - it is a fact of the process
    here = os.getpid()
    _first_process = _first_process or here
    if _first_process != here:
        raise BackendUnavailable(
            f"this process was forked from {_first_process}, which had used UCX; fork "
            f'before the first connection, or use multiprocessing\'s "spawn"'
        )


def _params(callback: object, fields: int = 0) -> RequestParams:
    return RequestParams(
        op_attr_mask=binding.OP_CALLBACK | binding.OP_USER_DATA | fields,
        callback=ctypes.cast(callback, ctypes.c_void_p),  # type: ignore[arg-type]
    )


# --- the way to one peer, in UCX's peer error mode ------------------------------------

# "lane[2]:  5:cma/memory.0 md[4] -> ... rma_bw#0", as ucp_ep_print_info prints it.
_LANE: Final = re.compile(r"lane\[\d+\]:\s+\d+:(\S+?)\.\d+ .*->(.*)")
# UCX's uses of its lanes; the one that moves bulk data comes first.
_USES: Final = ("rma_bw", "am", "rma", "tag")

_numbers = itertools.count(1)


@final
class UcxEndpoint:
    """A UCX endpoint, which leads to a peer's worker."""

    def __init__(
        self, worker: Worker, peer: UcxBootstrap, on_failed: Callable[[int], None]
    ) -> None:
        self._worker = worker
        self._on_failed = on_failed
        self._number = next(_numbers)
        self._transports: tuple[str, ...] = ()
        self.failed = False
        self.gone = False
        self.handle = worker.connect(peer.padded_address, self._number, self._fail)

    @property
    def transports(self) -> tuple[str, ...]:
        """Return the transports in use, such as ``cma`` and ``sysv``; bulk first."""
        if self.handle and not self.failed:
            text = printed(self._worker.context.library.ucp.ep_print_info, self.handle)
            self._transports = _transports(text)
        return self._transports

    def close(self, on_gone: Callable[[], None]) -> None:
        """Close the endpoint by force, which ends its operations."""
        handle = self.handle
        self.handle = 0
        if not handle:
            return

        def done(_status: int, _nbytes: int) -> None:
            self.gone = True
            on_gone()

        self._worker.disconnect(handle, self._number, done, force=True)

    def _fail(self, status: int) -> None:
        self.failed = True
        self._on_failed(status)


def _transports(text: str) -> tuple[str, ...]:
    found: list[tuple[int, str]] = []
    for name, uses in _LANE.findall(text):
        ranks = [rank for rank, use in enumerate(_USES) if f" {use}" in uses]
        if ranks:
            found.append((min(ranks), name.removesuffix("/memory")))
    return tuple(dict.fromkeys(name for _, name in sorted(found)))
