"""The contract between kvwire and a transport.

One idea carries every backend: **a link moves frames, and the receiving side names the
destination of a payload after it has seen the frame's header.** A frame is a header of
exactly :data:`~kvwire.limits.HEADER_BYTES` bytes and a payload of any length, zero
included. The backend does not know what a header means. It hands the 32 bytes to its
:class:`LinkHandler` and gets a :class:`Landing` back, which says how many payload bytes
follow and where they go: into a view, into a list of fragments, or nowhere.

That one shape fits a socket (header into scratch, payload straight into its
destination), UCX active messages (header with the rendezvous, data received into what
the callback names), a same-host read (the consumer reads once it knows both fragment
lists) and NCCL (the receive is posted when the header has arrived beside it).

What a backend promises, and the conformance kit checks:

1. Frames of one link arrive whole, once, and in the order they were sent.
2. Payload memory belongs to the link from ``send`` until ``frame_sent`` (sender), and
   from ``header_received`` until ``body_received`` (receiver). Outside these spans the
   link neither reads nor writes it. That is what quiescence is built on.
3. ``link_closed`` is called exactly once per started link, last of all callbacks. After
   it the link touches no memory, whatever was in flight; frames without ``frame_sent``
   then have an unknown fate.
4. Callbacks run on the loop's thread, never from inside ``start``, ``send``, ``close``
   or ``abort``, so a handler needs no lock and is never re-entered. ``flush`` may call
   ``frame_sent``. After ``abort`` no header and no body is handed over any more.
5. A handler that raises loses its link: ``link_closed`` gets the exception.
6. A link never decides what a completion means, never retries, never drops silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Literal, Protocol

from kvwire.errors import BackendUnavailable, UsageError, nearest
from kvwire.kv.fragments import Fragments
from kvwire.types import Address, MemoryKind, PeerIdentity, Role

if TYPE_CHECKING:
    import ssl

    from kvwire.backend.lane import Lane, LaneContext

API_VERSION: Final = 1
"""Raised when a backend written for the previous contract would misbehave."""

Payload = memoryview | Fragments
"""Bytes in memory: one C-contiguous byte view (format "B"), or many fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Says what a backend can do; the core plans with this and nothing else.

    Attributes:
        links: It carries control links: it has addresses of its own.
        lanes: It carries data beside the control link of any transport.
        same_process: Both ends live in one process.
        same_host: Works only between processes of one host.
        memory_kinds: Kinds of memory a payload may lie in.
        tls: It can put what it moves inside TLS; see :meth:`Backend.use_tls`.
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
    """Says whether a backend can run here, and if not, what would change that.

    Attributes:
        available: It can be used now.
        reason: One line: the version in use, or what is missing.
        remedy: What the user can do about it, such as a ``pip install`` line; or "".
    """

    available: bool
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """States a fact of this machine for a transport; ``kvwire doctor`` prints it.

    Attributes:
        name: What was looked at, in a few words: "ptrace scope", "receive buffer".
        state: ``"ok"``; ``"warn"``: it works, but slower or not with every peer;
            ``"missing"``: it does not work without.
        text: One line: what was found, and what follows from it.
        remedy: What the user can do about it, such as an install line; or "".
    """

    name: str
    state: Literal["ok", "warn", "missing"]
    text: str
    remedy: str = ""


class Landing:
    """Says where the payload of one incoming frame goes. Subclass it freely.

    Attributes:
        length: Payload bytes that follow the header.
        payload: Their destination, of exactly ``length`` bytes; None drops them.
    """

    __slots__ = ("length", "payload")

    def __init__(self, length: int, payload: Payload | None) -> None:
        self.length: int = length
        self.payload: Payload | None = payload


