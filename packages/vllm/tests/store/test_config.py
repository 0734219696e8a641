"""What may stand in ``kv_connector_extra_config``."""

from __future__ import annotations

from typing import Any

import pytest

from kvwire.errors import UsageError
from kvwire_vllm.config import read_keys
from kvwire_vllm.store.config import StoreSettings


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"tier": []}, "unknown key 'tier'; did you mean 'tiers'"),
        ({"tiers": "memory:1GiB"}, "tiers='memory:1GiB'"),
        ({"tiers": []}, "tiers"),
        ({"tiers": ["8GiB"]}, "8GiB"),
        ({"write": "never"}, "write='never'"),
        ({"fingerprint": 3}, "fingerprint=3"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s=0"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_keys(extra, StoreSettings)


def test_ranks_do_not_share_a_directory() -> None:
    shared = read_keys({"tiers": ["memory:1GiB", "disk:/kv?size=1GiB"]}, StoreSettings)
    assert shared.tiers_of(0, 1) == list(shared.tiers)
    with pytest.raises(UsageError, match="rank"):
        shared.tiers_of(0, 2)
    own = read_keys(
        {"tiers": ["memory:1GiB", "disk:/kv{rank}?size=1GiB"]}, StoreSettings
    )
    assert own.tiers_of(1, 2) == ["memory:1GiB", "disk:/kv1?size=1GiB"]
