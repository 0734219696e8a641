"""One host as the doctor sees it, for its screen and for its JSON report.

Every installed backend reports whether it can run, and its findings on this machine.
The exit status depends on the configuration's requirements: a transport in ``require``
has to run (one of them if there are several), and the key files of the trust mode have
to be usable. ``prefer`` and ``forbid`` require nothing, but an unknown name in any of
them is refused.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

import kvwire
from kvwire.backend import Finding, registry
from kvwire.backend.selection import check_transports
from kvwire.cli.doctor.checks import HostFiles, check
from kvwire.config import Config
from kvwire.errors import BackendUnavailable, KVWireError, UsageError
from kvwire.security.keys import load_keys
from kvwire.security.tls import Credentials
from kvwire.types import Role

_SHOWN: Final = ("uvloop", "msgspec", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One backend; most fields are from :class:`~kvwire.backend.Availability`."""

    name: str
    available: bool
    reason: str
    remedy: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings about one host.

    Attributes:
        system: Kernel, its release and the architecture.
        cpus: The number of CPUs that this process may use.
        container: The runtime of this container, such as "docker".
        pid: The process; 0 is the doctor itself.
        settings: Its environment variables that transports and allocators read.
        findings: Findings about the machine and the process.
        asked: Findings about the configuration's requirements.
    """

    system: str
    cpus: int = 1
    versions: dict[str, str]
    container: str = ""
    pid: int = 0
    settings: dict[str, str]
    transports: tuple[Transport, ...]
    findings: tuple[Finding, ...]
    asked: tuple[Finding, ...]

    @property
    def well(self) -> bool:
        """Return whether all the configuration's requirements are met."""
        return not any(self.missing())

    def missing(self) -> Iterator[Finding]:
        """Yield the configuration's requirements that are not met."""
        return (finding for finding in self.asked if finding.state == "missing")


def examine(config: Config, host: HostFiles) -> Examination:
    """Examine a host, and one of its processes."""
    # First, because it loads the libraries that the process is then found to have.
    backends = installed()
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return Examination(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpus=len(allowed(0)),
        versions=_versions(),
        container=host.container,
        pid=host.pid,
        settings=host.settings(),
        transports=backends,
        findings=check(host),
        asked=asked(config, backends),
    )


def _versions() -> dict[str, str]:
    found = {"kvwire": kvwire.__version__, "Python": platform.python_version()}
    for name in _SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def installed() -> tuple[Transport, ...]:
    """Examine each installed backend, sorted by name."""
    return tuple(
        Transport(
            name=name,
            available=found.available,
            reason=found.reason,
            remedy=found.remedy,
            findings=_findings(name),
        )
        for name in registry.names()
        for found in (registry.availability(name),)
    )


def _findings(name: str) -> tuple[Finding, ...]:
    try:
        backend = registry.load(name)
    except BackendUnavailable:
        return ()  # the availability's reason already covers this
    try:
        return backend.diagnose()
    # The doctor's screen must appear, whatever a third party's backend does.
    except Exception as exc:  # noqa: BLE001
        text = f"diagnose() raised {type(exc).__name__}: {exc}"
        return (Finding(name="its own check", state="warn", text=text),)


def asked(config: Config, transports: Sequence[Transport]) -> tuple[Finding, ...]:
    """Return a finding for each requirement of a configuration."""
    return (*_transports(config, transports), _settings(config), _trust(config))


def _transports(config: Config, transports: Sequence[Transport]) -> Iterator[Finding]:
    runs = {t.name: t.available for t in transports if t.name not in config.forbid}
    wanted = config.require or tuple(runs)
    usable = [name for name in wanted if runs.get(name)]
    name = "require" if config.require else "transports"
    if usable:
        yield Finding(name=name, state="ok", text=f"can run: {', '.join(usable)}")
    else:
        remedies = [t.remedy for t in transports if t.name in wanted and t.remedy]
        yield Finding(
            name=name,
            state="missing",
            text=f"cannot run here: {', '.join(wanted) or 'there is none'}",
            remedy="; ".join(remedies),
        )
    for named in config.prefer:
        if runs.get(named) is False and named not in config.require:
            text = f"{named} cannot run here: the next preference is used"
            yield Finding(name="prefer", state="warn", text=text)


def _settings(config: Config) -> Finding:
    try:
        check_transports(config)
    except KVWireError as exc:
        return Finding(name="names", state="missing", text=str(exc))
    return Finding(name="names", state="ok", text="every transport and setting exists")


def _trust(config: Config) -> Finding:
    made: Credentials | None = None
    try:
        load_keys(config)
        if config.trust == "mtls":
            made = Credentials(config)
    except UsageError as exc:
        return Finding(name="trust", state="missing", text=str(exc))
    if made is not None:
        return _certificates(made)
    found = {"loopback": "this host only", "psk": "the key can be read"}
    return Finding(
        name="trust", state="ok", text=f"{config.trust}: {found[config.trust]}"
    )


def _certificates(made: Credentials) -> Finding:
    """Judge usable certificate files: whether peers would accept them."""
    state, text = made.trouble()
    notes = [text]
    if len(made.own.roles) < len(Role):
        (role,) = made.own.roles
        verb = "connects" if role is Role.CLIENT else "listens"
        notes.append(f"its extended key usage allows only a side that {verb}")
    if not made.is_signed_by_ours:
        notes.append("no CA in tls_ca_file has signed it, so peers need another CA")
    remedy = ""
    if state:
        remedy = "write new files beside the old ones and rename them into place"
    return Finding(
        name="trust",
        state="missing" if state in ("expired", "early") else "warn" if state else "ok",
        text=f"mtls: {'; '.join(notes)}",
        remedy=remedy,
    )
