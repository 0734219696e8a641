"""Small value types that every layer shares; they need neither loop nor socket."""

from __future__ import annotations

import enum
import ipaddress
import operator
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NewType,
    NoReturn,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    final,
)
from urllib.parse import urlsplit

from kvwire.errors import UsageError, nearest, without_password, wrong_type
from kvwire.limits import GIB, KIB, MIB, REQUEST_BYTES_MAX

_GRANT: Final = struct.Struct("<4sI16sQQ16sQQ")
_GRANT_MAGIC: Final = b"kvg1"

RequestId = NewType("RequestId", int)
"""The number of a request on a connection; its initiator counts up."""
BufferId = NewType("BufferId", int)
"""The number of a local buffer in the protocol core, which never sees memory itself."""
RegionId = NewType("RegionId", int)
GrantId = NewType("GrantId", int)
Generation = NewType("Generation", int)
"""Counts the uses of a region; a grant for an earlier use is stale."""
OneSidedWindows: TypeAlias = Literal["user", "peers", "off"]
"""The peers that may read this process's windows without its help."""


@final
@dataclass(frozen=True, slots=True)
class Instant:
    """A time on the event loop's clock; a plain number means seconds from now.

    Several calls can share one instant, and thus one time budget::

        until = kvwire.Instant(loop.time() + 5)
        await conn.send(1, question, deadline=until)
        answer = await conn.recv(1, deadline=until)

    Attributes:
        time: Seconds on the clock of ``loop.time()``.
    """

    time: float


Deadline: TypeAlias = float | timedelta | Instant | None
"""Seconds from now, also as a timedelta, or an Instant; None for no deadline."""


class Symbol(enum.Enum):
    """An enum whose members hash fast; Enum's own hash is Python code."""

    if not TYPE_CHECKING:  # type checkers cannot tell the two apart
        __hash__ = object.__hash__


S = TypeVar("S", bound=Symbol)
Step = TypeVar("Step", bound=Symbol)
T = TypeVar("T")


class Transitions(dict[tuple[S, Step], S], Generic[S, Step]):
    """A table from (state, input) to the next state; other pairs raise ValueError."""

    def __init__(self, of: str, steps: dict[tuple[S, Step], S]) -> None:
        super().__init__(steps)
        self._of = of

    def __missing__(self, step: tuple[S, Step]) -> S:
        state, event = step
        raise ValueError(
            f"{event.value} is not allowed for {self._of} in state {state.value}"
        )


class Role(enum.IntEnum):
    """A side's role: the client has opened the connection, the server accepted it."""

    CLIENT = 0
    SERVER = 1

    @property
    def other(self) -> Role:
        """Return the peer's role."""
        return Role.SERVER if self is Role.CLIENT else Role.CLIENT


class TrustMode(enum.IntEnum):
    """How the two sides authenticate each other; see docs/topics/security.md."""

    LOOPBACK = 0
    PSK = 1
    MTLS = 2


AccessName: TypeAlias = Literal["read", "write", "readwrite"]


class Access(enum.Flag):
    """The operations that a grant allows a peer on a region."""

    READ = 1
    WRITE = 2
    READWRITE = READ | WRITE

    @classmethod
    def parse(cls, text: AccessName | Access) -> Access:
        """Parse ``"read"``, ``"write"`` or ``"readwrite"``.

        Raises:
            UsageError: The text is none of these.
        """
        if isinstance(text, Access) and text:
            return text
        names = {"read": cls.READ, "write": cls.WRITE, "readwrite": cls.READWRITE}
        if not isinstance(text, str) or text not in names:
            raise UsageError(
                f'access={text!r:.80}: use "read" (the peer may get), "write" (the '
                f'peer may put) or "readwrite"; {nearest(text, names)}'
            )
        return names[text]


class MemoryKind(enum.StrEnum):
    """The kinds of memory."""

    HOST = "host"
    CUDA = "cuda"
    SIMULATED = "simulated"
    """Memory of a device that a process simulates for its own tests.

    If host code touches it directly, the processor ends the process.
    """


