"""NCCL by nccl4py: a non-blocking communicator of two ranks for each direction.

Written against nccl4py 0.6 and NCCL 2.28 to 2.30. What of it has run on a GPU,
docs/topics/gpu.md says.

A call on a non-blocking communicator may return before it is done: until its state is
"success" again, neither it nor its stream may be given anything else. So a movement has
two parts: the call, and, once the state says that it was taken, the event behind it.
"""

from __future__ import annotations

from typing import Any, Final

from kvwire.backend import Payload
from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.memory.cuda.external import DeviceArray
from kvwire.memory.device.ops import DeviceOps, Event, Stream, device_ops
from kvwire.types import Device, MemoryKind
from kvwire_nccl.library import (
    CollectiveLibrary,
    Move,
    MoveFailed,
    MoveProgress,
    Pipe,
)

# ncclResult_t of nccl.h.
_SUCCESS: Final = 0
_IN_PROGRESS: Final = 7
# Thread blocks of a communicator: two move what a PCIe or network link carries, and
# more would be taken from the model.
_CTAS_MAX: Final = 4


class Nccl(CollectiveLibrary):
    """See CollectiveLibrary."""

    kinds = frozenset({MemoryKind.CUDA})

    def __init__(self, index: int) -> None:
        self.core = load()
        self.version = loaded_version(self.core)
        self.ops: DeviceOps = device_ops(Device(MemoryKind.CUDA, index))

    def name(self) -> bytes:
        """See CollectiveLibrary: NCCL's unique id."""
        try:
            return bytes(self.core.get_unique_id())
        except Exception as exc:
            raise BackendUnavailable(f"NCCL gives no unique id: {exc}") from exc

    def open(self, name: bytes, sends: bool) -> Pipe:
        try:
            unique_id = self.core.UniqueId.from_bytes(name)
        except Exception as exc:
            raise BackendUnavailable(f"the peer's unique id: {exc}") from exc
        return NcclPipe(self, unique_id, sends=sends)


def load() -> Any:
    """Return nccl4py's public module."""
    try:
        import nccl.core  # noqa: PLC0415 - optional
    except ImportError as exc:
        raise BackendUnavailable(f"nccl4py does not load: {exc}") from None
    return nccl.core


def loaded_version(core: Any) -> str:
    """Return the version of libnccl, which torch may have brought."""
    library = core.get_version().libnccl
    if library is None:
        raise BackendUnavailable("no libnccl.so.2 is found")
    return f"NCCL {library.version}"


class NcclPipe(Pipe):
    """See Pipe."""

    def __init__(self, library: Nccl, unique_id: Any, *, sends: bool) -> None:
        self._library = library
        self._unique_id = unique_id
        self._sends = sends
        self._comm: Any = None
        self._stream: Stream | None = None

    def begin(self) -> None:
        from cuda.core import Device as CudaDevice  # noqa: PLC0415 - comes with nccl4py

        core = self._library.core
        # Of this thread: NCCL binds the communicator to the current device.
        CudaDevice(self._library.ops.device.index).set_current()
        self._stream = self._library.ops.stream()
        config = core.NCCLConfig(blocking=False, min_ctas=1, max_ctas=_CTAS_MAX)
        self._comm = core.Communicator()
        rank = 0 if self._sends else 1
        self._comm.initialize(2, rank, self._unique_id, config)

    def is_up(self) -> bool:
        return self.taken()

    def taken(self) -> bool:
        """Tell whether the communicator is ready for another call."""
        state = int(self._comm.get_async_error())
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise MoveFailed(f"NCCL: {self._library.core.get_error_string(state)}")
        return state == _SUCCESS

    def move(self, payload: Payload | None, nbytes: int) -> Move:
        assert self._stream is not None
        assert not isinstance(payload, memoryview), "refused before"
        move = NcclMove(self, self._stream, payload, nbytes, sends=self._sends)
        array = DeviceArray(int(move.packed.addresses[0]), (nbytes,), "|u1")
        if self._sends:
            self._comm.send(array, 1, stream=self._stream.pointer)
        else:
            self._comm.recv(array, 0, stream=self._stream.pointer)
        return move

    def check(self) -> None:
        self.taken()

    def abort(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort()
        if self._stream is not None:
            # What was gathered or scattered around it may still run.
            self._stream.record().synchronize()
            self._stream.close()


class NcclMove(Move):
    """See Move."""

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
        if self._event is None:
            if not self._pipe.taken():
                return MoveProgress.QUEUED
            if self._into is not None:
                self._stream.scatter(self.packed, self._into)
            self._event = self._stream.record()
        return MoveProgress.DONE if self._event.query() else MoveProgress.LAUNCHED
