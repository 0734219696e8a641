"""All exceptions that kvwire raises, as one tree.

* :exc:`KVWireError`

  * :exc:`UsageError`: the call was wrong; nothing was sent.

    * :exc:`NotAwaited`: also an ``AttributeError``.

  * :exc:`BackendUnavailable`: scheme unknown, library missing, or wrong API version.
  * :exc:`ListenError`: it is impossible to listen on an address; also an ``OSError``.
  * :exc:`ConnectError`: an address cannot be reached; also an ``OSError``.
  * :exc:`HandshakeError`: the peers could not agree; names every differing field.

    * :exc:`VersionMismatch`
    * :exc:`AuthenticationFailed`
    * :exc:`ProfileMismatch`
    * :exc:`HandshakeTimeout`

  * :exc:`ProtocolError`: the peer broke rule ``.rule``; the connection is closed.

    * :exc:`MalformedFrame`
    * :exc:`FrameTooLarge`
    * :exc:`UnexpectedFrame`
    * :exc:`FlowControlViolation`

  * :exc:`ConnectionClosed`: the connection and all its requests have ended.

    * :exc:`ClosedOK`
    * :exc:`ConnectionLost`
    * :exc:`PeerUnresponsive`

  * :exc:`RequestError`: only this request failed; the connection continues.

    * :exc:`DeadlineExceeded`
    * :exc:`AccessDenied`
    * :exc:`StaleRegion`
    * :exc:`IntegrityError`
    * :exc:`PeerCancelled`
    * :exc:`RequestCancelled`
    * :exc:`MessageTooLarge`
    * :exc:`PeerError`

Retry on :exc:`RequestError`, reconnect on :exc:`ConnectionClosed`, look for a bug (or
an attacker) on :exc:`ProtocolError`. The peer receives a :class:`WireCode` and a short
reason, never a traceback. Each leaf of ``RequestError`` and ``HandshakeError`` has one
code, and :func:`error_from_code` converts a code back into an error.
"""

from __future__ import annotations

import copy
import enum
import errno
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Final, Protocol, TypeVar
from urllib.parse import quote

from kvwire.limits import NAME_CHARS_MAX, REASON_CHARS_MAX

# websockets truncates a peer's text in logs to 75 characters.
LOG_CHARS_MAX: Final = 75


_Error = TypeVar("_Error", bound=Exception)


class WireCode(enum.IntEnum):
    """Codes with which one peer reports a failure to the other.

    Values are never reused.
    """

    OK = 0
    # Codes for a whole connection.
    GOING_AWAY = 1
    PROTOCOL = 2
    INTERNAL = 3
    UNRESPONSIVE = 4
    # Codes for the handshake.
    VERSION = 16
    AUTHENTICATION = 17
    PROFILE = 18
    HANDSHAKE_TIMEOUT = 19
    BUSY = 20
    # Codes for one request.
    DEADLINE = 32
    ACCESS = 33
    STALE = 34
    INTEGRITY = 35
    CANCELLED = 36
    TOO_LARGE = 37
    OTHER = 63


class KVWireError(Exception):
    """Root of every exception that kvwire raises on purpose."""

    code: ClassVar[WireCode] = WireCode.OTHER

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling and copying, whatever arguments ``__init__`` takes."""
        fields = dict(vars(self))
        if isinstance(self, OSError):  # it keeps errno outside of vars()
            fields["errno"] = self.errno
        return _made_again, (type(self), self.args), fields


def _made_again(kind: type[KVWireError], args: tuple[Any, ...]) -> KVWireError:
    error = kind.__new__(kind)
    error.args = args
    return error


class UsageError(KVWireError, ValueError):
    """The call was wrong; nothing was sent. The message names the change to make."""


class NotAwaited(UsageError, AttributeError):
    """A result's name was used on an object that was not awaited.

    As an ``AttributeError``, so that ``hasattr`` is False and ``getattr`` has its
    default: libraries ask any object what it can do.
    """


class BackendUnavailable(KVWireError):
    """A transport, tier or thread is not available; the message has the remedy."""


class _AtAddress(OSError):
    """Base of errors with an address and the system's error number."""

    def __init__(
        self, message: str, *, address: str = "", errno: int | None = None
    ) -> None:
        super().__init__(message)
        self.address = address
        self.errno = errno


