"""The configuration: a TOML file < ``KVWIRE_*`` environment < keyword arguments.

An unknown key raises an error that names the nearest known key. The environment and the
command line never contain secrets, only the paths of files that do.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import reprlib
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from kvwire import limits
from kvwire.errors import UsageError, nearest, without_password
from kvwire.types import OneSidedWindows, check_file_name, plain, read_bytes

logger: logging.Logger = logging.getLogger("kvwire.config")

ENVIRONMENT_PREFIX = "KVWIRE_"
LOG_LEVEL_VARIABLE = "KVWIRE_LOG_LEVEL"
"""The variable for the command's option ``--log-level``; it is not a key."""
# In `tls_peers`: every certificate that a CA of `tls_ca_file` has signed.
ANYBODY = "*"
_ARGUMENTS = "arguments"

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
ProfileText = Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX)]
Names = tuple[Annotated[str, Meta(min_length=1, max_length=32)], ...]


Trust: TypeAlias = Literal["loopback", "psk", "mtls"]
Checksum: TypeAlias = Literal["auto", "on", "sampled", "off"]
FileName: TypeAlias = "str | os.PathLike[str]"


class ConfigOptions(TypedDict, total=False):
    """The keys of :class:`Config` as keyword arguments of ``kvwire.open``."""

    name: str
    trust: Trust
    psk_file: FileName
    psk_accept_files: Sequence[FileName]
    tls_cert_file: FileName
    tls_key_file: FileName
    tls_ca_file: FileName
    tls_peers: Sequence[str]
    prefer: Sequence[str]
    require: Sequence[str]
    forbid: Sequence[str]
    lanes: int
    one_sided_windows: OneSidedWindows
    backends: Mapping[str, Mapping[str, str]]
    profile: Mapping[str, str]
    checksum: Checksum
    chunk_bytes: int | str
    eager_bytes: int | str
    window_bytes: int | str
    window_messages: int
    message_bytes: int | str
    handshake_timeout_s: float
    close_timeout_s: float
    ping_interval_s: float
    ping_misses: int
    lease_s: float
    restart_grace_s: float
    resume: bool
    quarantine_bytes: int | str
    connections_max: int
    directory: str
    io_cpus: Sequence[int]
    inspect: FileName


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, with their defaults.

    Attributes:
        name: This side's name, shown to peers and in logs.
        trust: ``"loopback"``: this host only, without authentication. ``"psk"``: both
            sides prove that they hold the key in ``psk_file``. ``"mtls"``: both sides
            authenticate with certificates, and traffic over tcp is encrypted.
        psk_file: A file made by ``kvwire keygen``, readable only by its owner.
        psk_accept_files: Further keys to accept from peers while keys are rotated.
        tls_cert_file: This side's certificate, in PEM.
        tls_key_file: The private key of that certificate, in PEM, readable only by its
            owner.
        tls_ca_file: The only CAs whose certificates are accepted, in PEM.
        tls_peers: The accepted peers: URIs and DNS names in their certificates. A
            single ``"*"`` accepts every certificate signed by a CA in ``tls_ca_file``.
        prefer: Transports in the order in which they are tried; all others are tried
            last.
        require: If not empty, only these transports may be used.
        forbid: Transports that are never used.
        lanes: The number of data paths that the chosen transport uses. More than one
            helps if a single core or flow cannot saturate the network.
        one_sided_windows: The peers that may read memory of this process directly:
            windows, and payload where it lies. Such a peer can read more than was
            offered or sent to it. ``"user"``: processes of the same user on this host.
            ``"peers"``: every peer. ``"off"``: no peer; each block has to be requested,
            and payload is copied for its peer.
        backends: Settings of individual transports, such as ``{"ucx": {"TLS":
            "tcp"}}``.
        profile: Names with values, such as the model's revision. If a name occurs on
            both sides, its values must be equal; the error names the difference.
        checksum: Applies to the payload that this side sends. ``"on"`` verifies every
            byte, ``"sampled"`` everything small and one large chunk in 8, ``"off"``
            trusts the transport. ``"auto"`` is ``"sampled"`` within one host, else
            ``"on"``.
        chunk_bytes: The payload bytes of one frame. A connection uses the smaller of
            both sides' values.
        eager_bytes: Messages up to this size are sent without waiting for a ``recv``. A
            connection uses the smaller of both sides' values.
        window_bytes: The most bytes of arrived messages that are kept until they are
            received.
        window_messages: The most arrived messages that are kept until they are
            received.
        message_bytes: The most bytes that ``recv`` without a buffer allocates.
        handshake_timeout_s: The limit for a new connection to become usable. A
            transport for its data has 0.4 of what is left of it, the last possible one
            0.8.
        close_timeout_s: How long ``close`` waits for running operations.
        ping_interval_s: How long the peer may be silent before it is pinged.
        ping_misses: The number of silent intervals after which the peer counts as dead.
        lease_s: How long a KV transfer without progress holds its blocks, and how long
            it waits for a silent peer.
        restart_grace_s: How long a KV transfer waits for a peer whose process has
            probably ended, because a connection was reset or refused.
        resume: Whether a KV transfer that loses its connection waits, within its lease,
            for another link to the same peer.
        quarantine_bytes: New transfers are refused while transports have yet to release
            more than this many bytes.
        connections_max: The most inbound connections at any time.
        directory: The URL of the directory in which the members of a fleet find each
            other, such as ``"redis://host:6379"``; empty for this user's folder on this
            machine.
        io_cpus: CPUs that the thread of a :class:`kvwire.Engine` may run on; if empty,
            the CPUs of the thread that makes the engine.
        inspect: The folder of the socket for ``kvwire top`` and ``kvwire trace``, which
            only this user may enter; empty for no socket.
    """

    name: Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX)] = ""
    trust: Trust = "loopback"
    psk_file: str = ""
    psk_accept_files: tuple[str, ...] = ()
    tls_cert_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    tls_peers: tuple[Annotated[str, Meta(min_length=1, max_length=2048)], ...] = ()
    prefer: Names = ()
    require: Names = ()
    forbid: Names = ()
    lanes: Annotated[int, Meta(ge=1, le=limits.LANES_MAX)] = 1
    one_sided_windows: OneSidedWindows = "user"
    backends: Annotated[
        dict[ProfileText, dict[ProfileText, str]],
        Meta(max_length=limits.BACKENDS_MAX),
    ] = {}
    profile: Annotated[
        dict[ProfileText, ProfileText], Meta(max_length=limits.PROFILE_FIELDS_MAX)
    ] = {}
    checksum: Checksum = "auto"
    chunk_bytes: Annotated[
        int, Meta(ge=limits.CHUNK_BYTES_MIN, le=limits.CHUNK_BYTES_MAX)
    ] = limits.CHUNK_BYTES
    eager_bytes: Annotated[int, Meta(ge=0, le=limits.EAGER_BYTES_MAX)] = (
        limits.EAGER_BYTES
    )
    window_bytes: Annotated[
        int, Meta(ge=limits.EAGER_BYTES_MAX, le=limits.EAGER_WINDOW_BYTES_MAX)
    ] = limits.EAGER_WINDOW_BYTES
    window_messages: Annotated[int, Meta(ge=1, le=2**20)] = limits.EAGER_WINDOW_MESSAGES
    message_bytes: Annotated[int, Meta(ge=0, le=limits.REQUEST_BYTES_MAX)] = (
        limits.MESSAGE_BYTES
    )
    handshake_timeout_s: Seconds = limits.HANDSHAKE_TIMEOUT_S
    close_timeout_s: Seconds = limits.CLOSE_TIMEOUT_S
    ping_interval_s: Annotated[
        float, Meta(ge=limits.PING_INTERVAL_MIN_S, le=86_400)
    ] = limits.PING_INTERVAL_S
    ping_misses: Annotated[
        int, Meta(ge=limits.PING_MISSES_MIN, le=limits.PING_MISSES_MAX)
    ] = limits.PING_MISSES
    lease_s: Seconds = limits.LEASE_S
    restart_grace_s: Seconds = limits.RESTART_GRACE_S
    resume: bool = True
    quarantine_bytes: Annotated[int, Meta(ge=0)] = limits.QUARANTINE_BYTES
    connections_max: Annotated[int, Meta(ge=1, le=65_536)] = limits.CONNECTIONS_MAX
    directory: Annotated[str, Meta(max_length=1024)] = ""
    io_cpus: tuple[Annotated[int, Meta(ge=0, le=limits.CPU_MAX)], ...] = ()
    inspect: str = ""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **arguments: Unpack[ConfigOptions],
    ) -> Config:
        """Read a TOML file, then the environment, then the arguments.

        Args:
            path: The file; None for no file.
            environment: A replacement for ``os.environ``.
            **arguments: Keys of this class.

        Raises:
            UsageError: The file cannot be read, a key is unknown, or a value is not
                allowed; the message names the key and where it came from.
        """
        return load_with_origins(path, environment=environment, **arguments)[0]

    def replace(self, **arguments: Unpack[ConfigOptions]) -> Config:
        """Return a copy with some keys changed.

        Raises:
            UsageError: As :meth:`load`.
        """
        changed = _checked_keys(arguments, _ARGUMENTS)
        origins = dict.fromkeys(changed, _ARGUMENTS)
        return _build(msgspec.structs.asdict(self) | changed, origins)

    def __repr__(self) -> str:
        """Return the changed keys, without the directory's password."""
        defaults = msgspec.structs.asdict(Config())
        given = msgspec.structs.asdict(self)
        given["directory"] = without_password(self.directory)
        changed = [f"{k}={v!r}" for k, v in given.items() if v != defaults[k]]
        return f"Config({', '.join(changed)})"

    def __post_init__(self) -> None:
        if self.trust == "psk" and not self.psk_file:
            raise UsageError(
                'trust="psk" needs psk_file; `kvwire keygen FILE` makes one'
            )
        given = "psk_file" if self.psk_file else "psk_accept_files"
        if self.trust != "psk" and (self.psk_file or self.psk_accept_files):
            raise UsageError(f'{given} is given, so trust must be "psk"')
        self._check_tls()
        both = set(self.require) & set(self.forbid)
        if both:
            raise UsageError(
                f"{sorted(both)} are in both require and forbid; remove them from one "
                "of the two"
            )
        # The profile travels in one frame, together with the offer of transports.
        texts = "".join(f"{k}{v}" for k, v in self.profile.items())
        try:
            profile_bytes = len(texts.encode())
            f"{self.name}".encode()
        except UnicodeEncodeError as exc:
            raise UsageError(f"name or profile: {exc}") from None
        if profile_bytes > limits.CONTROL_BODY_BYTES_MAX // 2:
            raise UsageError(
                f"profile: {profile_bytes} bytes of text; "
                f"{limits.CONTROL_BODY_BYTES_MAX // 2} are allowed"
            )

    def _check_tls(self) -> None:
        given = {key for key in _TLS_KEYS if getattr(self, key)}
        if self.trust != "mtls" and given:
            raise UsageError(f'{min(given)} is given, so trust must be "mtls"')
        missing = [key for key in _TLS_KEYS if key not in given]
        if self.trust != "mtls":
            return
        if ANYBODY in self.tls_peers and len(self.tls_peers) > 1:
            raise UsageError(
                f'tls_peers names "{ANYBODY}" (everybody) and other names; remove '
                "one or the other"
            )
        if missing == ["tls_peers"]:
            raise UsageError(
                'trust="mtls" needs tls_peers, the names of the peers that may '
                f'connect and be dialled; ("{ANYBODY}",) allows every certificate '
                "that the CA has signed"
            )
        if missing:
            raise UsageError(f'trust="mtls" needs {", ".join(missing)}')


