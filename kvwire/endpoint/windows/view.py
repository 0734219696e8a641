"""One get from a window: the destination and the result of each block.

A ticket lists the owner's blocks; a read copies them to local blocks. The block sizes
may differ, so the last local block may be filled only in part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvwire.endpoint.windows.map import (
    BlockPlaces,
    PeerGroup,
    common_pieces,
    geometry_of_pools,
    view_walks,
)
from kvwire.endpoint.windows.ticket import Ticket
from kvwire.errors import UsageError
from kvwire.kv.blocks import (
    Bits,
    BlockLists,
    BlockSet,
    Ids,
    MissingBlocks,
    MissingOfGroup,
    all_of,
    missing_blocks,
    nothing_missing,
)
from kvwire.kv.fragments import Array
from kvwire.kv.geometry import Geometry
from kvwire.kv.landed import common_tokens, leading_tokens
from kvwire.kv.outcome import Outcome, Timings, complete_outcome, timings_of
from kvwire.kv.paged import PagedCache
from kvwire.types import Device, MemoryKind


class WindowView:
    """The map from a peer's window to the blocks of a local cache.

    Attributes:
        geometry: The local cache's geometry.
        places: The places of local blocks in memory, by group.
        per_owner: The number of granules in one of the owner's blocks, by group.
        block_bytes: The bytes that are read from one of the owner's blocks, by group.
        block_pieces: The most pieces of memory that these bytes are divided into, by
            group.
        device: The local cache's device; None for host memory.
        memory_kind: The kind of memory that blocks land in.
        owners: References that keep the cache's memory alive.
        number: The view's number on the connection, once the owner knows it.
        nothing_missing: The empty ``missing`` of a complete read.

    Raises:
        ProfileMismatch: The two caches do not fit together.
        UsageError: The cache is not writable.
    """

    def __init__(self, owner: Geometry, cache: PagedCache) -> None:
        self.geometry: Geometry = geometry_of_pools(cache)
        walks = view_walks(owner, self.geometry)
        if not cache.writable:
            raise UsageError(
                "a tensor of this cache is read-only; receiving needs writable tensors"
            )
        self.places: tuple[BlockPlaces, ...] = tuple(
            BlockPlaces(walk, cache.groups[walk.group]) for walk, _ in walks
        )
        self.block_pieces: tuple[int, ...] = tuple(count for _, count in walks)
        tokens = [group.spec.block_tokens for group in owner.groups]
        self.per_owner: tuple[int, ...] = tuple(
            count // walk.granule_tokens
            for count, (walk, _) in zip(tokens, walks, strict=True)
        )
        self.block_bytes: tuple[int, ...] = tuple(
            len(walk.layers) * walk.granule_bytes * granules
            for (walk, _), granules in zip(walks, self.per_owner, strict=True)
        )
        self.device: Device | None = cache.device
        self.memory_kind: MemoryKind = (
            MemoryKind.HOST if cache.device is None else cache.device.kind
        )
        self.owners: object = [group.owners for group in cache.groups.values()]
        self.nothing_missing: MissingBlocks = nothing_missing(
            {walk.group: walk.layers for walk, _ in walks}
        )
        self.number: int | None = None
        self._states: bool = any(
            group.spec.kind == "state" for group in self.geometry.groups
        )
        self._pieces: list[tuple[BlockPlaces, Array, Array, int]] | None = None

    def pieces(
        self, owner: Sequence[PeerGroup]
    ) -> list[tuple[BlockPlaces, Array, Array, int]]:
        """Return, by group, the owner's places and the pieces of a granule.

        They are used for reading in place, after the owner has described its memory.
        """
        if self._pieces is None:
            self._pieces = []
            for place, group in zip(self.places, owner, strict=True):
                theirs = BlockPlaces(place.walk, group)
                self._pieces.append((theirs, *common_pieces(theirs, place)))
        return self._pieces

    def check(self, ticket: Ticket, lists: BlockLists, first: Sequence[int]) -> None:
        """Refuse a ticket that does not fit the window or the block list.

        Args:
            ticket: The ticket.
            lists: The local blocks.
            first: The first entry of each group in the owner's table, followed by the
                total number of entries.

        Raises:
            UsageError: The ticket does not fit.
        """
        if len(ticket.counts) != len(self.places):
            raise UsageError(
                f"ticket: it has {len(ticket.counts)} groups, and the window has "
                f"{len(self.places)}"
            )
        begin = 0
        for index, (count, place, ids) in enumerate(
            zip(ticket.counts, self.places, lists.values(), strict=True)
        ):
            entries = ticket.entries[begin : begin + count]
            begin += count
            granules = count * self.per_owner[index]
            if ids.size != -(-granules // place.granules_per_block):
                raise UsageError(
                    f"blocks: you passed {ids.size}, but the ticket's {count} blocks "
                    f"of group {place.walk.group!r} fill "
                    f"{-(-granules // place.granules_per_block)} here"
                )
            if not count:
                continue
            if (
                int(np.minimum.reduce(entries)) < first[index]
                or int(np.maximum.reduce(entries)) >= first[index + 1]
            ):
                raise UsageError(
                    "ticket: it names a block beyond the "
                    f"{first[index + 1] - first[index]} blocks of group "
                    f"{place.walk.group!r}"
                )

    def whole(
        self, ticket: Ticket, lists: BlockLists, nbytes: int, wire_s: float
    ) -> Outcome:
        """Return the outcome of a complete read of one group."""
        place = self.places[0]
        (ids,) = lists.values()
        tokens = ticket.counts[0] * self.per_owner[0] * place.walk.granule_tokens
        return complete_outcome(
            BlockSet(lists),
            self.nothing_missing,
            (ids.size, tokens),
            lists,
            {place.walk.group: tokens},
            timings_of(0.0, wire_s, 0.0),
            1,
            nbytes,
        )

    def outcome(
        self, ticket: Ticket, lists: BlockLists, results: BlockResults, wire_s: float
    ) -> Outcome:
        """Return the outcome, once every block has a result."""
        here: dict[str, Ids] = {}
        missing: dict[str, MissingOfGroup] = {}
        tokens: dict[str, int] = {}
        leading: list[int] = []
        nbytes = 0
        begin = 0
        for index, (count, place) in enumerate(
            zip(ticket.counts, self.places, strict=True)
        ):
            part = slice(begin, begin + count)
            begin += count
            name = place.walk.group
            ids = lists[name]
            granules = self.per_owner[index]
            # A local block is missing if any of its granules is.
            codes = np.repeat(results.codes[part], granules)
            starts = np.arange(0, codes.size, place.granules_per_block)
            of_block = codes
            if codes.size:
                of_block = np.maximum.reduceat(codes, starts)
            good = of_block == 0
            bad = ~good
            layers = place.walk.layers
            here[name] = ids[good]
            missing[name] = MissingOfGroup(
                ids[bad],
                of_block[bad] - np.uint16(1),
                layers,
                np.ones((len(layers), int(bad.sum())), np.bool_),
            )
            tokens[name] = count * granules * place.walk.granule_tokens
            per_block = place.granules_per_block * place.walk.granule_tokens
            leading.append(leading_tokens(good, per_block, tokens[name]))
            nbytes += int(results.landed[part].sum()) * self.block_bytes[index]
        complete = results.complete
        usable = common_tokens(tokens.values(), leading, complete, self._states)
        most = max(tokens.values())
        longest = list(tokens.values()).index(most)
        place = self.places[longest]
        prefix = usable // (place.granules_per_block * place.walk.granule_tokens)
        return Outcome(
            complete=complete,
            landed=BlockSet(here),
            missing=missing_blocks(missing, results.reasons),
            usable_prefix=lists[place.walk.group].size if usable == most else prefix,
            usable_tokens=usable,
            lists=lists,
            tokens=tokens,
            timings=Timings(wire_s=wire_s),
            nbytes=nbytes,
        )


class BlockResults:
    """The results of a ticket's blocks, as far as they are known.

    Attributes:
        landed: Whether each block has landed: (blocks,).
        codes: For each block that has not, the position of its reason in ``reasons``
            plus 1; 0 without a reason.
        reasons: The distinct reasons for missing blocks.
    """

    def __init__(self, blocks: int) -> None:
        self.landed: Bits = np.zeros(blocks, np.bool_)
        self.codes: npt.NDArray[np.uint16] = np.zeros(blocks, np.uint16)
        self.reasons: list[str] = []

    def note(self, positions: Ids, landed: Bits, otherwise: str) -> None:
        """Record the landed blocks, and the reason for the others."""
        self.landed[positions] = landed
        if not all_of(landed):
            self._lose(positions[~landed], otherwise)

    def lose(self, positions: Ids, reason: str) -> None:
        """Record why blocks have not landed."""
        if positions.size:
            self._lose(positions, reason)

    def todo(self) -> Ids:
        """Return the positions of blocks without a result."""
        return np.flatnonzero(~self.landed & (self.codes == 0))

    @property
    def complete(self) -> bool:
        """Return whether every block has landed."""
        return bool(all_of(self.landed))

    def _lose(self, positions: Ids, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.codes[positions] = 1 + self.reasons.index(reason)
