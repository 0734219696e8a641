"""A lane of two directions, each with its own communicator and thread.

Descriptors are empty: both sides queue the payloads of a direction in the same order.
If a payload is in memory that the library cannot move (host memory), the lane ends with
this reason, and the core sends the payload by the control link if that is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvwire.backend import Landing, Payload
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.errors import BackendUnavailable, ProtocolError
from kvwire.limits import KIB, MIB
from kvwire.types import MemoryKind, Role
from kvwire_nccl.direction_state import DirectionState, PayloadMove, refusal
from kvwire_nccl.driver import Driver
from kvwire_nccl.nccl import Nccl

# --- bootstraps, which the endpoints exchange before anything is initialised ----------

# Each side names the library it has loaded, because NCCL refuses a peer with another
# version only after both have begun, and not always with a clear reason. The bootstrap
# travels in the authenticated handshake. The directions' names are secret: anybody who
# knows one could take the peer's place.
_MAGIC: Final = b"KVNCCL01"
# magic, length of the library's name, lengths of the two directions' names
_HEAD: Final = struct.Struct("<8sBHH")
_LIBRARY_BYTES_MAX: Final = 64
# NCCL's unique ids have 128 bytes.
_NAME_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class NcclBootstrap:
    """The first message from one lane endpoint to the other."""

    library: str
    there: bytes = b""
    back: bytes = b""

    def encode(self) -> bytes:
        """Return it as bytes."""
        library = self.library.encode()[:_LIBRARY_BYTES_MAX]
        head = _HEAD.pack(_MAGIC, len(library), len(self.there), len(self.back))
        return head + library + self.there + self.back

    @classmethod
    def decode(cls, raw: bytes) -> NcclBootstrap:
        """Read a peer's bootstrap.

        Raises:
            BackendUnavailable: It is malformed or of another version.
        """
        if len(raw) < _HEAD.size:
            raise _unreadable(f"{len(raw)} bytes")
        magic, library, there, back = _HEAD.unpack_from(raw)
        if magic != _MAGIC:
            raise _unreadable(
                f"it begins with {magic!r}, and this side's with {_MAGIC!r}; both "
                f"sides need the same kvwire"
            )
        if library > _LIBRARY_BYTES_MAX or max(there, back) > _NAME_BYTES_MAX:
            raise _unreadable("with names too long")
        if len(raw) != _HEAD.size + library + there + back:
            raise _unreadable(f"of {len(raw)} bytes, which do not match its lengths")
        rest = raw[_HEAD.size :]
        try:
            name = rest[:library].decode()
        except UnicodeDecodeError:
            raise _unreadable("with a name that is not text") from None
        return cls(name, rest[library : library + there], rest[library + there :])

    def require_same_library(self, own: str) -> None:
        """Refuse a peer that has loaded another library.

        Raises:
            BackendUnavailable: The names or versions differ.
        """
        if self.library != own:
            raise BackendUnavailable(
                f"{own} is loaded here and {self.library!r} at the peer; both sides "
                f"need the same version"
            )


def _unreadable(what: str) -> BackendUnavailable:
    return BackendUnavailable(f"the peer's bootstrap cannot be read: {what}")


_log = logging.getLogger("kvwire.nccl")

# For each operation NCCL launches a kernel on both sides. The launch takes some 10 us,
# in which the slowest link between two GPUs moves this much.
_BYTES_MIN: Final = 64 * KIB
_WINDOW_BYTES: Final = 16 * MIB


class NcclLane(Lane):
    """One endpoint of a lane."""

    bytes_min = _BYTES_MIN
    window_bytes = _WINDOW_BYTES

    def __init__(self, context: LaneContext, library: Nccl) -> None:
        self.memory_kinds: frozenset[MemoryKind] = library.kinds
        self._library = library
        self._loop = asyncio.get_running_loop()
        self._role = context.role
        self._number = context.number
        self._own = NcclBootstrap(library.version)
        if self._role is Role.CLIENT:
            self._own = NcclBootstrap(library.version, library.name(), library.name())
        self._handler: LaneHandler | None = None
        self._outbound: Driver | None = None
        self._inbound: Driver | None = None
        self._gone = 0
        self._error: Exception | None = None
        self._sending: list[PayloadMove] = []
        self._receiving: list[PayloadMove] = []
        self._queued_bytes = 0
        self._received_bytes = 0
        self._left_some = False
        self._closing = False
        self._ended = False

    @property
    def bootstrap(self) -> bytes:
        return self._own.encode()

    @property
    def description(self) -> str:
        return self._library.version

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Start creating the communicators, which connect in the background.

        Cancel safety: safe, it does not wait.
        """
        if self._ended:
            raise BackendUnavailable("the lane was aborted")
        try:
            theirs = NcclBootstrap.decode(bootstrap)
            theirs.require_same_library(self._library.version)
            names = self._own if self._role is Role.CLIENT else theirs
            if not names.there or not names.back:
                raise BackendUnavailable("the peer's bootstrap names no directions")
            there = self._driver(names.there, sends=self._role is Role.CLIENT)
            back = self._driver(names.back, sends=self._role is Role.SERVER)
        except BaseException:
            self._ended = True
            raise
        self._handler = handler
        client = self._role is Role.CLIENT
        self._outbound, self._inbound = (there, back) if client else (back, there)
        self._outbound.start()
        self._inbound.start()

    def send(self, payload: Payload, token: object) -> bytes:
        if self._ended or self._closing:
            return b""
        reason = refusal(payload, self.memory_kinds)
        if reason:
            self.abort(BackendUnavailable(f"{self._library.version}: {reason}"))
            return b""
        self._sending.append(  # bounded: LANE_PAYLOADS_MAX
            PayloadMove(payload, payload.nbytes, token)
        )
        self._queued_bytes += payload.nbytes
        return b""

    def receive(self, descriptor: bytes, landing: Landing) -> None:
        if descriptor:
            raise ProtocolError(
                "KVW-LN-07",
                f"the descriptor has {len(descriptor)} bytes; over nccl it must be "
                "empty",
            )
        if self._ended:
            return
        reason = refusal(landing.payload, self.memory_kinds)
        if reason:
            self.abort(BackendUnavailable(f"{self._library.version}: {reason}"))
            return
        self._receiving.append(  # bounded: LANE_PAYLOADS_MAX
            PayloadMove(landing.payload, landing.length, landing)
        )

    def flush(self) -> None:
        if self._ended or self._outbound is None or self._inbound is None:
            return
        sending = self._sending
        self._sending = []
        receiving = self._receiving
        self._receiving = []
        if sending:
            self._left_some = True
            self._outbound.submit(sending)
        if receiving:
            self._inbound.submit(receiving)

    def close(self) -> None:
        self.flush()
        self._closing = True
        if self._outbound is None or self._inbound is None:
            self.abort()
            return
        # The peer may still announce payloads to us, which end when this endpoint ends.
        self._outbound.close()
        self._inbound.close()

    # --- inside -----------------------------------------------------------------------

    def _driver(self, name: bytes, *, sends: bool) -> Driver:
        library = self._library
        return Driver(
            library.open(name, sends),
            DirectionState(
                start_timeout_s=library.start_timeout_s,
                move_timeout_s=library.move_timeout_s,
            ),
            f"kvwire nccl {self._number} {'out' if sends else 'in'}",
            call_soon=self._loop.call_soon_threadsafe,
            moved=self._sent if sends else self._received,
            gone=self._driver_gone,
        )

    def _sent(self, jobs: list[PayloadMove]) -> None:
        for job in jobs:
            if self._ended:
                return
            self._queued_bytes -= job.nbytes
            if self._handler is not None:
                self._report(self._handler.payload_sent, job.token)
        if self._left_some and not self._queued_bytes and self._handler is not None:
            self._left_some = False
            self._report(self._handler.lane_writable)

    def _received(self, jobs: list[PayloadMove]) -> None:
        for job in jobs:
            self._received_bytes += job.nbytes
            if self._handler is not None:
                self._report(self._handler.payload_received, job.token)

    def _report(self, call: Callable[..., None], *what: object) -> None:
        """Call a method of the handler, unless the lane has ended."""
        if self._ended:
            return
        try:
            call(self, *what)
        except Exception as exc:  # noqa: BLE001 - a handler that raises loses its lane
            _log.error("a lane's handler raised; the lane is aborted", exc_info=exc)
            self.abort(exc)

    def abort(self, error: Exception | None = None) -> None:
        """End both directions; `lane_closed` follows when both are quiet."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._sending.clear()
        self._receiving.clear()
        self._queued_bytes = 0
        if self._outbound is not None and self._inbound is not None:
            self._outbound.abort()
            self._inbound.abort()

    def _driver_gone(self, error: Exception | None) -> None:
        """End the other direction when one is quiet, and report the end after both."""
        self._gone += 1
        if error is not None and not self._ended:
            self.abort(error)
        if self._gone < 2:
            return
        self._ended = True
        handler = self._handler
        self._handler = None
        if handler is not None:
            try:
                handler.lane_closed(self, self._error)
            except Exception:  # noqa: BLE001 - there is no more to end
                _log.exception("a lane's handler raised in lane_closed")
