"""Running UCX operations, and the memory that must not be freed meanwhile.

UCX never holds a reference to memory. So these objects keep the memory alive until UCX
reports that the operation has ended: done, failed, or cancelled. Cancelling only
requests an end: sends, puts, gets, and receives that have been matched continue, and
end by themselves or with their endpoint (https://github.com/openucx/ucx/issues/7290).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Final, NamedTuple, final

import numpy as np

from kvwire.backend import Payload
from kvwire.kv.fragments import Array, Fragments
from kvwire.memory.compiled import CompiledFunction, compiled_function
from kvwire.memory.copy import address_of
from kvwire.types import MemoryKind
from kvwire_ucx import binding
from kvwire_ucx.binding import IN_PROGRESS, OK
from kvwire_ucx.library import Ucp

_MEMORY_TYPES: Final = {
    MemoryKind.HOST: binding.MEMORY_HOST,
    MemoryKind.CUDA: binding.MEMORY_CUDA,
}


_STATUS: Final = ctypes.POINTER(ctypes.c_int)
post_compiled: CompiledFunction | None = compiled_function(
    "kvwire_post_gets",
    *(ctypes.c_void_p,) * 6,
    ctypes.POINTER(binding.RequestParams),
    ctypes.c_void_p,
    ctypes.c_size_t,
    _STATUS,
    result=ctypes.c_size_t,
)
reap_compiled: CompiledFunction | None = compiled_function(
    "kvwire_reap_gets",
    *(ctypes.c_void_p,) * 3,
    ctypes.c_size_t,
    _STATUS,
    result=ctypes.c_size_t,
)


@final
class MemoryHandles:
    """The memory of one operation, in the form that UCX expects.

    Many fragments are passed as UCX's own list of pieces. UCX packs them when sending,
    and unpacks them when receiving, piece by piece in C. With pieces of 4 KiB this
    reaches 3.8 GB/s over TCP and 8.1 over shared memory; gathering them before and
    scattering them afterwards reaches 2.6 and 4.0 (1 MiB payloads, same machine, same
    run).
    """

    __slots__ = ("_keeps", "address", "count", "datatype", "memory_type", "nbytes")

    def __init__(self, payload: Payload) -> None:
        self.nbytes = payload.nbytes
        self.memory_type = binding.MEMORY_HOST
        self._keeps: object
        if isinstance(payload, Fragments):
            self._point_at(payload)
        else:
            self._keeps = payload
            self.address = address_of(payload)
            self.count = payload.nbytes
            self.datatype = binding.DATATYPE_BYTES

    def _point_at(self, fragments: Fragments) -> None:
        if fragments.device is not None:
            self.memory_type = _MEMORY_TYPES[fragments.device.kind]
        if len(fragments) == 1:
            self._keeps = fragments
            self.address = int(fragments.addresses[0])
            self.count = fragments.nbytes
            self.datatype = binding.DATATYPE_BYTES
            return
        pieces = np.empty((len(fragments), 2), np.uint64)  # a tenth of np.stack's time
        pieces[:, 0] = fragments.addresses
        pieces[:, 1] = fragments.lengths
        self._keeps = (fragments, pieces)
        self.address = int(pieces.ctypes.data)
        self.count = len(fragments)
        self.datatype = binding.DATATYPE_IOV


# Called with the status and, for a receive, the number of bytes received.
OnDone = Callable[[int, int], None]


class UcxRequest:
    """One operation.

    Attributes:
        number: The number that UCX passes to callbacks.
        handle: UCX's own handle, or 0 if it has none.
        on_done: Called once, when UCX no longer touches the memory.
        keeps: The memory, and anything else that must live as long.
    """

    __slots__ = ("handle", "keeps", "number", "on_done")

    def __init__(self, number: int, on_done: OnDone, keeps: object) -> None:
        self.number = number
        self.handle = 0
        self.on_done = on_done
        self.keeps = keeps


progress_compiled: CompiledFunction | None = compiled_function(
    "kvwire_progress",
    *(ctypes.c_void_p,) * 2,
    ctypes.c_uint64,
    result=ctypes.c_uint,
)
# While gets are running, UCX makes progress for this long before Python continues: each
# step copies up to half a MiB, or reads one small range, and would need the GIL
# afterwards.
_STEPS_NS: Final = 200_000


class UcxRanges(NamedTuple):
    """Ranges of the peer's memory to get; contiguous arrays with one item per range."""

    here: Array
    lengths: Array
    there: Array
    keys: Array