@dataclass(frozen=True, slots=True)
class Device:
    """A device with memory that host code cannot touch, such as ``cuda:0``."""

    kind: MemoryKind
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a listener: a scheme, and a host and port or a path.

    ``str(address)`` and :meth:`parse` are inverses.

    Attributes:
        scheme: The transport, such as ``"tcp"``.
        host: A host name or IP address, or a path.
        port: The port; 0 for a path, and for any free port to listen on.
        name: The host name of which ``host`` is one address, if a user dialled that;
            two addresses do not differ by it.
    """

    scheme: str
    host: str
    port: int = 0
    name: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        if not self.port and (self.scheme == "inproc" or self.host.startswith("/")):
            return f"{self.scheme}://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @classmethod
    def parse(cls, text: str | Address) -> Address:
        """Parse ``"host:port"``, ``"tcp://host:port"``, ``"inproc://name"`` or a path.

        Transports that use files as addresses write them as ``"scheme:///a/path"``.

        Raises:
            UsageError: The text is none of these, or the port is not 0 to 65,535.
        """
        if isinstance(text, Address):
            return text
        if not isinstance(text, str):
            raise UsageError(
                f'address {text!r:.80}: write "host:port", or pass a kvwire.Address'
            )
        full = text if "://" in text else f"tcp://{text}"
        scheme, _, rest = full.partition("://")
        if rest.startswith("/") and scheme != "tcp":
            check_file_name(rest)
            return cls(scheme, rest)
        if "@" in rest:
            raise UsageError(
                f"address {without_password(full)!r}: write scheme://host:port, "
                "without a user name and a password"
            )
        try:
            parts = urlsplit(full)
            port = parts.port
        except ValueError as exc:
            why = _in_brackets(rest) or exc
            raise UsageError(f"address {text!r}: {why}") from None
        if parts.path not in ("", "/") or parts.query:
            raise UsageError(f"address {text!r}: write scheme://host:port")
        if parts.scheme == "inproc":
            return cls("inproc", full.removeprefix("inproc://").rstrip("/"))
        if port is None:
            raise UsageError(
                f'address {text!r} has no port: write "host:7400"; to listen, '
                f'"host:0" takes any free one'
            )
        return cls(parts.scheme, parts.hostname or "", port)


def _in_brackets(rest: str) -> str:
    """Return how to write a bare IPv6 address; "" if it is none."""
    host, _, port = rest.rpartition(":")
    for address, number in ((host, port), (rest, "7400")):
        with suppress(ValueError):
            ipaddress.IPv6Address(address)
            return f"write an IPv6 address as [{address}]:{number}"
    return ""


def check_file_name(text: str) -> None:
    """Refuse a text that cannot be the name of a file.

    Raises:
        UsageError: It contains a NUL, or half of a surrogate pair.
    """
    try:
        if b"\0" not in text.encode(errors="surrogateescape"):
            return
        why = "it has a NUL character"
    except UnicodeEncodeError as exc:
        why = f"{exc.encoding} has no {exc.object[exc.start : exc.end]!r}"
    raise UsageError(f"path {text!r}: {why}; no file can have this name")


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """A peer's identity on one connection, as proved by TLS."""

    identity: str
    binding: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """A peer's claims about itself; TLS or a key has proved some of them.

    Attributes:
        name: The name that it gives itself.
        incarnation: 16 random bytes, new for each start of its process.
        address: Its address, if the transport knows it.
        trust: How the peer was authenticated.
        version: The protocol version in use.
        profile: The profile from its configuration.
        identity: In ``mtls`` mode, the name in its certificate that `tls_peers` lists;
            else "". This is the only proved name.
        key_id: In ``psk`` mode, the id of the key with which a client has
            authenticated; else b"".
    """

    name: str
    incarnation: bytes
    address: Address | None
    trust: TrustMode
    version: int
    profile: tuple[tuple[str, str], ...] = ()
    identity: str = ""
    key_id: bytes = b""

    @property
    def origin(self) -> bytes:
        """Return bytes that distinguish this start of this peer from all others.

        A process that has seen another's incarnation can claim it. In ``mtls`` mode
        this does not help, since the bytes also depend on the identity.
        """
        return self.identity.encode() + self.incarnation

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        proved = f", {self.identity}" if self.identity else ""
        return f"{self.name!r} ({self.incarnation.hex()[:8]}{proved}){where}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One transport that was considered for a connection.

    Attributes:
        name: The transport's name, such as ``"tcp"``.
        taken: Whether it carries the connection's data.
        reason: Why it was or was not chosen.
        possible: Whether it could carry the data if the transports before it cannot.
    """

    name: str
    taken: bool
    reason: str
    possible: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {'taken' if self.taken else 'refused'}, {self.reason}"


@dataclass(frozen=True, slots=True)
class TransportReport:
    """The transports that were considered for a connection, with reasons.

    Attributes:
        candidates: Each transport, in order of preference.
    """

    candidates: tuple[Candidate, ...] = field(default=())

    @property
    def taken(self) -> str:
        """Return the name of the chosen transport."""
        for candidate in self.candidates:
            if candidate.taken:
                return candidate.name
        return ""

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __str__(self) -> str:
        return "; ".join(str(c) for c in self.candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Permission to ``get`` from, or ``put`` into, a peer's memory.

    It can be converted to bytes and sent through any channel. It is valid on one
    connection, until the region ends. Slicing narrows it: ``grant[a:b]`` covers only
    these bytes.

    Attributes:
        access: Whether it allows ``get``, ``put`` or both.
        connection: The id of the connection that it was made for, 16 bytes.
        grant: Its number on that connection.
        generation: The region's generation when it was made.
        token: Proves that the peer made the grant; never shown.
        offset: The offset of this part in the granted memory.
        nbytes: The length of this part; also ``len(grant)``.
    """

    access: Access
    connection: bytes
    grant: int
    generation: int
    token: bytes = field(repr=False)
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> Grant:
        """Return a part of the grant; slices count bytes, as in a ``bytes`` object.

        Raises:
            UsageError: The step is not 1, or the key is an index instead of a slice.
        """
        if not isinstance(part, slice):
            raise UsageError(
                "write grant[a:b]; a grant cannot be indexed by a single byte"
            )
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise UsageError(f"grant[{start}:{stop}:{step}]: the step must be 1")
        return replace(self, offset=self.offset + start, nbytes=max(0, stop - start))

    def to_bytes(self) -> bytes:
        """Return the grant as bytes, for :meth:`from_bytes`."""
        return _GRANT.pack(
            _GRANT_MAGIC,
            self.access.value,
            self.connection,
            self.grant,
            self.generation,
            self.token,
            self.offset,
            self.nbytes,
        )

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview) -> Grant:
        """Read a grant from bytes that arrived through any channel.

        Raises:
            UsageError: The bytes are not a grant. Only using a grant shows whether the
                peer accepts it.
        """
        try:
            if len(raw) != _GRANT.size:
                raise UsageError(
                    f"a grant has {_GRANT.size} bytes, but these are {len(raw)}"
                )
            magic, access, connection, grant, generation, token, offset, nbytes = (
                _GRANT.unpack(raw)
            )
        except (TypeError, struct.error):
            raise wrong_type("from_bytes", raw, "bytes of a grant") from None
        in_range = (
            max(offset, nbytes) <= REQUEST_BYTES_MAX and max(grant, generation) < 2**63
        )
        if magic != _GRANT_MAGIC or not 1 <= access <= 3 or not in_range:
            raise UsageError(
                "these bytes are not a grant of this version: they begin with "
                f"{magic!r}, not {_GRANT_MAGIC!r}; use the same version of kvwire on "
                "both sides"
            )
        return cls(
            access=Access(access),
            connection=connection,
            grant=grant,
            generation=generation,
            token=token,
            offset=offset,
            nbytes=nbytes,
        )


