"""The table of wrong uses: what is done, and what is said. docs/reference shows it."""

from __future__ import annotations

from typing import Final

from tests.support.wrong_uses.of_calls import CACHES, MESSAGES
from tests.support.wrong_uses.of_config import ADDRESSES, CONFIG, PEERS
from tests.support.wrong_uses.of_places import PLACES
from tests.support.wrong_uses.things import Things, WrongUse, things

SECTIONS: Final[dict[str, list[WrongUse]]] = {
    "Configuration": CONFIG,
    "Addresses": ADDRESSES,
    "Peers, keys and certificates": PEERS,
    "Messages, regions and grants": MESSAGES,
    "Caches and KV transfers": CACHES,
    "Threads, loops and forgotten words": PLACES,
}

__all__ = ["SECTIONS", "Things", "WrongUse", "things"]
