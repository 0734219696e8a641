"""Finds backends, by the entry-point group ``kvwire.backends``.

In-tree backends use it too, so third-party backends have no disadvantage; kvwire's own
are known without its metadata as well. If two
distributions offer the same name, that is an error that names both; otherwise the first
on the path would win silently.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import lru_cache
from importlib import metadata
from typing import Final

from kvwire.backend.link import API_VERSION, Availability, Backend, Capabilities
from kvwire.errors import BackendUnavailable, nearest
from kvwire.extras import offered
from kvwire.limits import BACKENDS_MAX

GROUP = "kvwire.backends"
RANK_LAST: Final = 99
"""The rank of a backend that cannot be used, or that returns no rank."""


def names() -> tuple[str, ...]:
    """Return the schemes that installed distributions offer, sorted."""
    return tuple(sorted(_entry_points()))


def load(name: str) -> type[Backend]:
    """Import the backend called ``name``.

    Raises:
        BackendUnavailable: None or several have this name, or it cannot be imported.
    """
    return _load(name, tuple(sys.path))


def availability(name: str) -> Availability:
    """Return whether the backend called ``name`` can run here; never raises."""
    try:
        found: object = _load(name, tuple(sys.path)).availability()
    except BackendUnavailable as exc:
        return Availability(available=False, reason=str(exc))
    # A package that breaks its promise is left out, without effect on other transports.
    except Exception as exc:  # noqa: BLE001
        found = exc
    if isinstance(found, Availability):
        return found
    reason = f"a bug of backend {name!r}: availability() gave {found!r}"
    return Availability(available=False, reason=reason)


def rank(name: str) -> int:
    """Return the rank of the backend called ``name``; never raises."""
    try:
        found: object = _load(name, tuple(sys.path)).rank()
    except Exception:  # noqa: BLE001 - as above
        return RANK_LAST
    return found if isinstance(found, int) else RANK_LAST


# Cached, since each handshake looks up each backend several times. Failures are not
# cached.
@lru_cache(maxsize=BACKENDS_MAX)
def _load(name: str, _path: tuple[str, ...]) -> type[Backend]:
    found = _entry_points().get(name, [])
    if not found:
        raise BackendUnavailable(
            f"no backend called {name!r} is installed; {nearest(name, names())}"
        )
    if len(found) > 1:
        owners = " and ".join(sorted(_owner(point) for point in found))
        raise BackendUnavailable(
            f"backend {name!r} is claimed by {owners}; uninstall one of them"
        )
    try:
        cls = found[0].load()
    # A plug-in may raise anything, such as OSError for a missing shared library. If it
    # exits the interpreter on import, that must not end this process.
    except (Exception, SystemExit) as exc:
        raise BackendUnavailable(
            f"backend {name!r}, {found[0].value}, cannot be imported: "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    return _checked(name, cls)


def _entry_points() -> dict[str, list[metadata.EntryPoint]]:
    """Return every offered backend by name; a name has one entry per distribution."""
    try:
        found = _installed(tuple(sys.path))
    # Any exception is possible: importlib.metadata does not validate entry-point files.
    except Exception as exc:
        reason = f"{type(exc).__name__}: {exc}{_culprit()}"
        raise BackendUnavailable(
            f"installed packages cannot be read: {reason}"
        ) from exc
    if not any(point.dist for points in found.values() for point in points):
        # Without a free descriptor a folder appears empty, which must not be cached.
        _installed.cache_clear()
        metadata.MetadataPathFinder().invalidate_caches()
    return found


@lru_cache(maxsize=1)
def _installed(_path: tuple[str, ...]) -> dict[str, list[metadata.EntryPoint]]:
    """Return the entry points, cached per path: reading opens a file per distribution.

    A running process does not see a backend that is installed later.
    """
    found: dict[str, dict[str, metadata.EntryPoint]] = defaultdict(dict)
    for point in offered(GROUP):
        found[point.name][f"{_owner(point)}: {point.value}"] = point
    return {name: list(points.values()) for name, points in found.items()}


def _culprit() -> str:
    """Return a text naming the distribution with unreadable entry points, or ""."""
    try:
        for dist in metadata.distributions():
            try:
                dist.entry_points  # noqa: B018 - reading it parses it
            except Exception:  # noqa: BLE001
                return f"; reinstall {dist.name}"
    except OSError:
        pass
    return ""


def _owner(point: metadata.EntryPoint) -> str:
    dist = point.dist
    return f"{dist.name} {dist.version}" if dist else point.value


def _checked(name: str, cls: object) -> type[Backend]:
    if not isinstance(cls, type) or not issubclass(cls, Backend):
        raise BackendUnavailable(
            f"backend {name!r}: {cls!r} is not a kvwire.backend.Backend"
        )
    if getattr(cls, "scheme", None) != name:
        raise BackendUnavailable(
            f"backend {name!r}: {cls.__name__}.scheme must be that name too"
        )
    if not isinstance(getattr(cls, "capabilities", None), Capabilities):
        raise BackendUnavailable(
            f"backend {name!r}: {cls.__name__}.capabilities must be kvwire.backend."
            "Capabilities"
        )
    if cls.api_version != API_VERSION:
        raise BackendUnavailable(
            f"backend {name!r} implements contract {cls.api_version}, this kvwire "
            f"{API_VERSION}; upgrade the older of the two"
        )
    return cls
