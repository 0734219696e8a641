"""Engines from a directory's records, with the checks before one is accepted.

Records are not trusted, since anybody with write access to the directory can forge
them. :mod:`kvwire.directory.record` has already checked each record's form. Here its
labels are parsed, each within its own bounds, and its two addresses must be on hosts
that the operator allows: the HTTP address, which receives prompts and clients' keys,
and the KV address, which is sent to engines.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

import msgspec

from kvwire.config import converted
from kvwire.directory import Record
from kvwire.errors import UsageError, shown
from kvwire.types import Address, is_loopback
from kvwire_vllm.announce import ROLES, EngineLabels, http_url


@dataclass(frozen=True, slots=True)
class VllmMember:
    """One rank of an engine, from its record."""

    url: str  # URL of the engine's HTTP server
    address: str  # address of this rank's KV listener
    labels: EngineLabels  # the parsed labels
    record: Record  # the whole record


class AllowedHosts:
    """The hosts that may be dialled if a directory lists them."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: list[str] = []  # a leading "*." stands for all names below
        for text in texts:
            try:
                self._networks.append(ipaddress.ip_network(text))
                continue
            except ValueError:
                bare = text.lower().removeprefix("*.")
            if not bare or not set(bare) <= _OF_NAMES or bare[0].isdigit():
                raise UsageError(
                    f"allow {text!r}: write a network (10.0.0.0/8), a name, or a "
                    "pattern for all names of a domain (*.fleet.svc)"
                )
            self._names.append(text.lower())
        self._this_host = not texts

    def check(self, host: str) -> None:
        """Refuse a host that is not allowed."""
        host = host.lower()
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            fine = set(host) <= _OF_NAMES and any(
                fnmatchcase(host, name) for name in self._names
            )
            fine = fine or (self._this_host and host == "localhost")
        else:
            fine = any(ip in network for network in self._networks)
            fine = fine or (self._this_host and is_loopback(host))
        if not fine:
            raise UsageError(f"{shown(host)} is not allowed: add it to --allow")


def read_member(record: Record, allowed: AllowedHosts) -> VllmMember:
    """Parse a record into an engine's rank."""
    try:
        # Not strict, since the value of a label is always a text.
        labels = converted(record.labels, EngineLabels, strict=False)
    except msgspec.ValidationError as exc:
        raise UsageError(f"labels: {exc}") from None
    if labels.rank >= labels.ranks:
        raise UsageError(f"labels: rank {labels.rank} of {labels.ranks} does not exist")
    if labels.ranks % labels.stages:
        raise UsageError(
            f"{labels.ranks} ranks cannot be divided among {labels.stages} pipeline "
            "stages"
        )
    if record.role not in ROLES:
        raise UsageError(f"role {shown(record.role)} is not one of {', '.join(ROLES)}")
    url = http_url(labels.http)
    address = _tcp(record.address)
    for host in (address.host, urlsplit(url).hostname or ""):
        allowed.check(host)
    return VllmMember(url, str(address), labels, record)


def _tcp(text: str) -> Address:
    address = Address.parse(text)
    if address.scheme != "tcp" or not address.port:
        raise UsageError(f"{shown(text)} is not a tcp://host:port")
    return address


_OF_NAMES = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._")
