"""Which transport a connection uses, and why each other one was not taken.

Both sides name what they have; the server decides with both sides' wishes and says why
for every candidate. ``require`` leaves nothing else, ``forbid`` removes, ``prefer``
orders. Nothing is skipped in silence: the report lists every backend that either side
knows of.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvwire import registry
from kvwire.backend import API_VERSION, Availability
from kvwire.config import Config
from kvwire.errors import BackendUnavailable
from kvwire.types import Candidate, TransportReport


def wishes(config: Config, transport: str | Iterable[str] | None) -> Config:
    """The configuration with a connection's own ``transport=`` put in.

    Raises:
        BackendUnavailable: A required transport is not installed here, or cannot run.
    """
    if transport is not None:
        names = (transport,) if isinstance(transport, str) else tuple(transport)
        config = config.replace(require=names, prefer=names)
    usable = [name for name in config.require if registry.availability(name).available]
    if config.require and not usable:
        reasons = "; ".join(_why_not(name) for name in config.require)
        raise BackendUnavailable(f"none of the required transports can run: {reasons}")
    return config


def refusal(config: Config, name: str) -> str:
    """Why this side's wishes rule a transport out; "" if they do not."""
    if name in config.forbid:
        return "forbidden by `forbid`"
    if config.require and name not in config.require:
        return f"not among `require` = {', '.join(config.require)}"
    return ""


def local_refusal(config: Config, name: str, scheme: str) -> str:
    """Why this side does not offer a transport on a link of a scheme; "" if it does."""
    ruled_out = refusal(config, name)
    if ruled_out:
        return ruled_out
    found = registry.availability(name)
    if not found.available:
        return found.reason
    if name != scheme:
        return f"needs an address of its own; this connection was made over {scheme}"
    return ""


def judge(
    config: Config, scheme: str, offered: Iterable[tuple[str, int]]
) -> TransportReport:
    """The server's verdict on every transport that either side knows of.

    Args:
        config: This side's wishes.
        scheme: The transport the connection came in over.
        offered: (name, contract version) of what the client offers.
    """
    theirs = dict(offered)
    candidates: list[Candidate] = []
    taken = False
    for name in _ordered(config, {*theirs, *registry.names()}):
        reason = local_refusal(config, name, scheme)
        if not reason and name not in theirs:
            reason = "not offered by the client"
        if not reason and theirs[name] != API_VERSION:
            reason = f"client has contract {theirs[name]}, this side {API_VERSION}"
        if not reason and taken:
            reason = "another was preferred"
        taken = taken or not reason
        candidates.append(
            Candidate(name, not reason, reason or "offered by both sides")
        )
    return TransportReport(tuple(candidates))


def _ordered(config: Config, names: Iterable[str]) -> list[str]:
    rank = {name: index for index, name in enumerate(config.prefer)}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def _why_not(name: str) -> str:
    found: Availability = registry.availability(name)
    return f"{found.reason}{'; ' + found.remedy if found.remedy else ''}"
