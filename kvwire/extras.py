"""Optional packages that kvwire can use, and the commands that install them.

kvwire is on no package index yet. So a command names the directory from which it was
installed or, if that is unknown, the packages that the extra stands for.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

# The folder of the package: a clone, or site-packages.
_ROOT: Final = Path(__file__).resolve().parents[1]


def install_command(extra: str, *, distribution: str = "kvwire") -> str:
    """Return the command that installs an extra of kvwire or of a package on it.

    It fits the way in which the distribution was installed here.
    """
    try:
        here = str(Path.cwd())
    except OSError:  # the directory has been removed
        here = ""
    return _command(distribution, extra, _ROOT, here, tuple(sys.path))


# Cached, since each handshake asks for the command of each missing library.
@lru_cache(maxsize=64)
def _command(
    distribution: str, extra: str, root: Path, here: str, _path: tuple[str, ...]
) -> str:
    if distribution == "kvwire" and _is_source(root):
        return f"pip install -e {_named(root, extra, here)}"
    source, editable = _installed_from(distribution)
    if source is not None:
        return f"pip install {'-e ' * editable}{_named(source, extra, here)}"
    return f"pip install {shlex.join(_packages(distribution, extra))}"


# What kvwire itself offers, as in pyproject.toml. Packages that were copied without
# their metadata (vendored, frozen, a layer of an image) have no entry points.
_OWN: Final[Mapping[str, Mapping[str, str]]] = {
    "kvwire.backends": {
        "inproc": "kvwire_inproc:InprocBackend",
        "local": "kvwire_local:LocalBackend",
        "nccl": "kvwire_nccl:NcclBackend",
        "nixl": "kvwire_nixl:NixlBackend",
        "tcp": "kvwire_tcp:TcpBackend",
        "ucx": "kvwire_ucx:UcxBackend",
    },
    "kvwire.directories": {
        "dns": "kvwire.directory.dns:DnsDirectory",
        "file": "kvwire.directory.file:FileDirectory",
        "k8s": "kvwire.directory.kubernetes:KubernetesDirectory",
        "nats": "kvwire.directory.nats:NatsDirectory",
        "ray": "kvwire.directory.ray:RayDirectory",
        "redis": "kvwire.directory.redis:RedisDirectory",
        "rediss": "kvwire.directory.redis:RedisDirectory",
        "tls": "kvwire.directory.nats:NatsDirectory",
        "valkey": "kvwire.directory.redis:RedisDirectory",
        "valkeys": "kvwire.directory.redis:RedisDirectory",
    },
}


def offered(group: str) -> list[metadata.EntryPoint]:
    """Return a group's entry points, and kvwire's own that its metadata lacks."""
    found = list(metadata.entry_points(group=group))
    names = {point.name for point in found}
    return found + [
        metadata.EntryPoint(name, value, group)
        for name, value in _OWN.get(group, {}).items()
        if name not in names
    ]


class NotInstalledError(ModuleNotFoundError):
    """A package is missing; the message has the command that installs it."""


class PlugInError(Exception):
    """A plug-in cannot be used; the message begins with a verb or a colon."""


def plug_in(group: str, name: str, kind: type[Any]) -> type[Any] | None:
    """Return the class that a distribution offers under a name, or None.

    Args:
        group: The group of entry points.
        name: The name in it.
        kind: The base class that it must have.

    Raises:
        PlugInError: Its library is missing, it cannot be imported, or two distributions
            have that name.
    """
    found = {point.value: point for point in offered(group) if point.name == name}
    if not found:
        return None
    if len(found) > 1:
        claims = " and ".join(sorted(found))
        raise PlugInError(f" is claimed by {claims}; uninstall one of them")
    try:
        cls = next(iter(found.values())).load()
    except NotInstalledError as exc:
        raise PlugInError(f": {exc}") from exc
    # A plug-in may raise anything while it is imported.
    except Exception as exc:
        text = f"{type(exc).__name__}: {exc}"
        raise PlugInError(f" cannot be imported: {text}") from exc
    if not isinstance(cls, type) or not issubclass(cls, kind):
        wanted = f"{kind.__module__.removesuffix('.base')}.{kind.__name__}"
        raise PlugInError(f": {cls!r} is not a {wanted}")
    return cls


class needed_by:  # noqa: N801 - a statement's word, as in contextlib
    """A context for imports of optional packages; its errors have the install command.

    It is a class because from Python 3.12 on a ``contextlib`` generator that replaces
    the error it was given ends up in a reference cycle with the frames of both errors,
    which keeps their memory alive.
    """

    def __init__(
        self,
        what: str,
        *,
        extra: str = "",
        distribution: str = "kvwire",
        command: str = "",
    ) -> None:
        self._what = what
        self._extra = extra
        self._distribution = distribution
        self._command = command

    def __enter__(self) -> None:
        """Do nothing; the imports inside may fail."""

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        if isinstance(exc, ModuleNotFoundError):
            command = self._command or install_command(
                self._extra, distribution=self._distribution
            )
            raise NotInstalledError(
                f"{self._what} needs {exc.name}, which is not installed: {command}",
                name=exc.name,
            ) from None
        # The package is installed, but a shared library that it needs is missing.
        if isinstance(exc, ImportError):
            raise NotInstalledError(
                f"{self._what} needs {exc.name}, which cannot be imported: {exc}; "
                "install the system package that contains this library",
                name=exc.name,
            ) from None


def _is_source(directory: Path) -> bool:
    return (directory / "pyproject.toml").is_file()


def _named(source: Path, extra: str, here: str) -> str:
    inside = bool(here) and source.samefile(here)
    return shlex.quote(f"{'.' if inside else source}[{extra}]")


def _installed_from(distribution: str) -> tuple[Path | None, bool]:
    """Return the directory that pip recorded (PEP 610), if it still exists.

    The second value is whether the installation is editable.
    """
    try:
        noted = metadata.distribution(distribution).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None, False
    facts = json.loads(noted or "{}")
    if "dir_info" not in facts:
        return None, False
    source = Path(url2pathname(urlsplit(facts["url"]).path))
    editable = bool(facts["dir_info"].get("editable"))
    return (source if _is_source(source) else None), editable


def _packages(distribution: str, extra: str) -> list[str]:
    try:
        needs = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        needs = []
    marker = re.compile(rf"""\bextra == ['"]{extra}['"]""")
    return [
        need.partition(";")[0].strip() for need in needs if marker.search(need)
    ] or [f"{distribution}[{extra}]"]
