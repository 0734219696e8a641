"""The tenants of a store and their quotas: ``acme?disk=100GiB&ttl=3600``.

A tenant's name is part of its blocks' keys (:mod:`kvwire_store.namespace`), so that no
other tenant finds them. Quotas are counted in each tier separately. A quota limits a
tenant but reserves nothing for it. As long as the sum of all quotas is less than a
tier's size, no tenant evicts another's blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.config import local_path
from kvwire.errors import UsageError, shown, wrong_type
from kvwire.limits import NAME_CHARS_MAX
from kvwire_store.address import TierAddress
from kvwire_store.limits import (
    STORE_PINNED_SHARE,
    STORE_TENANTS_MAX,
    STORE_TIER_BYTES_MAX,
    STORE_TTL_S_MAX,
)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_QUOTAS: Final = ("memory", "disk")
_OPTIONS: Final = ("quota", *_QUOTAS, "ttl", "pinned", "key", "identity")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant and its quotas.

    Attributes:
        name: Its name.
        quotas: The most bytes it may have in each kind of tier; a kind without an entry
            is unlimited.
        ttl_s: Seconds after which its blocks expire; 0 for never.
        pinned_bytes: The most bytes it may pin in a tier; 0 for half of its quota, or
            its even share of a quarter of the tier, whichever is less.
        key_file: The file of the key with which it authenticates to a server; "" for
            none.
        identity: The name in the certificate with which it authenticates; "" for none.
    """

    name: str
    quotas: Mapping[str, int] = field(default_factory=dict)
    ttl_s: float = 0.0
    pinned_bytes: int = 0
    key_file: str = ""
    identity: str = ""

    @classmethod
    def parse(cls, text: str) -> Tenant:
        """Parse a tenant.

        Args:
            text: ``NAME?quota=SIZE&memory=SIZE&disk=SIZE&ttl=SECONDS&pinned=SIZE``, and
                for a server ``key=FILE`` or ``identity=NAME``. An empty name stands for
                blocks without a tenant, for which only ``pinned`` can be set.
        """
        if not isinstance(text, str):
            raise UsageError(f"tenant {text!r}: write 'acme?disk=100GiB&ttl=3600'")
        address = TierAddress.parse(f"tenant:{text}")
        name = address.place
        options = address.options
        if not name and options:
            # The limit for blocks that belong to no tenant.
            address.require("pinned")
        elif not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
            raise UsageError(
                f"tenant {shown(name)}: use letters, digits, '.', '_' and '-', at "
                f"most {NAME_CHARS_MAX}"
            )
        address.require(*_OPTIONS)
        quotas = {
            kind: address.size(options.get(kind) or options["quota"], kind)
            for kind in _QUOTAS
            if kind in options or "quota" in options
        }
        return cls(
            name,
            quotas,
            address.number("ttl", 0.0, STORE_TTL_S_MAX),
            address.size_option("pinned", 0),
            local_path(options.get("key", "")),
            options.get("identity", ""),
        )


def _is_named(tenant: Tenant) -> bool:
    return bool(tenant.name)


def _most(size_bytes: int, quota: int) -> int:
    """Return the limit for pinned bytes, or for bytes that move at once."""
    return min(size_bytes // STORE_PINNED_SHARE, quota // 2)


class Shares:
    """Each tenant's limits in one tier, by the tenant's number."""

    __slots__ = ("expire", "pinned_bytes", "quota_bytes", "ttl_s")

    def __init__(
        self,
        quota_bytes: Sequence[int],
        pinned_bytes: Sequence[int],
        ttl_s: Sequence[float],
    ) -> None:
        self.quota_bytes: npt.NDArray[np.int64] = np.array(quota_bytes, np.int64)
        self.pinned_bytes: npt.NDArray[np.int64] = np.array(pinned_bytes, np.int64)
        self.ttl_s: npt.NDArray[np.float64] = np.array(ttl_s, np.float64)
        self.expire: bool = bool(self.ttl_s.any())

    def __len__(self) -> int:
        """Return the number of tenants, plus one for blocks without a tenant."""
        return self.quota_bytes.size

    @classmethod
    def of_all(cls, size_bytes: int) -> Shares:
        """Return the shares of a tier without tenants."""
        return Tenants().shares("", size_bytes)


class Tenants:
    """The tenants of one store. Number 0, named ``""``, stands for no tenant."""

    __slots__ = ("_numbers", "listed")

    def __init__(self, tenants: Iterable[str | Tenant] = ()) -> None:
        if isinstance(tenants, str):
            raise UsageError('tenants: pass a list, such as ["acme?quota=16GiB"]')
        read = (
            one if isinstance(one, Tenant) else Tenant.parse(one) for one in tenants
        )
        listed = sorted(read, key=_is_named)  # number 0, for no tenant, comes first
        if not listed or listed[0].name:
            listed.insert(0, Tenant(""))
        self.listed: tuple[Tenant, ...] = tuple(listed)
        names = [tenant.name for tenant in self.listed]
        self._numbers = dict(zip(names, range(len(names)), strict=True))
        if len(self._numbers) < len(names):
            raise UsageError(
                "tenants: a name appears twice; write all its options in one entry"
            )
        if len(names) - 1 > STORE_TENANTS_MAX:
            raise UsageError(
                f"tenants: {len(names) - 1} are too many; at most {STORE_TENANTS_MAX} "
                "are allowed"
            )

    def __len__(self) -> int:
        """Return the number of tenants."""
        return len(self.listed) - 1

    def number(self, name: str) -> int:
        """Return a tenant's number; 0 if there is no such tenant."""
        return self._numbers.get(name, 0)

    def require(self, name: str) -> None:
        """Refuse an unknown tenant."""
        if not isinstance(name, str):
            raise wrong_type("tenant", name, "a tenant's name")
        if name not in self._numbers:
            known = ", ".join(t.name for t in self.listed[1:]) or "none"
            raise UsageError(
                f"tenant={shown(name)}: the tenants are {known}; add it to tenants= "
                "of BlockStore.open"
            )

    def moving_bytes(self, number: int, memory_bytes: int) -> int:
        """Return the bytes that prefetches may move at once for a tenant."""
        quota = self.listed[number].quotas.get("memory", STORE_TIER_BYTES_MAX)
        return _most(memory_bytes, quota)

    def shares(self, kind: str, size_bytes: int) -> Shares:
        """Return all tenants' limits in a tier of this kind and size."""
        quotas = [one.quotas.get(kind, STORE_TIER_BYTES_MAX) for one in self.listed]
        most = [_most(size_bytes, quota) for quota in quotas]
        # Pins may last for ever, so no tenant has all that may be pinned, unless the
        # operator says so.
        even = size_bytes // STORE_PINNED_SHARE // max(1, len(self))
        pinned = [
            min(bound, one.pinned_bytes or (even if one.name else bound))
            for bound, one in zip(most, self.listed, strict=True)
        ]
        return Shares(quotas, pinned, [one.ttl_s for one in self.listed])