def load_with_origins(
    path: str | os.PathLike[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    **arguments: Unpack[ConfigOptions],
) -> tuple[Config, dict[str, str]]:
    """Read a configuration like :meth:`Config.load`; also return each key's origin."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in _layers(path, environment, arguments):
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    return _build(values, origins), origins


_TLS_KEYS = ("tls_cert_file", "tls_key_file", "tls_ca_file", "tls_peers")
FIELDS = frozenset(Config.__struct_fields__)
_KINDS = get_type_hints(ConfigOptions)
# The end of msgspec's messages about a value, which names its place.
_PLACE = re.compile(r" - at .*`\$\.(\w+).*`$")
# Texts for a value that should be a table; msgspec would use JSON's terms.
_TABLES = {
    "backends": (
        'a table of settings for each transport is needed, such as {"ucx": {"TLS": '
        '"tcp"}}, in a variable ucx.TLS=tcp; prefer, require and forbid choose '
        "transports"
    ),
    "profile": 'a table is needed, such as {"model": "demo"}, in a variable model=demo',
}


def _layers(
    path: str | os.PathLike[str] | None,
    environment: Mapping[str, str] | None,
    arguments: Mapping[str, Any],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each origin with its values; a later origin overrides an earlier one."""
    if not isinstance(path, str | os.PathLike | None):
        raise UsageError(
            f"config: {type(path).__name__} is neither a Config nor the path of a TOML "
            f"file; keys are arguments, such as kvwire.open(lanes=4)"
        )
    if path is not None:
        origin = f"config file {path}"
        yield origin, _checked_keys(_read_toml(Path(path)), origin)
    yield from _from_environment(os.environ if environment is None else environment)
    yield _ARGUMENTS, _checked_keys(arguments, _ARGUMENTS)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        # Editors of Windows begin a text with a mark of its encoding.
        with open(local_path(os.fspath(path)), "rb") as file:  # noqa: PTH123
            return tomllib.loads(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError as exc:
        raise UsageError(
            f"config file {path} is not in UTF-8: {exc.reason} at byte {exc.start}; "
            "save it as UTF-8"
        ) from None
    except OSError as exc:
        raise UsageError(f"config file {path}: {exc.strerror}") from None
    except ValueError as exc:  # not TOML, not text, or not a file name
        raise UsageError(f"config file {path}: {exc}") from None


def _from_environment(
    environment: Mapping[str, str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    of_services = _of_services(environment)
    if of_services:
        _log_services(of_services)
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in of_services:
            continue
        if variable == LOG_LEVEL_VARIABLE:
            continue
        origin = f"environment variable {variable}"
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        _checked_keys({key: text}, origin)
        yield origin, {key: _from_text(key, text)}


# Variables that Kubernetes, and Docker's links, add to an environment for a service
# named `kvwire...`. `KVWIRE_PORT` is recognised only by its value, and `_ENV_` and
# `_NAME` only beside such a port, since otherwise they could be misspelt keys.
_SERVICE = re.compile(
    r"KVWIRE.*(_SERVICE_HOST|_SERVICE_PORT(_.+)?"
    r"|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR)|_(PORT|ADDR)_(START|END))?)"
)
_SERVICE_PORT = re.compile(r"(KVWIRE.*)_PORT")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.+", re.IGNORECASE)
_LINK_NAME = re.compile(r"/.+/.+")


def _of_services(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the variables that describe a service named like this library."""
    ports = {
        found[1]: variable
        for variable, text in environment.items()
        if (found := _SERVICE_PORT.fullmatch(variable)) and _SERVICE_URL.fullmatch(text)
    }
    linked = {
        variable
        for variable, text in environment.items()
        for service in ports
        if variable.startswith(f"{service}_ENV_")
        or (variable == f"{service}_NAME" and _LINK_NAME.fullmatch(text))
    }
    by_name = filter(_SERVICE.fullmatch, environment)
    return frozenset([*by_name, *ports.values(), *linked])


@functools.cache  # one line in each process
def _log_services(variables: frozenset[str]) -> None:
    logger.warning(
        "ignored %d environment variables that describe a Kubernetes service named "
        "kvwire..., such as %s; `enableServiceLinks: false` keeps them out of the pod",
        len(variables),
        min(variables),
    )


def _from_text(key: str, text: str) -> Any:
    """Parse a variable's text: lists are separated by commas, tables are a=b."""
    kind = get_origin(_KINDS[key])
    if kind is Sequence:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is not Mapping:
        return text
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    flat = {name.strip(): value.strip() for name, _, value in pairs}
    nested = key == "backends"
    if any(not equals or (nested and "." not in name) for name, equals, _ in pairs):
        return text  # not a table, so the check of values will refuse it
    return _nested(flat) if nested else flat


def _nested(flat: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return a table per transport: ``ucx.TLS`` is the setting TLS of ucx."""
    settings: dict[str, dict[str, str]] = {}
    for path, value in flat.items():
        name, _, setting = path.partition(".")
        settings.setdefault(name, {})[setting] = value
    return settings


def _checked_keys(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    for key in values:
        if key not in FIELDS:
            hint = nearest(key, FIELDS)
            raise UsageError(f"{origin}: unknown key {key!r}; {hint}")
    return dict(values)


_PATHS = frozenset({"inspect", *(k for k in FIELDS if k.endswith(("_file", "_files")))})
_YES = ("true", "yes", "on", "1", "y", "t")
_NO = ("false", "no", "off", "0", "n", "f")


def _read_value(key: str, value: Any) -> Any:
    """Convert a value as a user may write it: ``"4MiB"``, ``"yes"``, a ``Path``."""
    if isinstance(value, list | tuple):
        several = [_plain(each) for each in value]
        return [_path(each) for each in several] if key in _PATHS else several
    value = _plain(value)
    if key in _PATHS:
        value = _path(value)
    if not isinstance(value, str):
        if get_origin(_KINDS[key]) is Mapping and not isinstance(value, Mapping):
            raise UsageError(f"{reprlib.repr(value)}: {_TABLES[key]}")
        return value
    if key.endswith("_bytes"):
        return read_bytes(value)
    if _KINDS[key] is bool:
        if value.lower() not in _YES + _NO:
            raise UsageError(f"{value!r}: write true or false")
        return value.lower() in _YES
    if get_origin(_KINDS[key]) is Sequence:
        raise UsageError(f"{value!r}: pass a list, such as [{value!r}]")
    return value


def _path(value: Any) -> Any:
    return local_path(value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else plain(value)


def _build(given: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    values = {}
    for key, value in given.items():
        try:
            values[key] = _read_value(key, value)
        except UsageError as exc:
            raise UsageError(f"{origins.get(key, 'config')}: {key}={exc}") from None
    return checked_values(values, Config, origins)


def local_path(text: str) -> str:
    """Expand a path as a shell would: ``~`` and ``$HOME`` become folders.

    It stays the same file if the process then changes its working directory.

    Raises:
        UsageError: The path names an unknown user or environment variable, or cannot be
            a file's name.
    """
    check_file_name(text)
    for name in filter(None, (n for pair in _VARIABLE.findall(text) for n in pair)):
        if name not in os.environ:
            raise UsageError(
                f"path {text!r}: there is no environment variable {name}; set it, or "
                f"write the path in full"
            )
    path = os.path.expanduser(os.path.expandvars(text))  # noqa: PTH111 - no Path yet
    if path.startswith("~"):
        raise UsageError(
            f"path {text!r}: {path.partition('/')[0]} has no known home folder; write "
            f"./{path} if you mean a folder with that name"
        )
    try:
        return str(Path(path).absolute()) if path else ""
    except FileNotFoundError:
        raise UsageError(
            f"path {text!r}: the working directory was removed; write the path in full"
        ) from None


# As os.path.expandvars finds variables, which keeps those that are not set.
_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
_PLANNING: Final = threading.Lock()


def converted(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """Return a plain value as a type; from any thread.

    msgspec builds a type's plan at the type's first use, without a lock. A second
    thread that meets it half built crashes the process. A decoder is built once, when
    its module is imported; a conversion has none, so all of them take this lock.

    Raises:
        msgspec.ValidationError: The value is not of this type.
    """
    with _PLANNING:
        return msgspec.convert(value, kind, strict=strict)


def checked_values(
    values: Mapping[str, Any],
    kind: type[S],
    origins: Mapping[str, str],
    usual_origin: str = "config",
) -> S:
    """Return settings as a struct; an error names the key and its origin."""
    try:
        # strict=False reads numbers from text, as environment variables have them.
        return converted(values, kind, strict=False)
    except UnicodeEncodeError as exc:  # such as a variable whose bytes are not text
        having = (name for name, value in values.items() if _has(value, exc.object))
        key = next(having, "value")
        origin = origins.get(key, usual_origin)
        raise UsageError(f"{origin}: {key}={exc.object!r}: {exc.reason}") from None
    except msgspec.ValidationError as exc:
        found = _PLACE.search(str(exc))
        if found is None:
            raise UsageError(f"{usual_origin}: {exc}") from None
        key = found[1]
        text = str(exc).removesuffix(found[0])
        text = text.replace("`array`", "`list`").replace("`null`", "`None`")
        if text.startswith("Expected `object`"):
            text = _TABLES.get(key, text)
        hint = get_type_hints(kind)[key]
        if get_origin(hint) is Literal:
            text += f"; {nearest(values[key], filter(None, get_args(hint)))}"
        origin = origins.get(key, usual_origin)
        raise UsageError(f"{origin}: {key}={_shown(values[key])}: {text}") from None


def _has(value: Any, text: str) -> bool:
    """Return whether a value is this text, or a list with it."""
    return bool(value == text or (isinstance(value, Sequence) and text in value))


def _shown(value: Any) -> str:
    return reprlib.repr(without_password(value) if isinstance(value, str) else value)
