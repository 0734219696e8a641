"""Settings of the store connector, from ``kv_connector_extra_config``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvwire.config import Seconds
from kvwire.errors import UsageError
from kvwire_store.address import TierAddress
from kvwire_store.store import Write


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for an engine's use of a store.

    Attributes:
        tiers: As in :meth:`kvwire_store.BlockStore.open`; ``{rank}`` in a tier is
            replaced by the rank.
        write: When a save is complete; as in :meth:`kvwire_store.BlockStore.open`.
        fingerprint: Names the weights, including a draft model's; "" for a name derived
            from the files' content.
        portable: Name blocks so that other engines find them; see
            :mod:`kvwire_store.conventions`.
        save_hold_s: How long an ended request's blocks are held for a slow store.
        lookup_timeout_s: After this time the store counts as lacking the prompt.
        untested_vllm: Start even if kvwire was not tested with this release of vLLM.
    """

    tiers: Annotated[tuple[str, ...], Meta(min_length=1)] = ("memory:1GiB",)
    write: Write = "through"
    fingerprint: str = ""
    portable: bool = False
    save_hold_s: Seconds = 2.0
    lookup_timeout_s: Seconds = 5.0
    untested_vllm: bool = False

    def __post_init__(self) -> None:
        for tier in self.tiers:
            TierAddress.parse(tier)

    def tiers_of(self, rank: int, ranks: int) -> list[str]:
        """Return one rank's tiers."""
        for tier in self.tiers:
            if ranks > 1 and tier.startswith("disk:") and "{rank}" not in tier:
                raise UsageError(
                    f"kv_connector_extra_config: tiers={tier!r}: add {{rank}} to the "
                    f"path, because the engine has {ranks} ranks"
                )
        return [tier.replace("{rank}", str(rank)) for tier in self.tiers]