class Uncopied:
    """Base class of objects with addresses, descriptors or tasks of this process.

    A copy would share them with the original, and let go of them at its end; a pickle
    would be read where they belong to something else.
    """

    __slots__ = ()

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``, which all call this."""
        raise UsageError(
            f"{type(self).__name__}: it belongs to this process, so it can be neither "
            "copied nor pickled; make another one where it is needed"
        )


def text_of(id: str | bytes | int) -> str:
    """Return a transfer's id as text for people."""
    return id.hex() if isinstance(id, bytes) else str(id)


def whole(value: object) -> int | None:
    """Return a whole number of any type, also NumPy's, as an int; else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def plain(value: T) -> T | int:
    """Return a whole number of any type as an int, and anything else unchanged."""
    number = whole(value)
    return value if number is None else number


_UNITS: Final = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": KIB * GIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)")


def read_bytes(text: str) -> int:
    """Parse a number of bytes such as ``4MiB``.

    Raises:
        UsageError: It is not a number with a known unit.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise UsageError(
            f"{text!r}: write a number and B, KiB, MiB, GiB or TiB, such as 8GiB"
        )
    return int(float(found[1]) * unit)


def in_bytes(count: int) -> str:
    """Return a size as text: "64 KiB", "1.5 GiB"."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if count >= (unit := _UNITS[name.upper()]):
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def numeric_host(sockaddr: tuple[Any, ...]) -> str:
    """Return the host of a socket's address, with the scope of a link-local one.

    An IPv4 address that a socket of both families shows as ``::ffff:10.0.0.7`` is
    returned as itself.
    """
    host = str(sockaddr[0]).removeprefix("::ffff:")
    if host != sockaddr[0] and ":" in host:
        host = str(sockaddr[0])
    scope = sockaddr[3] if len(sockaddr) > 3 else 0
    return f"{host}%{scope}" if scope else host


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach a numeric address."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool(mapped.is_loopback if mapped else ip.is_loopback)
