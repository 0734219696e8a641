"""What has happened on a store so far, as numbers that only grow.

Plain attributes, as :class:`kvwire.driver.counters.Counters` are. What each tier has
done is in :class:`kvwire.store.tiers.base.TierStats`.
"""

from __future__ import annotations

import msgspec


class StoreCounters(msgspec.Struct):
    """Counts since the store was opened. A block here is one hash.

    Attributes:
        puts: Puts that are over.
        gets: Gets that are over.
        stored_blocks: Blocks of puts that the store did not have, and keeps.
        present_blocks: Blocks of puts that it had already.
        refused_blocks: Blocks of puts that it does not keep where it should.
        hit_blocks: Blocks of gets that landed.
        missed_blocks: Blocks of gets that did not.
        put_bytes: Bytes of the puts' blocks that it keeps, new or not.
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
        """Count a put: so many of its blocks are there, and so many were before."""
        self.puts += 1
        self.present_blocks += present
        self.stored_blocks += there - present
        self.refused_blocks += blocks - there
        self.put_bytes += nbytes

    def get_ended(self, nbytes: int, *, there: int, blocks: int) -> None:
        """Count a get: of its blocks so many landed."""
        self.gets += 1
        self.hit_blocks += there
        self.missed_blocks += blocks - there
        self.got_bytes += nbytes
