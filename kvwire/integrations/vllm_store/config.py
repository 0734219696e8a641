"""What ``kv_connector_extra_config`` says to the connector of the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvwire.errors import UsageError
from kvwire.integrations.vllm.config import check_keys
from kvwire.store.address import TierAddress
from kvwire.store.store import Write

_PARTS_MAX: Final = 64


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
        """Read ``kv_connector_extra_config``.

        Raises:
            UsageError: A key is unknown or its value is not allowed; names it.
        """
        check_keys(extra, {field.name for field in dataclasses.fields(cls)})
        return cls(**extra)

    def __post_init__(self) -> None:
        tiers: object = self.tiers
        if not isinstance(tiers, list | tuple) or not tiers:
            raise _wrong("tiers", tiers, 'a list, such as ["memory:4GiB"]')
        for tier in self.tiers:
            TierAddress.parse(tier)
        if self.write not in ("through", "back"):
            raise _wrong("write", self.write, '"through" or "back"')
        if type(self.parts) is not int or not 1 <= self.parts <= _PARTS_MAX:
            raise _wrong("parts", self.parts, f"a number from 1 to {_PARTS_MAX}")
        fingerprint: object = self.fingerprint
        if not isinstance(fingerprint, str):
            raise _wrong("fingerprint", fingerprint, "a text")
        wait: object = self.lookup_timeout_s
        if not isinstance(wait, int | float) or wait <= 0:
            raise _wrong("lookup_timeout_s", wait, "seconds above 0")

    def tiers_of(self, rank: int, ranks: int) -> list[str]:
        """Return the tiers of one rank.

        Raises:
            UsageError: Several ranks would keep their blocks in one directory.
        """
        for tier in self.tiers:
            if ranks > 1 and tier.startswith("disk:") and "{rank}" not in tier:
                raise _wrong("tiers", tier, f"{{rank}} in it, since there are {ranks}")
        return [tier.replace("{rank}", str(rank)) for tier in self.tiers]


def _wrong(name: str, value: object, what: str) -> UsageError:
    return UsageError(f"kv_connector_extra_config: {name}={value!r}: {what}")
