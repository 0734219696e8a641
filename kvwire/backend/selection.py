"""Chooses the transport of a connection's data, with a reason for every other one.

Both sides list their transports; the server decides, respecting both sides' settings,
and gives a reason for every candidate. ``require`` excludes all others, ``forbid``
removes, ``prefer`` orders; transports without a preference follow by rank. The
transport of the control link carries data too, unless it is ruled out; the others do so
on lanes beside it. If a chosen transport fails when it is tried, the next one is tried.
Nothing is skipped silently: the report lists every backend that either side knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from kvwire.backend import registry
from kvwire.backend.link import API_VERSION, Availability, Backend
from kvwire.config import Config
from kvwire.errors import BackendUnavailable, UsageError, nearest
from kvwire.types import Candidate, TransportReport

_NOT_NEEDED = "another was preferred"
# A peer may offer anything; peers of one release offer the same.
_REPORTS_MAX: Final = 16


class Selection:
    """One side's choice of transports beside the links of one scheme, made once.

    Only transports that cannot run at the moment are asked again for each link.

    Attributes:
        config: This side's settings.
        scheme: The transport of the control links.
    """

    def __init__(self, config: Config, scheme: str) -> None:
        self.config: Config = config
        self.scheme: str = scheme
        self._carries = False
        self._offered: tuple[str, ...] = ()
        # Transports that the settings allow, and that cannot run at the moment.
        self._absent: tuple[str, ...] = ()
        self._reports: dict[tuple[tuple[str, int], ...], TransportReport] = {}

    def require(self) -> None:
        """Refuse a scheme that carries no control links here.

        Raises:
            BackendUnavailable: The reason, with a remedy if there is one.
        """
        if not self._carries:
            require_usable(self.config)
            reason = control_rejection(self.config, self.scheme)
            if reason:
                raise BackendUnavailable(f"transport {self.scheme!r}: {reason}")
            self._carries = True

    @property
    def offered(self) -> tuple[str, ...]:
        """Return the transports that this side offers.

        The first call loads their libraries, which takes up to a second.
        """
        absent = self._absent
        if not self._offered or (absent and any(map(_runs, absent))):
            allowed = [n for n in registry.names() if not refusal(self.config, n)]
            self._absent = tuple([name for name in allowed if not _runs(name)])
            self._offered = offered(self.config, self.scheme)
            self._reports.clear()
        return self._offered

    def negotiate(self, theirs: tuple[tuple[str, int], ...]) -> TransportReport:
        """Return the server's decision about a client's offer.

        Args:
            theirs: The name and contract version of each transport.
        """
        own = self.offered  # it may have changed
        report = self._reports.get(theirs)
        if report is None or not own:
            report = negotiate(self.config, self.scheme, theirs)
            if len(self._reports) >= _REPORTS_MAX:
                self._reports.clear()
            self._reports[theirs] = report  # bounded: _REPORTS_MAX
        return report


def apply_overrides(config: Config, transport: str | Iterable[str] | None) -> Config:
    """Return the configuration, narrowed by a connection's own ``transport=``.

    Raises:
        UsageError: ``transport`` is empty or not a name or names.
    """
    if transport is not None:
        if not isinstance(transport, Iterable):
            raise UsageError(
                f'transport={transport!r}: a name such as "tcp", or a list of them'
            )
        names = (transport,) if isinstance(transport, str) else tuple(transport)
        if not names:
            raise UsageError(
                "transport: the list is empty; name a transport, or pass None to let "
                "kvwire choose"
            )
        config = config.replace(require=names, prefer=names)
    return config


def require_usable(config: Config) -> None:
    """Refuse settings whose ``require`` has only transports that cannot run here.

    Raises:
        BackendUnavailable: The reason for each.
    """
    if config.require and not any(map(_runs, config.require)):
        reasons = "; ".join(_why_not(name) for name in config.require)
        raise BackendUnavailable(f"none of the required transports can run: {reasons}")


def check_transports(config: Config) -> None:
    """Refuse unknown names of transports, and unknown settings of a transport."""
    keys = ("prefer", "require", "forbid", "backends")
    named = [(key, name) for key in keys for name in getattr(config, key)]
    known = registry.names() if named else ()
    for key, name in named:
        if name not in known:
            raise UsageError(
                f"{key}: no installed package offers a transport {name!r}; "
                f"{nearest(name, known)}"
            )
    for name, settings in config.backends.items():
        registry.load(name).check_settings(settings)


def refusal(config: Config, name: str) -> str:
    """Return why this side's settings rule out a transport; "" if they do not."""
    if name in config.forbid:
        return "forbidden by `forbid`"
    if config.require and name not in config.require:
        return f"not among `require` = {', '.join(config.require)}"
    return ""


