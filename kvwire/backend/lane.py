"""The contract between kvwire and a data path beside a connection's control link.

A connection has one control link, which carries every frame in order. Beside it there
may be *lanes*, which carry payload and nothing else. For each payload on a lane, a
frame on the control link names the lane, the number of bytes, their destination, and a
*descriptor*: up to :data:`~kvwire.limits.DESCRIPTOR_BYTES_MAX` bytes that the sender's
lane made and only the receiver's lane reads. So the protocol stays one ordered stream,
the receiver names every destination, and a lane may be anything that moves bytes:

============== ======================== ==================================
transport      descriptor                   what happens
============== ======================== ==================================
another socket nothing: first in first  ``writev`` here, ``readv`` there
               out
same host      where the bytes lie      the receiver reads them
UCX            the tag                  both sides post; rendezvous
NCCL           nothing: same order      both sides post
============== ======================== ==================================

A lane is opened by one exchange on the control link, protected by its authentication::

    client                                  server
      lane = open_lane(context)
      lane.bootstrap               ->         lane = open_lane(context)
                                              await lane.join(bootstrap)
                                   <-         lane.bootstrap
      await lane.join(bootstrap)
      "it is up"                   ->         both send from now on

If a side's ``open_lane`` or ``join`` raises BackendUnavailable, its reason is reported
and the next transport is tried.

A lane makes these promises, and the conformance kit checks them:

1. Payload memory belongs to the lane from ``send`` until ``payload_sent``, and from
   ``receive`` until ``payload_received``. Outside these spans the lane neither reads
   nor writes it.
2. Every payload that was sent and received under the same descriptor leads to both
   callbacks, unless ``lane_closed`` is called.
3. If ``join`` has returned, ``lane_closed`` is called exactly once, as the last
   callback, and only when the lane no longer touches memory. Until the lane can prove
   that, it does not make this call, and its memory stays in quarantine.
4. Callbacks run on the loop's thread, never from inside ``send``, ``receive``,
   ``close`` or ``abort``. ``flush`` may call them. If a handler raises, its lane ends.
5. Payloads may arrive in a different order; the core counts them.
6. A lane never decides what a completion means, never retries, never drops silently.

A lane may also read memory that its peer has exposed, without the peer's help:
:mod:`kvwire.backend.window`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwire.backend.landing import Landing
from kvwire.backend.window import WindowMemory, WindowReader
from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Payload
from kvwire.limits import MIB
from kvwire.types import Address, MemoryKind, OneSidedWindows, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneContext:
    """The parameters with which a backend opens a lane.

    Attributes:
        role: Whether this side opened the connection.
        number: The lane's number, 1 and up, the same on both sides.
        secret: 32 bytes that only the two sides know, new for each lane.
        remote_address: The peer's address on the control link, if its transport knows
            it.
        settings: The user's settings for this backend, by name.
        windows: The peers that may read windows of this process one-sidedly. With
            "user", a lane may only expose windows if its transport proves that the
            peer's process belongs to the same user.
    """

    role: Role
    number: int
    secret: bytes = field(repr=False)
    remote_address: Address | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    windows: OneSidedWindows = "user"


class LaneHandler(ABC):
    """Receives the events of a lane. Implemented by kvwire."""

    @abstractmethod
    def payload_sent(self, lane: Lane, token: object) -> None:
        """Called when the lane no longer needs the memory of ``token``."""

    @abstractmethod
    def payload_received(self, lane: Lane, landing: Landing) -> None:
        """Called when a ``receive`` is complete: payload is in place, or dropped."""

    @abstractmethod
    def lane_writable(self, lane: Lane) -> None:
        """Called when ``queued_bytes`` falls to 0 after a ``flush`` that left some."""

    @abstractmethod
    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        """Called when the lane has ended and no longer touches memory.

        ``error`` is None if this side ended the lane. If neither
        ``payload_sent`` nor ``payload_received`` was called for a payload, it may or
        may not have arrived.
        """


class Lane(ABC):
    """A data path for payload beside a control link. Used on its loop only."""

    bytes_min: int = 1
    """The smallest payload for this lane; smaller ones go over the control link."""
    intact: bool = False
    """Whether payload passes through memory only: no cable, switch or socket."""
    span_bytes: int = 0
    """The most payload for one ``send``, if it lies in large pieces.

    0 stands for one chunk, whose size both sides have agreed on. A larger value helps a
    transport in which each payload has a fixed cost in time.
    """
    window_bytes: int = 4 * MIB
    """The most payload in flight: at least the lane's rate times its round trip.

    A larger window only delays more urgent payload that comes later.
    """
    memory_kinds: frozenset[MemoryKind] = frozenset({MemoryKind.HOST})
    """The kinds of memory in which payloads may lie.

    If a device's kind is missing, its memory is staged through the host. Without HOST,
    host memory travels on the control link.
    """
    reads_windows: bool = False
    """Whether ``expose`` and ``window`` may succeed on this lane."""
    reads_device_windows: bool = False
    """Whether the same is true for windows in device memory."""

    @property
    @abstractmethod
    def bootstrap(self) -> bytes:
        """Return bytes for the peer's ``join``, at most ``BOOTSTRAP_BYTES_MAX``."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Return a name of the data path for the transport report, such as "cma".

        It is also in the reason of a lane that did not open in time, and may then name
        what the lane waited for.
        """

    @abstractmethod
    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Connect to the peer's lane, given its ``bootstrap``.

        When it returns, ``send`` and ``receive`` are allowed, even if the peer's own
        ``join`` is still running. The bytes come from the peer and are not to be
        trusted.

        Raises:
            BackendUnavailable: The lanes cannot connect; the text gives the reason. The
                lane is then closed, without ``lane_closed``.

        Cancel safety: safe, the lane is then closed without ``lane_closed``.
        """

    @abstractmethod
    def send(self, payload: Payload, token: object) -> bytes:
        """Queue a payload, lent until ``payload_sent``; return its descriptor.

        On a lane that has ended this returns b"", and ``lane_closed`` reports the
        reason.
        """

    @abstractmethod
    def receive(self, descriptor: bytes, landing: Landing) -> None:
        """Queue the arrival of ``landing.length`` bytes that the peer has sent.

        They go to ``landing.payload``, or are dropped if that is None. Descriptors come
        in the order in which the peer's ``send`` returned them.

        Raises:
            ProtocolError: The descriptor is invalid. An empty descriptor comes from a
                lane that has ended; it ends this lane too, but not the connection.
        """

    @abstractmethod
    def flush(self) -> None:
        """Move as much as the transport accepts now; never waits for the peer."""

    @abstractmethod
    def close(self) -> None:
        """End the lane after moving everything that is queued."""

    @abstractmethod
    def abort(self) -> None:
        """End the lane now. Never raises; ``lane_closed`` follows when it is quiet.

        A lane that never joined ends too, without ``lane_closed``; a ``join`` that is
        in progress raises.
        """

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Return the bytes handed to ``send`` that the transport has not taken yet."""

    @property
    @abstractmethod
    def received_bytes(self) -> int:
        """Return the bytes received since ``join``; any change is a sign of life."""

    # --- windows: see kvwire.backend.window -------------------------------------------

    def expose(self, memory: WindowMemory) -> bytes:
        """Let the peer's lane read a window until ``conceal``; return its description.

        The memory stays where it is until then. Exposing the same memory again returns
        the same description, and one ``conceal`` ends it.

        Returns:
            Bytes for the peer's ``window``, at most ``DESCRIPTOR_BYTES_MAX``.

        Raises:
            BackendUnavailable: The peer cannot or may not read it over this lane; the
                text has the reason. The window is then read by messages.
        """
        raise BackendUnavailable(f"{type(self).__name__} cannot read windows")

    def conceal(self, memory: WindowMemory) -> None:  # noqa: B027 - nothing to end
        """End the reads that ``expose`` allowed; does nothing for other windows.

        Called once the peer has reported that it no longer reads, or is gone. Readers
        that remain at the peer are ended.
        """

    def window(self, description: bytes, memory: WindowMemory) -> WindowReader:
        """Return a reader of a window that the peer's lane has exposed.

        Args:
            description: The result of the peer's ``expose``; not to be trusted.
            memory: The peer's addresses; not to be trusted either.

        Raises:
            BackendUnavailable: It cannot be read over this lane; the text has the
                reason.
            ProtocolError: The description is invalid.
        """
        raise BackendUnavailable(f"{type(self).__name__} cannot read windows")
