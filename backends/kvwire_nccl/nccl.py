"""NCCL by nccl4py: a non-blocking communicator of two ranks for each direction.

A lane has one pipe per direction. A single communicator would execute its operations in
one order on both sides, and neither side knows the other's order: each could wait in a
send for the other's receive, for ever. Within one direction, the order is the order of
the descriptors.

Written for nccl4py 0.6 and NCCL 2.28 to 2.30. docs/topics/gpu.md lists the parts that
have run on a GPU.

A call on a non-blocking communicator may return before it is done. Until the
communicator's state is "success" again, no other call may use it or its stream. So a
move has two parts: the call and, once the state shows that NCCL has accepted it, an
event behind it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

from kvwire.backend import Payload
from kvwire.errors import BackendUnavailable, KVWireError, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.memory.device.ops import DeviceArray, DeviceOps, Event, Stream
from kvwire.memory.device.registry import device_ops
from kvwire.types import Device, MemoryKind

# The value of ncclResult_t for success, in nccl.h.
_SUCCESS: Final = 0
_IN_PROGRESS: Final = 7
# The thread blocks of a communicator: two are enough for a PCIe or network link, and
# more would be taken from the model.
_CTAS_MAX: Final = 4

DEVICE: Final = "device"
START: Final = "start_timeout_s"
MOVE: Final = "move_timeout_s"
_DEFAULTS: Final = {
    DEVICE: "0",
    # A process's first communicator loads kernels and looks for networks.
    START: "20",
    # If nothing moves for this long, the peer is gone, which is usually detected
    # earlier.
    MOVE: "30",
}


class MoveFailed(KVWireError):
    """The communicator has failed, and its state is undefined from then on."""


class MoveProgress(enum.Enum):
    """The progress of one move."""

    QUEUED = "queued"
    """NCCL has not accepted it yet, and may be given nothing else."""
    LAUNCHED = "launched"
    DONE = "done"


class Nccl:
    """Makes the directions of lanes.

    Attributes:
        version: The library's name and version, which must be the same on both sides.
        kinds: The kinds of memory that it moves.
        start_timeout_s: The time in which a direction has to connect.
        move_timeout_s: The time in which the next running move has to complete.

    Raises:
        BackendUnavailable: NCCL, its library or the GPU is missing.
        UsageError: A setting is not a number in range.
    """

    kinds = frozenset({MemoryKind.CUDA})

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.start_timeout_s = _number(settings, START)
        self.move_timeout_s = _number(settings, MOVE)
        device = int(_number(settings, DEVICE))
        self.core = load()
        self.version = loaded_version(self.core)
        self.ops: DeviceOps = device_ops(Device(MemoryKind.CUDA, device))

    def name(self) -> bytes:
        """Return a new name for a direction, with which both sides open it."""
        try:
            return bytes(self.core.get_unique_id())
        except Exception as exc:
            raise BackendUnavailable(f"NCCL returns no unique id: {exc}") from exc

    def open(self, name: bytes, sends: bool) -> NcclPipe:
        """Create one end of the named direction, without connecting yet."""
        try:
            unique_id = self.core.UniqueId.from_bytes(name)
        except Exception as exc:
            raise BackendUnavailable(f"the peer's unique id: {exc}") from exc
        return NcclPipe(self, unique_id, sends=sends)


def load() -> Any:
    """Import and return nccl4py's public module."""
    try:
        import nccl.core  # noqa: PLC0415 - optional
    except ImportError as exc:
        raise BackendUnavailable(f"nccl4py does not load: {exc}") from None
    return nccl.core


def loaded_version(core: Any) -> str:
    """Return the version of libnccl, which torch may have loaded."""
    library = core.get_version().libnccl
    if library is None:
        raise BackendUnavailable("libnccl.so.2 was not found")
    return f"NCCL {library.version}"


class NcclPipe:
    """One direction: sends, or receives, all of its payloads.

    Only the direction's own thread calls these methods. They pass on any exception of
    NCCL. Only :meth:`abort` waits for the peer.
    """

    def __init__(self, library: Nccl, unique_id: Any, *, sends: bool) -> None:
        self._library = library
        self._unique_id = unique_id
        self._sends = sends
        self._comm: Any = None
        self._stream: Stream | None = None

    def begin(self) -> None:
        """Start connecting with the peer."""
        from cuda.core import Device as CudaDevice  # noqa: PLC0415 - comes with nccl4py

        core = self._library.core
        # For this thread: NCCL binds the communicator to the current device.
        CudaDevice(self._library.ops.device.index).set_current()
        self._stream = self._library.ops.stream()
        config = core.NCCLConfig(blocking=False, min_ctas=1, max_ctas=_CTAS_MAX)
        self._comm = core.Communicator()
        rank = 0 if self._sends else 1
        self._comm.initialize(2, rank, self._unique_id, config)

    def taken(self) -> bool:
        """Return whether it is connected and has accepted the last call.

        Raises:
            MoveFailed: The communicator has failed; the moves themselves do not report
                that.
        """
        state = int(self._comm.get_async_error())
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise MoveFailed(f"NCCL: {self._library.core.get_error_string(state)}")
        return state == _SUCCESS

    def move(self, payload: Payload | None, nbytes: int) -> NcclMove:
        """Start sending or receiving a payload; None receives and drops it."""
        assert self._stream is not None
        assert not isinstance(payload, memoryview), "refused before"
        move = NcclMove(self, self._stream, payload, nbytes, sends=self._sends)
        array = DeviceArray(int(move.packed.addresses[0]), (nbytes,), "|u1")
        if self._sends:
            self._comm.send(array, 1, stream=self._stream.pointer)
        else:
            self._comm.recv(array, 0, stream=self._stream.pointer)
        return move

    def abort(self) -> None:
        """End it, finished or not; raise if the end cannot be proved.

        Returns once nothing touches any memory, however long that takes.
        """
        comm = self._comm
        self._comm = None
        if comm is not None:
            comm.abort()
        if self._stream is not None:
            # A gather or scatter on the stream may still be running.
            self._stream.record().synchronize()
            self._stream.close()


class NcclMove:
    """One payload in progress."""

    def __init__(
        self,
        pipe: NcclPipe,
        stream: Stream,
        payload: Fragments | None,
        nbytes: int,
        *,
        sends: bool,
    ) -> None:
        self._pipe = pipe
        self._stream = stream
        self._into = None if sends else payload
        self._event: Event | None = None
        if payload is not None and len(payload) == 1:
            self.packed = payload
            self._into = None
            return
        self.packed = stream.buffer(nbytes)
        if sends and payload is not None:
            stream.gather(payload, self.packed)

    def progress(self) -> MoveProgress:
        """Return its progress; raise if it and the communicator have failed."""
        if self._event is None:
            if not self._pipe.taken():
                return MoveProgress.QUEUED
            if self._into is not None:
                self._stream.scatter(self.packed, self._into)
            self._event = self._stream.record()
        return MoveProgress.DONE if self._event.query() else MoveProgress.LAUNCHED


def _number(settings: Mapping[str, str], key: str) -> float:
    text = settings.get(key, _DEFAULTS[key])
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 86_400:
        raise UsageError(
            f"backends.nccl: {key}={text!r} must be a number from 0 to 86,400"
        )
    return number
