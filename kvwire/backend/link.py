"""The contract between kvwire and a transport.

All backends rest on one idea: **a link moves frames, and the receiving side names the
destination of a payload after it has seen the frame's header.** A frame is a header of
exactly :data:`~kvwire.limits.HEADER_BYTES` bytes and a payload of any length, zero
included. The backend does not know what a header means. It hands the 32 bytes to its
:class:`LinkHandler` and gets a :class:`Landing` back, with the number of payload bytes
that follow and their destination: a view, a list of fragments, or none.

This fits a socket (header into a scratch buffer, payload straight into its
destination), UCX active messages (header with the rendezvous, data received into the
memory that the callback names), a same-host read (the consumer reads once it knows both
fragment lists) and NCCL (the receive is posted once the header has arrived by other
means).

A backend makes these promises, and the conformance kit checks them:

1. A link's frames arrive complete, once, and in the order in which they were sent.
2. Payload memory belongs to the link from ``send`` until ``frame_sent`` (sender), and
   from ``header_received`` until ``body_received`` (receiver). Outside these spans the
   link neither reads nor writes it. Freeing memory safely depends on this.
3. ``link_closed`` is called exactly once per started link, and is its last callback.
   Afterwards the link touches no memory, whatever was in flight. Frames without
   ``frame_sent`` may or may not have arrived.
4. Callbacks run on the loop's thread, never from inside ``start``, ``send``, ``close``
   or ``abort``, so a handler needs no lock and is never re-entered. ``flush`` may call
   ``frame_sent``. After ``abort`` the link hands over no more headers and bodies.
5. If a handler raises, its link ends, and ``link_closed`` gets the exception.
6. A link never decides what a completion means, never retries, never drops silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Literal, Protocol

from kvwire.backend.landing import Landing
from kvwire.backend.lane import Lane, LaneContext
from kvwire.errors import BackendUnavailable, ConnectionLost, UsageError, nearest
from kvwire.kv.fragments import Payload
from kvwire.types import Address, MemoryKind, PeerIdentity, Role

if TYPE_CHECKING:
    import ssl

API_VERSION: Final = 1
"""The version of the contract; raised if backends for the previous version would fail.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of a backend; the core relies on nothing else.

    Attributes:
        links: Whether it has its own addresses and carries control links.
        lanes: Whether it carries data beside any transport's control link.
        same_process: Whether both ends are in one process.
        same_host: Whether it works only between processes on one host.
        memory_kinds: The kinds of memory that a payload may be in.
        tls: Whether it can use TLS for everything that it moves; see
            :meth:`Backend.use_tls`.
    """

    links: bool = True
    lanes: bool = False
    same_process: bool = False
    same_host: bool = False
    memory_kinds: frozenset[MemoryKind] = field(
        default_factory=lambda: frozenset({MemoryKind.HOST})
    )
    tls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a backend can run here, and the remedy if it cannot.

    Attributes:
        available: Whether it can be used now.
        reason: One line: the version in use, or what is missing.
        remedy: The user's remedy, such as a ``pip install`` line; or "".
    """

    available: bool
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about this machine that concerns a transport; ``kvwire doctor`` prints it.

    Attributes:
        name: The subject, in a few words: "ptrace scope", "receive buffer".
        state: ``"ok"``; ``"warn"``: the transport works, but slower or not with every
            peer; ``"missing"``: it does not work like this.
        text: One line: the fact, and its consequence.
        remedy: The user's remedy, such as an install line; or "".
    """

    name: str
    state: Literal["ok", "warn", "missing"]
    text: str
    remedy: str = ""


class TlsCredentials(Protocol):
    """This side's certificate and accepted peers, for a backend with ``tls``."""

    def wrap(
        self,
        role: Role,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        name: str = "",
    ) -> ssl.SSLObject:
        """Make one end of a TLS connection, before its handshake.

        A client tells ``name``, the ``name`` of the address that it dials, so that
        routers between the two ends can go by it.
        """

    def proven(self, tls: ssl.SSLObject, role: Role) -> PeerIdentity:
        """Return the peer's identity, once the handshake is over.

        Raises:
            AuthenticationFailed: This side does not accept the peer.
        """