def control_rejection(config: Config, scheme: str) -> str:
    """Return why a transport carries no control links here; "" if it does.

    A transport that ``require`` lacks may still carry the control link for one in it.
    """
    if scheme in config.forbid:
        return "forbidden by `forbid`"
    found = registry.availability(scheme)
    if not found.available:
        return f"{found.reason}{'; ' + found.remedy if found.remedy else ''}"
    if not registry.load(scheme).capabilities.links:
        return (
            "has no addresses of its own; connect to a tcp:// address, and the data "
            "goes over it"
        )
    if config.trust == "mtls" and not registry.load(scheme).capabilities.tls:
        return 'it cannot be inside TLS, and trust is "mtls"; use a tcp:// address'
    if all(local_rejection(config, name, scheme) for name in config.require):
        return refusal(config, scheme)
    return ""


def local_rejection(config: Config, name: str, scheme: str) -> str:
    """Return why a transport is not offered beside a scheme's link; "" if it is."""
    if config.forbid or config.require:
        ruled_out = refusal(config, name)
        if ruled_out:
            return ruled_out
    found = registry.availability(name)
    if not found.available:
        return found.reason
    if name == scheme:
        return ""
    capabilities = registry.load(name).capabilities
    inside = capabilities.same_process
    named = name in (*config.prefer, *config.require)
    if not capabilities.lanes or (capabilities.links and not inside):
        return f"needs an address of its own; this connection was made over {scheme}"
    if inside and not named:
        return "only within one process; name it in `prefer` to try it"
    if _stays_inside(scheme) and name not in config.require:
        return f"nothing is nearer than {scheme}"
    if config.trust == "mtls" and not (named or protection(name)):
        return (
            'its payload is not encrypted, and trust is "mtls"; name it in `prefer` or '
            "`require` to take it all the same"
        )
    return ""


def offered(config: Config, scheme: str) -> tuple[str, ...]:
    """Return the transports that this side offers beside a scheme's link."""
    return tuple(
        [name for name in registry.names() if not local_rejection(config, name, scheme)]
    )


def protection(name: str) -> str:
    """Return how a transport keeps payload private in ``mtls`` mode, or ""."""
    capabilities = registry.load(name).capabilities
    if capabilities.tls:
        return "inside TLS"
    near = capabilities.same_process or capabilities.same_host
    return "it never leaves this host" if near else ""


def _stays_inside(name: str) -> bool:
    """Return whether a transport works within one process only."""
    try:
        return registry.load(name).capabilities.same_process
    except BackendUnavailable:
        return False


def negotiate(
    config: Config, scheme: str, theirs: Iterable[tuple[str, int]]
) -> TransportReport:
    """Return the server's decision about every transport that either side knows.

    Args:
        config: This side's settings.
        scheme: The transport of the control link.
        theirs: (name, contract version) of each transport that the client offers.

    Returns:
        The candidates in the order in which they are tried. The first that is possible
        is taken.
    """
    versions = dict(theirs)
    candidates: list[Candidate] = []
    taken = False
    for name in _ordered(config, {*versions, *registry.names()}):
        reason = local_rejection(config, name, scheme)
        if not reason and name not in versions:
            reason = "not offered by the client"
        if not reason and versions[name] != API_VERSION:
            reason = (
                f"client has contract {versions[name]}, this side {API_VERSION}; "
                f"upgrade the older one"
            )
        possible = not reason
        if possible and taken:
            reason = _NOT_NEEDED
        candidates.append(
            Candidate(name, not reason, reason or "offered by both sides", possible)
        )
        taken = taken or possible
    return TransportReport(tuple(candidates))


def with_result(
    report: TransportReport, taken: str, why: str, failed: Mapping[str, str]
) -> TransportReport:
    """Return the report after transports were tried, or after one has broken.

    Args:
        report: The report so far.
        taken: The transport that carries the data now.
        why: The reason for that.
        failed: By name, the reason why each transport that was tried has failed.
    """
    return TransportReport(
        tuple(
            replace(c, taken=True, reason=why)
            if c.name == taken
            else replace(c, taken=False, reason=failed.get(c.name, _reason(c)))
            for c in report
        )
    )


def _reason(candidate: Candidate) -> str:
    return _NOT_NEEDED if candidate.taken else candidate.reason


def _ordered(config: Config, names: Iterable[str]) -> list[str]:
    wished = {name: index for index, name in enumerate(config.prefer)}
    last = len(wished)
    ranked = [(wished.get(name, last), registry.rank(name), name) for name in names]
    return [name for _, _, name in sorted(ranked)]


def _runs(name: str) -> bool:
    return registry.availability(name).available


def _why_not(name: str) -> str:
    found: Availability = registry.availability(name)
    return f"{found.reason}{'; ' + found.remedy if found.remedy else ''}"


def crosses_hosts(backend: Backend) -> bool:
    """Return whether other hosts may reach a backend, which then needs a key."""
    capabilities = backend.capabilities
    return not (capabilities.same_process or capabilities.same_host)
