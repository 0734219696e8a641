"""The names that tiers in other distributions use; see docs/howto/write-a-tier.md.

Other rooms of kvwire may use these names of the store, and the names that `kvwire`
itself exports.
"""

from kvwire_store.address import TierAddress
from kvwire_store.images import images_in, views_of
from kvwire_store.keys import Key, Keys, Orders, as_keys
from kvwire_store.namespace import ABSENT, ORDERS, UNKNOWN, Namespace
from kvwire_store.tiers.base import Batch, BlockResult, BlockResults, Tier
from kvwire_store.tiers.object_format import HEAD_BYTES, packed
from kvwire_store.tiers.values import Head, KeyValueTier, ValueIO

__all__ = [
    "ABSENT",
    "HEAD_BYTES",
    "ORDERS",
    "UNKNOWN",
    "Batch",
    "BlockResult",
    "BlockResults",
    "Head",
    "Key",
    "KeyValueTier",
    "Keys",
    "Namespace",
    "Orders",
    "Tier",
    "TierAddress",
    "ValueIO",
    "as_keys",
    "images_in",
    "packed",
    "views_of",
]
