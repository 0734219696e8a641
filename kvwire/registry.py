"""Finds backends: the entry-point group ``kvwire.backends`` is the only mechanism.

In-tree backends use it too, so that a third-party one is never second class. Two
distributions that claim one name are an error naming both: whichever came first on the
path would otherwise win silently.
"""

from __future__ import annotations

from collections import defaultdict
from importlib import metadata

from kvwire.backend import API_VERSION, Availability, Backend
from kvwire.errors import BackendUnavailable

GROUP = "kvwire.backends"


def names() -> tuple[str, ...]:
    """The schemes that some installed distribution offers, sorted."""
    return tuple(sorted(_entry_points()))


def load(name: str) -> type[Backend]:
    """Import the backend called ``name``.

    Raises:
        BackendUnavailable: Nobody offers it, two do, it cannot be imported, or it was
            written for another version of the contract.
    """
    found = _entry_points().get(name, [])
    if not found:
        known = ", ".join(names()) or "none"
        raise BackendUnavailable(f"no backend called {name!r} is installed; there is: {known}")
    if len(found) > 1:
        owners = " and ".join(sorted(_owner(point) for point in found))
        raise BackendUnavailable(
            f"backend {name!r} is claimed by {owners}; uninstall one of them"
        )
    try:
        cls = found[0].load()
    except ImportError as exc:
        raise BackendUnavailable(
            f"backend {name!r} of {_owner(found[0])} cannot be imported: {exc}"
        ) from exc
    return _checked(name, cls)


def availability(name: str) -> Availability:
    """Whether the backend called ``name`` can run here; never raises."""
    try:
        return load(name).availability()
    except BackendUnavailable as exc:
        return Availability(available=False, reason=str(exc))


def _entry_points() -> dict[str, list[metadata.EntryPoint]]:
    found: dict[str, list[metadata.EntryPoint]] = defaultdict(list)
    for point in metadata.entry_points(group=GROUP):
        # An editable install can list one distribution's entry twice; same value, once.
        if all(other.value != point.value for other in found[point.name]):
            found[point.name].append(point)
    return found


def _owner(point: metadata.EntryPoint) -> str:
    dist = point.dist
    return f"{dist.name} {dist.version}" if dist else point.value


def _checked(name: str, cls: object) -> type[Backend]:
    if not isinstance(cls, type) or not issubclass(cls, Backend):
        raise BackendUnavailable(f"backend {name!r}: {cls!r} is no kvwire.backend.Backend")
    if cls.api_version != API_VERSION:
        raise BackendUnavailable(
            f"backend {name!r} speaks contract {cls.api_version}, this kvwire {API_VERSION}; "
            f"upgrade the older of the two"
        )
    return cls
