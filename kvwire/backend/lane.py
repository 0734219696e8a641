"""The contract between kvwire and a data path beside a connection's control link.

A connection has one control link, which carries every frame in order. Beside it there
may be *lanes*, which carry payload and nothing else. What the payload of a lane is
travels on the control link, as a frame that says which lane, how many bytes, where they
belong, and a *descriptor*: up to :data:`~kvwire.limits.DESCRIPTOR_BYTES_MAX` bytes that
the sender's lane made and only the receiver's lane reads. So the protocol stays one
ordered stream, the receiver names every destination, and a lane may be anything that
moves bytes from there to here:

============== ======================== ==================================
transport      descriptor                   what happens
============== ======================== ==================================
another socket nothing: first in first  ``writev`` here, ``readv`` there
               out
same host      where the bytes lie      the receiver reads them
UCX            the tag                  both sides post; rendezvous
NCCL           nothing: same order      both sides post
============== ======================== ==================================

Coming up takes one exchange, on the control link and so under its authentication::

    client                                  server
      lane = open_lane(context)
      lane.bootstrap               ->         lane = open_lane(context)
                                              await lane.join(bootstrap)
              <- lane.bootstrap
      await lane.join(bootstrap)
      "it is up"                   ->         both send from now on

A side whose ``open_lane`` or ``join`` raises BackendUnavailable says why, and the next
transport is tried.

What a lane promises, and the conformance kit checks:

1. Payload memory belongs to the lane from ``send`` until ``payload_sent``, and from
   ``receive`` until ``payload_received``. Outside these spans the lane neither reads
   nor writes it.
2. Every payload that was sent and received under the same descriptor ends in both
   callbacks, or else ``lane_closed`` is called.
3. ``lane_closed`` is called exactly once if ``join`` returned, last of all callbacks,
   and only when the lane touches no memory any more. A lane that cannot prove this yet
   does not call it yet: its memory stays in quarantine.
4. Callbacks run on the loop's thread, never from inside ``send``, ``receive``,
   ``close`` or ``abort``. ``flush`` may call them. A handler that raises loses its
   lane.
5. Payloads may arrive in another order than they were sent in. The core counts.
6. A lane never decides what a completion means, never retries, never drops silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwire.backend.link import Landing, Payload
from kvwire.limits import MIB
from kvwire.types import Address, MemoryKind, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneContext:
    """Holds the parameters with which a backend opens a lane.

    Attributes:
        role: Whether this side opened the connection.
        number: The lane's number, 1 and up, the same on both sides.
        secret: 32 bytes that both sides know and nobody else, new for each lane.
        remote_address: Where the control link leads, as far as its transport knows.
        settings: The user's settings for this backend, by name.
    """

    role: Role
    number: int
    secret: bytes = field(repr=False)
    remote_address: Address | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


class LaneHandler(ABC):
    """Knows what the bytes of a lane are. Implemented by kvwire."""

    @abstractmethod
    def payload_sent(self, lane: Lane, token: object) -> None:
        """Note that the lane needs the memory of ``token`` no longer."""

    @abstractmethod
    def payload_received(self, lane: Lane, landing: Landing) -> None:
        """Note a ``receive`` in place, or dropped as asked."""

    @abstractmethod
    def lane_writable(self, lane: Lane) -> None:
        """``queued_bytes`` has fallen to 0 after a ``flush`` that left some."""

    @abstractmethod
    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        """Note that the lane touches no memory; ``error`` unless we ended it.

        Payloads without ``payload_sent`` or ``payload_received`` have not arrived as
        far as this side can tell.
        """


class Lane(ABC):
    """Moves payload beside a control link. Used on its loop only."""

    bytes_min: int = 1
    """Smaller payloads travel on the control link: there they are faster."""
    intact: bool = False
    """Nothing but memory is on the payload's way: no cable, no switch, no socket."""
    span_bytes: int = 0
    """Payload that may come in one ``send`` where it lies in large pieces.

    0 is a chunk, as large as both sides have agreed on. More pays where a payload costs
    time beside its bytes.
    """
    window_bytes: int = 4 * MIB
    """Payload that may be under way: the lane's rate times its round trip, and more.

    A larger window only delays what is more urgent and comes later.
    """
    memory_kinds: frozenset[MemoryKind] = frozenset({MemoryKind.HOST})
    """Where payloads may lie.

    To a lane that does not name its kind, device memory comes by way of the host. Host
    memory goes on the control link where this has no HOST.
    """

    @property
    @abstractmethod
    def bootstrap(self) -> bytes:
        """Return what the peer's lane needs, at most ``BOOTSTRAP_BYTES_MAX``."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Return for the transport report what moves the bytes, such as "cma"."""

    @abstractmethod
    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Come up with the peer's lane, of which these bytes are the bootstrap.

        When it returns, ``send`` and ``receive`` are allowed, even where the peer is
        not through with its own ``join``. The peer's bytes are not to be trusted.

        Raises:
            BackendUnavailable: It cannot, with the reason; the lane is then closed and
                there is no ``lane_closed``.

        Cancel safety: safe, the lane is then closed without ``lane_closed``.
        """

    @abstractmethod
    def send(self, payload: Payload, token: object) -> bytes:
        """Queue a payload, lent until ``payload_sent``; return its descriptor.

        On a lane that has ended this returns b"" and ``lane_closed`` tells.
        """

    @abstractmethod
    def receive(self, descriptor: bytes, landing: Landing) -> None:
        """Queue the arrival of ``landing.length`` bytes that the peer has sent.

        They go to ``landing.payload``, or nowhere if that is None. Descriptors come in
        the order in which the peer's ``send`` returned them.

        Raises:
            ProtocolError: The descriptor is not one that the peer's lane would make. An
                empty one, as of a lane that has ended, then costs this lane alone.
        """

    @abstractmethod
    def flush(self) -> None:
        """Move as much as can be moved now; never blocks for the peer."""

    @abstractmethod
    def close(self) -> None:
        """End the lane once what is queued has moved."""

    @abstractmethod
    def abort(self) -> None:
        """End the lane now. Never raises. ``lane_closed`` follows when it is quiet.

        Also ends a lane that never joined, without ``lane_closed``; a ``join`` that is
        under way then raises.
        """

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Return the bytes handed to ``send`` and not yet taken by the transport."""

    @property
    @abstractmethod
    def received_bytes(self) -> int:
        """Return the bytes received since it came up; any change is a sign of life."""
