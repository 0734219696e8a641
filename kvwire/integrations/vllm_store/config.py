"""What ``kv_connector_extra_config`` says to the connector of the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvwire.errors import UsageError
from kvwire.integrations.vllm.config import (
    SECONDS,
    TEXT,
    ValueCheck,
    check_keys,
    check_values,
    one_of,
    whole_number,
)
from kvwire.store.address import TierAddress
from kvwire.store.store import Write

_VALUES: Final[dict[str, ValueCheck]] = {
    "tiers": (
        lambda value: isinstance(value, list | tuple) and bool(value),
        'a list, such as ["memory:4GiB"]',
    ),
    "write": one_of("through", "back"),
    "parts": whole_number(1, 64),
    "fingerprint": TEXT,
    "lookup_timeout_s": SECONDS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Holds how one engine uses a store.

    Attributes:
        tiers: Of :meth:`kvwire.BlockStore.open`; ``{rank}`` in one is the rank.
        write: When a save is complete: see :meth:`kvwire.BlockStore.open`.
        parts: In how many parts the layers are saved and loaded. With more than one, a
            part is saved when its last layer is written, and a prompt begins when its
            first part is here. Engines that share blocks have the same number.
        fingerprint: Names the weights, where model configs alone cannot tell them.
        lookup_timeout_s: After this a prompt counts as one that the store lacks.
    """

    tiers: Sequence[str] = ("memory:1GiB",)
    write: Write = "through"
    parts: int = 1
    fingerprint: str = ""
    lookup_timeout_s: float = 5.0

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Self:
        """Read ``kv_connector_extra_config``."""
        check_keys(extra, {field.name for field in dataclasses.fields(cls)})
        return cls(**extra)

    def __post_init__(self) -> None:
        check_values(self, _VALUES)
        for tier in self.tiers:
            TierAddress.parse(tier)

    def tiers_of(self, rank: int, ranks: int) -> list[str]:
        """Return the tiers of one rank."""
        for tier in self.tiers:
            if ranks > 1 and tier.startswith("disk:") and "{rank}" not in tier:
                raise UsageError(
                    f"kv_connector_extra_config: tiers={tier!r}: {{rank}} in it, since "
                    f"there are {ranks}"
                )
        return [tier.replace("{rank}", str(rank)) for tier in self.tiers]