class ListenError(KVWireError, _AtAddress):
    """Listening on an address is impossible: it is taken, unknown, or not this host's.

    Attributes:
        address: The address.
        errno: The system's number, such as ``errno.EADDRINUSE``.
    """


class ConnectError(KVWireError, _AtAddress):
    """An address cannot be reached: refused, no route, or an unknown host name.

    Attributes:
        address: The address.
        errno: The system's number, such as ``errno.ECONNREFUSED``.
    """


class HandshakeError(KVWireError):
    """The two sides could not agree on a connection.

    Attributes:
        fields: The names of the fields that differ, in the order of the message.
    """

    def __init__(self, message: str, *, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields


class VersionMismatch(HandshakeError):
    """The two sides have no protocol version in common."""

    code = WireCode.VERSION


class AuthenticationFailed(HandshakeError):
    """The peer failed authentication, is not accepted, or uses another trust mode."""

    code = WireCode.AUTHENTICATION


class ProfileMismatch(HandshakeError):
    """The sides differ in a field that must be equal, or share no transport."""

    code = WireCode.PROFILE


class HandshakeTimeout(HandshakeError):
    """The handshake did not end before its deadline."""

    code = WireCode.HANDSHAKE_TIMEOUT


class ProtocolError(KVWireError):
    """The peer broke a rule of the protocol; the connection was closed.

    Attributes:
        rule: The rule's id in docs/topics/protocol.md, such as ``"KVW-HD-02"``.
    """

    code = WireCode.PROTOCOL

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{message} [{rule}]")
        self.rule = rule


class MalformedFrame(ProtocolError):
    """A frame cannot be decoded: its checksum, a value or its body is wrong."""


class FrameTooLarge(ProtocolError):
    """A frame announced more bytes than its type allows."""


class UnexpectedFrame(ProtocolError):
    """A well-formed frame arrived in a state that does not allow it."""


class FlowControlViolation(ProtocolError):
    """The peer sent more than it was granted."""


class ConnectionClosed(KVWireError):
    """The connection is closed; every request open on it has failed."""

    code = WireCode.GOING_AWAY


class ClosedOK(ConnectionClosed):
    """One side closed the connection on purpose, after everything was delivered."""


class ConnectionLost(ConnectionClosed):
    """The connection broke: it was reset, cut off, or aborted."""


class PeerUnresponsive(ConnectionClosed):
    """The peer sent nothing for the whole liveness period."""

    code = WireCode.UNRESPONSIVE


class RequestError(KVWireError):
    """One request failed; the connection and its other requests go on."""


class DeadlineExceeded(RequestError, TimeoutError):
    """The deadline has passed.

    The request's memory is free only once the request has drained.
    """

    code = WireCode.DEADLINE


class AccessDenied(RequestError):
    """A grant is unknown, belongs to another peer, or does not allow this."""

    code = WireCode.ACCESS


class StaleRegion(RequestError):
    """The region was closed or revoked after the grant was made."""

    code = WireCode.STALE


class IntegrityError(RequestError):
    """The received bytes differ from the sent ones."""

    code = WireCode.INTEGRITY


class PeerCancelled(RequestError):
    """The peer cancelled its side of this request."""

    code = WireCode.CANCELLED


class RequestCancelled(RequestError):
    """This side cancelled the request with ``request.cancel()``."""


class MessageTooLarge(RequestError):
    """A message is longer than its buffer, its limit, or free memory."""

    code = WireCode.TOO_LARGE


class PeerError(RequestError):
    """The peer reported a failure for which this version has no class."""


def again(error: _Error) -> _Error:
    """Return a copy of a stored error, to be raised.

    A raised error refers to the frames that it has passed, and so to the memory that
    their variables name. If an object raised the error that it keeps, it would keep all
    of this; and if one of the frames names the object, only the garbage collector would
    free any of it.
    """
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def _below(parent: type[KVWireError]) -> Iterator[type[KVWireError]]:
    for cls in parent.__subclasses__():
        yield cls
        yield from _below(cls)


_BY_CODE: Final = {
    cls.code: cls
    for parent in (HandshakeError, RequestError)
    for cls in _below(parent)
    if "code" in vars(cls)
}


def shown(text: str, chars_max: int = LOG_CHARS_MAX) -> str:
    """Return a peer's text for errors and logs: quoted, printable and short."""
    quoted = repr(text)
    if len(quoted) <= chars_max:
        return quoted
    return quoted[: chars_max - 3] + "..."


# Everything between the first `//` and the last `@`, also in a URL that is
# percent-encoded within another. It is not parsed, since a `#` in a password would
# mislead a parser.
_CREDENTIALS: Final = re.compile(
    r"(?P<start>(?<!/)//(?!/)|%2f%2f)(?P<secret>.*)(?P<end>@|%40)",
    re.DOTALL | re.IGNORECASE,
)


def not_looked_up(host: str, timeout_s: float) -> str:
    """Return why a name has no address yet: its peer was not even asked.

    A loop looks names up in the threads of its default executor.
    """
    return (
        f"the name {host!r} was not looked up within {timeout_s:g} s: the resolver "
        "does not answer, or other work keeps all threads of the loop's default "
        "executor busy"
    )


def without_password(url: str) -> str:
    """Return a URL without its credentials, for errors, logs and reports."""
    return _CREDENTIALS.sub(r"\g<start>...\g<end>", url)


def check_credentials(url: str) -> None:
    """Refuse a URL whose user name or password makes its host ambiguous.

    Raises:
        UsageError: A ``/``, ``?``, ``#``, ``[`` or ``]`` precedes the last ``@``.
    """
    found = _CREDENTIALS.search(url)
    bad = set(found["secret"]) & set("/?#[]") if found else None
    if bad:
        signs = ", ".join(f"{sign} as {quote(sign, safe='')}" for sign in sorted(bad))
        raise UsageError(
            f"{without_password(url)!r}: the user name or the password has a "
            f"character that a URL reserves; write {signs}"
        )


def printable(text: str) -> str:
    """Return a peer's text unchanged if it is short and printable, else quoted."""
    if text.isprintable() and len(text) <= REASON_CHARS_MAX:
        return text
    return shown(text, REASON_CHARS_MAX)


def is_name(value: object) -> bool:
    """Return whether a value is a text that can be sent to a peer uncut."""
    if not isinstance(value, str) or len(value) > NAME_CHARS_MAX:
        return False
    return value.encode(errors="replace").decode() == value


def check_name(what: str, value: object) -> None:
    """Refuse a value that is not a name: a text of 1 to NAME_CHARS_MAX characters.

    Raises:
        UsageError: It is empty, too long, no text, or has half of a surrogate pair.
            The error begins with ``what``.
    """
    if not is_name(value) or not value:
        wanted = f"pass a string of 1 to {NAME_CHARS_MAX} characters"
        raise wrong_name(what, value, wanted)


def wrong_name(what: str, value: object, wanted: str) -> UsageError:
    """Return the error for a value that is not a name."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as exc:
        half = exc.object[exc.start]
        wanted = f"it has {half!r}, half of a surrogate pair, which cannot be sent"
    return UsageError(f"{what}={value!r:.80}: {wanted}")


def sayable(reason: str) -> str:
    """Return a reason short enough for a peer, cut between characters."""
    return reason[:REASON_CHARS_MAX].encode(errors="replace").decode()


def error_from_code(code: int, text: str) -> KVWireError:
    """Return the exception for the code and text that a peer reported.

    An unknown code, such as a newer peer's, becomes a :exc:`PeerError`.
    """
    try:
        cls = _BY_CODE.get(WireCode(code), PeerError)
    except ValueError:
        return PeerError(f"peer reported code {code}: {text}")
    return cls(text)


_PLACE: Final = "make room, or give another place"
_REMEDIES: Final = {
    errno.EMFILE: (
        "this process has as many files open as it may: ulimit -n 65536; docker run "
        "--ulimit nofile=65536; LimitNOFILE=65536"
    ),
    errno.ENFILE: "this machine has as many files open as it may: sysctl fs.file-max",
    errno.ENOMEM: "ask for less, or give this process more memory",
    errno.ENOSPC: f"df -h and df -i show what is used up; {_PLACE}",
    errno.EDQUOT: f"the quota there is used up; {_PLACE}",
    errno.EACCES: "let this user read and write there, or give another place",
    errno.EPERM: "let this user read and write there, or give another place",
    errno.EROFS: "it is mounted read-only; mount it writable, or give another place",
    errno.EIO: "the disk fails, see dmesg; give another place",
    errno.ENODEV: "it is not mounted; mount it, or give another place",
}


def error_text(error: BaseException) -> str:
    """Return an error's text, and drop its traceback's frames."""
    text = str(error) or type(error).__name__
    drop_frames(error)
    return text


def drop_frames(error: BaseException) -> None:
    """Drop the traceback frames of an error, and of each error in its chain.

    Each request of a connection keeps the connection's error, and a library may keep
    its own for a moment. The frames would keep memory alive: everything that was to be
    moved, such as the whole memory of a store.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            pending += (link.__cause__, link.__context__)


def refused_call(error: OSError, call: str, remedy: str) -> OSError:
    """Return a system call's error with the name of the call and its own remedy."""
    named = OSError(error.errno, f"{call}: {error.strerror}")
    named.add_note(remedy)
    return named


def with_remedy(error: BaseException) -> str:
    """Return a system error's text together with a remedy; a note of its own first."""
    text = (getattr(error, "strerror", None) or str(error)).rstrip(".")
    remedy = "; ".join(getattr(error, "__notes__", ()))
    remedy = remedy or _REMEDIES.get(getattr(error, "errno", None) or 0, "")
    where = getattr(error, "filename", None)
    if isinstance(where, str):
        text = f"{where}: {text}"
    return f"{text}; {remedy}" if remedy else text


_NO_THREADS: Final = (
    "raise the limit of processes: ulimit -u, or pids.max of the container"
)


def lacks_threads(error: RuntimeError) -> Exception:
    """Return an OSError if no thread could be started; otherwise the error itself."""
    if "start new thread" not in str(error):
        return error
    found = OSError(errno.EAGAIN, "no thread can be started")
    return refused_call(found, "pthread_create", _NO_THREADS)


class _Thread(Protocol):
    """A ``threading.Thread``, which the core does not import."""

    @property
    def name(self) -> str: ...
    def start(self) -> None: ...


def begin_thread(thread: _Thread) -> None:
    """Start a thread.

    Raises:
        BackendUnavailable: The system has no more threads.
    """
    try:
        thread.start()
    except RuntimeError as exc:
        error = lacks_threads(exc)
        if error is exc:
            raise
        raise BackendUnavailable(f"{thread.name}: {with_remedy(error)}") from None


def wrong_type(name: str, value: object, wanted: str) -> UsageError:
    """Return the error for an argument of a wrong type, such as a coroutine."""
    kind = type(value).__name__
    hint = "; is an `await` missing?" if hasattr(value, "__await__") else ""
    article = "an" if kind[0] in "aeioAEIO" else "a"
    return UsageError(f"{name}: pass {wanted}, not {article} {kind}{hint}")


# The number of names that can be read at a glance.
_FEW_NAMES: Final = 8


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the end of an error text: the nearest known name, or a list of names.

    If no name is near, all are listed.
    """
    names = sorted(known)
    try:
        import difflib  # noqa: PLC0415 - only for errors, and `import kvwire` is quick

        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    except OSError:  # the import failed for lack of file descriptors
        near = []
    known_are = f"known are {', '.join(names)}"
    if not near:
        return known_are
    meant = f"did you mean {near[0]!r}?"
    return f"{meant} {known_are}" if len(names) <= _FEW_NAMES else meant