@final
class UcxGets(UcxRequest):
    """Many gets with a common end, started and checked in C if that is compiled.

    They have no callback. UCX would call it for each get, and each call would wait for
    the GIL while another thread computes. Instead, their handles are checked after each
    progress call.

    Attributes:
        status: The first error, or OK.
    """

    __slots__ = ("_handles", "_left", "_ucp", "status")

    def __init__(self, ucp: Ucp, number: int, on_done: OnDone, keeps: object) -> None:
        super().__init__(number, on_done, keeps)
        self._ucp = ucp
        self.status = ctypes.c_int(OK)
        self._left = 0

    def post(
        self, endpoint: int, ranges: UcxRanges, params: binding.RequestParams
    ) -> None:
        """Hand all gets to UCX."""
        count = ranges.here.size
        self._handles = np.empty(count, np.uint64)
        if post_compiled is not None:
            self._left = post_compiled.held(
                self._ucp.pointers["get_nbx"],
                endpoint,
                _start(ranges.here),
                _start(ranges.lengths),
                _start(ranges.there),
                _start(ranges.keys),
                params,
                _start(self._handles),
                count,
                self.status,
            )
            return
        reference = ctypes.byref(params)
        for here, length, there, key in zip(
            *(one.tolist() for one in ranges), strict=True
        ):
            status, handle = binding.request_of(
                self._ucp.get_nbx(endpoint, here, length, there, key, reference)
            )
            if status == IN_PROGRESS:
                self._handles[self._left] = handle
                self._left += 1
            else:
                self._note(status)

    def is_over(self) -> bool:
        """Free the requests that have ended; return whether all have."""
        if reap_compiled is not None:
            self._left = reap_compiled.held(
                self._ucp.pointers["request_check_status"],
                self._ucp.pointers["request_free"],
                _start(self._handles),
                self._left,
                self.status,
            )
            return not self._left
        while self._left:
            handle = self._handles.item(self._left - 1)
            status = self._ucp.request_check_status(handle)
            if status == IN_PROGRESS:
                return False
            self._note(status)
            self._ucp.request_free(handle)
            self._left -= 1
        return True

    def _note(self, status: int) -> None:
        self.status.value = self.status.value or status


@final
class UcxRequests:
    """One worker's operations that have not ended, by number."""

    def __init__(self, ucp: Ucp) -> None:
        self._ucp = ucp
        self._open: dict[int, UcxRequest] = {}
        self._numbers = itertools.count(1)
        # (number, status, bytes) of operations that have ended but were not reported
        # yet.
        self.over: list[tuple[int, int, int]] = []
        self._polled: list[UcxGets] = []
        self._getting = binding.RequestParams()
        self.on_sent = binding.SendCallback(self._sent)
        self.on_received = binding.ReceiveCallback(self._received)

    def __len__(self) -> int:
        """Return the number of operations that have not ended."""
        return len(self._open)

    def progress(self, worker: int) -> int:
        """Let a worker make progress; return 0 if nothing moves any more."""
        if self._polled and progress_compiled is not None:
            moves: int = progress_compiled.released(
                self._ucp.pointers["worker_progress"], worker, _STEPS_NS
            )
        else:
            moves = self._ucp.worker_progress(worker)
        if not moves:
            self.look()
        return moves

    def look(self) -> None:
        """Find operations without a callback that have ended."""
        if not self._polled:
            return
        polled = self._polled
        self._polled = []
        for one in polled:
            if one.is_over():
                self.over.append((one.number, one.status.value, 0))
            else:
                self._polled.append(one)

    def new(self, on_done: OnDone, keeps: object = None) -> UcxRequest:
        """Create an operation that is about to be posted."""
        request = UcxRequest(next(self._numbers), on_done, keeps)
        self._open[request.number] = request
        return request

    def posted(self, request: UcxRequest, result: int | None) -> None:
        """Record the result of the posting call."""
        status, request.handle = binding.request_of(result)
        if status != IN_PROGRESS:
            self.over.append((request.number, status, 0))

    def get(
        self,
        endpoint: int,
        ranges: UcxRanges,
        on_done: OnDone,
        keeps: object,
    ) -> None:
        """Get ranges of the peer's memory; call ``on_done`` when all have ended."""
        gets = UcxGets(self._ucp, next(self._numbers), on_done, keeps)
        self._open[gets.number] = gets
        gets.post(endpoint, ranges, self._getting)
        self._polled.append(gets)  # bounded: the readers' portions
        self.look()

    def report_ended(self) -> None:
        """Report the operations that have ended so far; later ones are left."""
        over = self.over
        self.over = []
        for number, status, nbytes in over:
            request = self._open.pop(number)
            if request.handle:
                self._ucp.request_free(request.handle)
            request.keeps = None
            # It may refer to the request, and then only the garbage collector would
            # free what else it refers to.
            on_done = request.on_done
            request.on_done = _ended_twice
            on_done(status, nbytes)

    def abandon(self) -> None:
        """End every operation, because the worker was destroyed."""
        self._polled.clear()
        over = {number for number, _, _ in self.over}
        missing = [number for number in self._open if number not in over]
        self.over += [(number, binding.ERR_CANCELED, 0) for number in missing]
        for request in self._open.values():
            request.handle = 0  # the worker's destruction has freed it
        self.report_ended()

    def forget(self) -> None:
        """Report no end any more; the memory is kept, since UCX may still touch it."""
        for request in self._open.values():
            request.on_done = _ignored

    # UCX calls these two functions from inside its own functions. So they must not
    # raise; and they only record the end, since a report could post another request.

    def _sent(self, _request: int, status: int, number: int) -> None:
        self.over.append((number, status, 0))

    def _received(self, _request: int, status: int, info: object, number: int) -> None:
        # UCX leaves the length undefined if a receive has failed.
        nbytes = info[0].length if status == OK else 0  # type: ignore[index]
        self.over.append((number, status, nbytes))


def _ignored(status: int, nbytes: int) -> None:
    """Do nothing."""


def _ended_twice(status: int, nbytes: int) -> None:
    raise AssertionError(f"an operation ended twice: status {status}")


def _start(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