class TlsFiles(Protocol):
    """Credentials in files, which may change while links come and go."""

    def current(self) -> TlsCredentials:
        """Return the credentials in the files now; each link calls this once."""


class LinkHandler(ABC):
    """Receives the events of a link, and understands its frames.

    Implemented by kvwire.
    """

    @abstractmethod
    def header_received(self, link: Link, header: memoryview) -> Landing:
        """Called with a header; returns the destination of the payload.

        ``header`` is valid only during the call. If the handler refuses the frame it
        aborts the link before it returns, and the link then ignores the landing.
        """

    @abstractmethod
    def body_received(self, link: Link, landing: Landing) -> None:
        """Called when a payload is in place, even one of 0 bytes."""

    @abstractmethod
    def frame_sent(self, link: Link, token: object) -> None:
        """Called when the link no longer needs the memory of ``token``."""

    @abstractmethod
    def link_writable(self, link: Link) -> None:
        """Called when ``queued_bytes`` falls to 0 after a ``flush`` that left some."""

    @abstractmethod
    def link_closed(self, link: Link, error: Exception | None) -> None:
        """Called when the link has ended; ``error`` is None after a clean end."""


class LaneArrived(ConnectionLost):
    """The end of an inbound link that turned out to be a lane's; nobody was lost."""


class Link(ABC):
    """Moves frames between two peers. Not thread-safe: used on its loop only."""

    pausable: bool = False
    """Whether it has ``pause`` and ``resume``, which caches in device memory need."""
    brings_memory: bool = False
    """Whether it hands over received payloads in memory of its own, if a
    :class:`Landing` may be anywhere."""

    @abstractmethod
    def start(self, handler: LinkHandler) -> None:
        """Begin to receive. Called once, before anything is sent."""

    @abstractmethod
    def send(
        self,
        header: bytes,
        payload: Payload | None = None,
        token: object | None = None,
    ) -> None:
        """Queue one frame; nothing needs to move before :meth:`flush`.

        With a token, ``payload`` is lent to the link until ``frame_sent`` is called
        with that token. Without a token, ``payload`` is at most ``EAGER_BYTES_MAX``
        bytes and is free when the following ``flush`` returns: the link copies the part
        that it could not send. On a closed link this does nothing, since
        ``link_closed`` reports the end.
        """

    @abstractmethod
    def flush(self) -> None:
        """Move as much of the queue as the transport takes now; never blocks."""

    def send_now(
        self,
        header: bytes,
        payload: Payload | None = None,
        token: object | None = None,
    ) -> bool:
        """Send one frame in this call if the transport takes all of it; else queue it.

        Returns:
            True if it was sent: ``payload`` is free, and ``frame_sent`` is not called
                for
            the token. False: it is queued as by ``send``, and ``flush`` has to follow.
        """
        self.send(header, payload, token)
        return False

    @abstractmethod
    def close(self) -> None:
        """Send the queue, then end the link. Calling it again does no harm."""

    @abstractmethod
    def abort(self) -> None:
        """End the link now and drop the queue. Never raises."""

    def proven(self) -> PeerIdentity | None:
        """Return the peer's identity as proved by TLS, or None on a link without TLS.

        It is known from the first header on.

        Raises:
            AuthenticationFailed: This side does not accept the peer.
        """
        return None

    @property
    def beginning(self) -> bytes:
        """Return the received bytes of an incomplete header, if the link keeps them."""
        return b""

    def pause(self) -> None:
        """Hand over no header until ``resume``; a payload in progress continues."""
        raise NotImplementedError

    def resume(self) -> None:
        """Continue after ``pause``; no callback runs inside this call."""
        raise NotImplementedError

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Return the queued bytes that the transport has not taken yet."""

    @property
    @abstractmethod
    def received_bytes(self) -> int:
        """Return the bytes received since the start; any change is a sign of life."""

    @property
    @abstractmethod
    def remote_address(self) -> Address | None:
        """Return the peer's address, if the transport knows it."""


