"""Counts of a store's operations since it was opened.

They are plain attributes, as in :class:`kvwire.driver.counters.Counters`. Each tier's
own counts are in :class:`kvwire_store.tiers.base.TierStats`.
"""

from __future__ import annotations

import msgspec


class StoreCounters(msgspec.Struct):
    """Counts since the store was opened. A block here is one hash.

    Attributes:
        puts: Ended puts.
        gets: Ended gets.
        stored_blocks: Blocks of puts that the store lacked and has stored.
        present_blocks: Blocks of puts that it already had.
        refused_blocks: Blocks of puts that it could not store in every required tier.
        hit_blocks: Blocks of gets that landed.
        missed_blocks: Blocks of gets that did not land.
        put_bytes: Bytes of the stored blocks in puts, new or not.
        got_bytes: Bytes that landed by gets.
    """

    puts: int = 0
    gets: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    refused_blocks: int = 0
    hit_blocks: int = 0
    missed_blocks: int = 0
    put_bytes: int = 0
    got_bytes: int = 0

    def put_ended(self, nbytes: int, *, there: int, blocks: int, present: int) -> None:
        """Count a put: `there` blocks are stored, `present` were stored before."""
        self.puts += 1
        self.present_blocks += present
        self.stored_blocks += there - present
        self.refused_blocks += blocks - there
        self.put_bytes += nbytes

    def get_ended(self, nbytes: int, *, there: int, blocks: int) -> None:
        """Count a get, with the blocks that landed."""
        self.gets += 1
        self.hit_blocks += there
        self.missed_blocks += blocks - there
        self.got_bytes += nbytes