class TlsCredentials(Protocol):
    """Names this side and whom it accepts, for the links of a backend with ``tls``."""

    def wrap(
        self, role: Role, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> ssl.SSLObject:
        """Make one end of a TLS connection, before its handshake."""

    def proven(self, tls: ssl.SSLObject, role: Role) -> PeerIdentity:
        """Return the peer's identity, once the handshake is over.

        Raises:
            AuthenticationFailed: Nobody whom this side accepts.
        """


class TlsFiles(Protocol):
    """Credentials in files that may change while links come and go."""

    def current(self) -> TlsCredentials:
        """Return what the files say now; each link asks once."""


class LinkHandler(ABC):
    """Knows what the frames of a link mean. Implemented by kvwire."""

    @abstractmethod
    def header_received(self, link: Link, header: memoryview) -> Landing:
        """Take a header; return where its payload goes.

        ``header`` is valid only during the call. If the handler refuses the frame it
        aborts the link before it returns, and the link then ignores the landing.
        """

    @abstractmethod
    def body_received(self, link: Link, landing: Landing) -> None:
        """Take a payload that is in place; one of 0 bytes as well."""

    @abstractmethod
    def frame_sent(self, link: Link, token: object) -> None:
        """Note that the link needs the memory of ``token`` no longer."""

    @abstractmethod
    def link_writable(self, link: Link) -> None:
        """``queued_bytes`` has fallen to 0 after a ``flush`` that left some."""

    @abstractmethod
    def link_closed(self, link: Link, error: Exception | None) -> None:
        """Note the link's end; ``error`` is None after a clean one."""


class Link(ABC):
    """Moves frames between two peers. Not thread-safe: used on its loop only."""

    pausable: bool = False
    """Whether it has ``pause`` and ``resume``; caches in device memory need them."""

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

        With a token, ``payload`` is lent to the link until ``frame_sent`` names the
        token. Without one, ``payload`` is at most ``EAGER_BYTES_MAX`` bytes and is free
        when the following ``flush`` returns: the link copies what it could not send. On
        a closed link this does nothing, since ``link_closed`` tells.
        """

    @abstractmethod
    def flush(self) -> None:
        """Move as much of the queue as the transport takes now; never blocks."""

    def send_now(self, header: bytes, payload: Payload | None = None) -> None:
        """Send one small frame, as ``send`` without a token and ``flush`` do."""
        self.send(header, payload)
        self.flush()

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, then end the link. More than one call does no harm."""

    @abstractmethod
    def abort(self) -> None:
        """End the link now and drop what is queued. Never raises."""

    def proven(self) -> PeerIdentity | None:
        """Return the peer's identity proved by TLS, from the first header on.

        None on a link that proves nothing.

        Raises:
            AuthenticationFailed: Nobody whom this side accepts.
        """
        return None

    @property
    def beginning(self) -> bytes:
        """Return the bytes of a header that has not come in whole, if it keeps them."""
        return b""

    def pause(self) -> None:
        """Hand over no further header until ``resume``; a payload under way goes on."""
        raise NotImplementedError

    def resume(self) -> None:
        """Go on after ``pause``; as ever, no callback comes from inside the call."""
        raise NotImplementedError

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Return the bytes queued and not yet taken by the transport."""

    @property
    @abstractmethod
    def received_bytes(self) -> int:
        """Return the bytes received since the start; any change is a sign of life."""

    @property
    @abstractmethod
    def remote_address(self) -> Address | None:
        """Return where the peer is, as far as the transport knows."""


class Listener(ABC):
    """Accepts links at an address."""

    @property
    @abstractmethod
    def address(self) -> Address:
        """Return the bound address, with the real port."""

    @abstractmethod
    async def close(self) -> None:
        """Stop accepting; links already accepted live on.

        Cancel safety: safe, the listener is closed either way.
        """


class Backend(ABC):
    """Implements a transport; found through the group ``kvwire.backends``.

    The class is instantiated once per communicator, without arguments, on its loop.
    """

    scheme: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    capabilities: ClassVar[Capabilities]
    # Its settings: what each may be, the default first; nothing if that is open.
    settings: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def rank(cls) -> int:
        """Return its place where no user has a preference: lower goes first."""
        return 50

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Tell whether it can run in this process now. Cheap; never raises."""

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        """Return what else a user should know of this machine, for the doctor.

        May take some 100 ms and look at devices, kernel settings and libraries. Called
        whether or not the backend is available; never raises.
        """
        return ()

    @classmethod
    def check_settings(cls, given: Mapping[str, str]) -> None:
        """Refuse settings of a user that this backend does not have.

        Raises:
            UsageError: A name or a value is none of ``settings``; names the nearest.
        """
        for name, value in given.items():
            if name not in cls.settings:
                known = nearest(name, cls.settings) if cls.settings else "it has none"
                raise UsageError(
                    f"backends.{cls.scheme}: there is no setting {name!r}; {known}"
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

        Its host is numeric where other hosts may reach it: kvwire resolves names. A
        backend without links leaves this as it is.

        Raises:
            OSError: The address cannot be bound.
            BackendUnavailable: It has no links.

        Cancel safety: safe, nothing stays bound.
        """
        raise self._has_no_links(address)

    async def connect(self, address: Address) -> Link:
        """Connect to ``address``; the link is not yet started.

        Its host is numeric where other hosts may reach it: kvwire resolves names, and
        dials their addresses in turn. A backend without links leaves this as it is.

        Raises:
            OSError: Nobody listens there, or it cannot be reached.
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
        """Put every link and every lane inside TLS; called before the first of them.

        Both sides show certificates. A link that came in gives its handler no byte
        before that is done. Only with the capability ``tls``.
        """
        raise NotImplementedError

    def open_lane(self, context: LaneContext) -> Lane:
        """Prepare a data path beside a control link; see :mod:`kvwire.backend.lane`.

        Raises:
            BackendUnavailable: It has none, or it cannot be used here.
        """
        raise BackendUnavailable(f"{self.scheme} carries no data beside another link")

    async def aclose(self) -> None:
        """Free what the backend itself holds; its links are closed before.

        Cancel safety: safe.
        """
        return