class Listener(ABC):
    """Accepts links at an address."""

    @property
    @abstractmethod
    def address(self) -> Address:
        """Return the bound address, with the real port."""

    @abstractmethod
    async def close(self) -> None:
        """Stop accepting; accepted links stay open.

        Cancel safety: safe, the listener is closed either way.
        """


class Backend(ABC):
    """A transport; kvwire finds it through the entry-point group ``kvwire.backends``.

    The class is instantiated once per communicator, without arguments, on its loop.
    """

    scheme: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    capabilities: ClassVar[Capabilities]
    # The settings by name, each with its allowed values: the default comes first, and
    # an empty tuple allows any text.
    settings: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def rank(cls) -> int:
        """Return the rank among transports without a preference; lower goes first."""
        return 50

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Return whether it can run in this process now. Cheap; never raises."""

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        """Return further facts about this machine, for ``kvwire doctor``.

        May take some 100 ms and look at devices, kernel settings and libraries. Called
        whether or not the backend is available; never raises.
        """
        return ()

    @classmethod
    def check_settings(cls, given: Mapping[str, str]) -> None:
        """Refuse user settings that this backend does not have.

        Raises:
            UsageError: A name or a value is not in ``settings``; the text has the
                nearest one.
        """
        for name, value in given.items():
            if name not in cls.settings:
                known = nearest(name, cls.settings) if cls.settings else "it has none"
                raise UsageError(
                    f"backends.{cls.scheme}: unknown setting {name!r}; {known}"
                )
            choices = cls.settings[name]
            if choices and value not in choices:
                raise UsageError(
                    f"backends.{cls.scheme}: {name}={value!r}; "
                    f"{nearest(value, choices)}"
                )

    async def listen(
        self, address: Address, accept: Callable[[Link], None]
    ) -> Listener:
        """Listen on exactly ``address``; ``accept`` gets each link, not yet started.

        The host is numeric if other hosts can reach it, since kvwire has resolved
        names. A backend without links does not override this.

        Raises:
            OSError: The address cannot be bound.
            BackendUnavailable: It has no links.

        Cancel safety: safe, nothing stays bound.
        """
        raise self._has_no_links(address)

    async def connect(self, address: Address) -> Link:
        """Connect to ``address``; the link is not yet started.

        The host is numeric if other hosts can reach it: kvwire resolves names, and
        dials their addresses in turn. A backend without links does not override this.

        Raises:
            OSError: Nothing listens there, or it cannot be reached.
            BackendUnavailable: It has no links.

        Cancel safety: safe, a half-made link is closed.
        """
        raise self._has_no_links(address)

    def _has_no_links(self, address: Address) -> BackendUnavailable:
        return BackendUnavailable(
            f"{address}: {self.scheme} carries data beside a control link and has no "
            "addresses of its own; listen on and connect to tcp://..., with "
            f'transport="{self.scheme}"'
        )

    def use_tls(self, files: TlsFiles) -> None:
        """Use TLS for every link and lane; called before the first of them.

        Both sides present certificates. An accepted link gives its handler no byte
        before the TLS handshake is over. Called only with the capability ``tls``.
        """
        raise NotImplementedError

    def open_lane(self, context: LaneContext) -> Lane:
        """Prepare a data path beside a control link; see :mod:`kvwire.backend.lane`.

        Raises:
            BackendUnavailable: It has no lanes, or they cannot be used here.
        """
        raise BackendUnavailable(f"{self.scheme} carries no data beside another link")

    async def aclose(self) -> None:
        """Free the backend's own resources; its links have been closed before.

        Cancel safety: safe.
        """
        return
