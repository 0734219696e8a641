"""Every installed backend: whether it can run, and what it says of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.backend import Finding, registry
from kvwire.errors import BackendUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One backend; see :class:`~kvwire.backend.Availability` for the first fields."""

    name: str
    available: bool
    reason: str
    remedy: str = ""
    findings: tuple[Finding, ...] = ()


def installed() -> tuple[Transport, ...]:
    """All that some distribution offers, sorted by name."""
    return tuple(_asked(name) for name in registry.names())


def _asked(name: str) -> Transport:
    found = registry.availability(name)
    return Transport(
        name=name,
        available=found.available,
        reason=found.reason,
        remedy=found.remedy,
        findings=_findings(name),
    )


def _findings(name: str) -> tuple[Finding, ...]:
    try:
        backend = registry.load(name)
    except BackendUnavailable:
        return ()  # that is the reason already
    try:
        return backend.diagnose()
    # The doctor's screen has to come up whatever a third party's backend does.
    except Exception as exc:  # noqa: BLE001
        text = f"diagnose() raised {type(exc).__name__}: {exc}"
        return (Finding(name="its own check", state="warn", text=text),)
