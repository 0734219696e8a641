"""What is done in ``kvwire bench store``: a set of blocks into a tier and out of it.

A *set* is the blocks of one call. Its memory is a pool in which they lie scattered, as
in ``kvwire bench fragments``. A tier has room for more than two sets and the memory in
front of it for one, and what is got is the one of the last two sets that was used
longer ago: so it comes from that tier each time, and the store is in its steady state,
in which everything that comes in takes the room of something older.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvwire.cli.bench.case import Work
from kvwire.cli.bench.fragment_work import FragmentWork
from kvwire.limits import KIB, STORE_SLOTS_MAX

T = TypeVar("T")

MEMORY: Final = "memory"
DISK: Final = "disk"
SERVER: Final = "server"
OBJECT: Final = "object"
TIERS: Final = (MEMORY, DISK, SERVER, OBJECT)

PUT: Final = "put"
FIRST_PUT: Final = "put, new memory"
FLUSHED_PUT: Final = "put, flushed"
GET: Final = "get"
COLD_GET: Final = "get, cold"
ONE: Final = "get of one"
MATCH: Final = "match"
PUTS: Final = (PUT, FIRST_PUT, FLUSHED_PUT)

# What is matched, and how often in a round.
HASHES: Final = 1000
HASH_BYTES: Final = 32
LOOKUPS: Final = 50
# A prompt's hashes are asked for without its bytes: the blocks under them are tiny.
MATCH_LAYER_BYTES: Final = 4 * KIB
# Enough for a 99th percentile of all rounds, and not minutes where one takes some ms.
ONE_BY_ONE_MAX: Final = 64
# A tier holds more than the two sets that are got, so that a put takes older room.
SETS: Final = 3
# Of a set, at least; a set of few blocks has few in a slab.
_SLABS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Blocks of a cache with a tensor for each layer.

    Attributes:
        name: As it is asked for.
        layers: Layers of a block.
        layer_bytes: Of one layer of one block, which is a fragment.
    """

    name: str
    layers: int
    layer_bytes: int

    @property
    def block_bytes(self) -> int:
        """Of a block of 16 tokens."""
        return self.layers * self.layer_bytes


SHAPES: Final = {
    shape.name: shape
    for shape in (
        # 64 KiB a token: 32 layers, 4 heads of 128 in two bytes.
        Shape(name="large", layers=32, layer_bytes=32 * KIB),
        # 4 KiB a token, as on one of many shards, or of a small model.
        Shape(name="small", layers=16, layer_bytes=4 * KIB),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWork(Work):
    """``count`` blocks of ``nbytes`` into a tier or out of it; see the verbs above.

    Attributes:
        tier: Which tier.
        layers: Layers of a block.
        set_blocks: Blocks of a set; ``count`` of them are moved.
    """

    tier: str
    layers: int
    set_blocks: int

    @property
    def set_bytes(self) -> int:
        """Bytes of a set."""
        return self.nbytes * self.set_blocks

    @property
    def layer_bytes(self) -> int:
        """Bytes of a fragment."""
        return self.nbytes // self.layers

    @property
    def transfer(self) -> FragmentWork:
        """The set as a transfer between two caches."""
        return FragmentWork(
            verb="push" if self.verb in PUTS else "pull",
            nbytes=self.layer_bytes,
            count=self.set_blocks * self.layers,
            layers=self.layers,
        )

    @property
    def slab_blocks(self) -> int:
        """Blocks of a slab; a set has whole slabs."""
        return min(self.set_blocks // _SLABS, STORE_SLOTS_MAX)

    def memory(self, sets: int) -> str:
        """A memory tier with room for so many sets, and not for a block more."""
        size, slab = sets * self.set_bytes, self.slab_blocks * self.nbytes
        return f"memory:{size}B?slab={slab}B"

    def disk(self, directory: str) -> str:
        """A disk tier with room for :data:`SETS` sets."""
        size, slab = SETS * self.set_bytes, self.slab_blocks * self.nbytes
        return f"disk:{directory}?size={size}B&slab={slab}B"


def work_of(tier: str, verb: str, shape: Shape, round_bytes: int) -> StoreWork:
    """The work of about ``round_bytes`` of blocks of a shape."""
    if verb == MATCH:
        return StoreWork(
            verb=verb,
            nbytes=MATCH_LAYER_BYTES,
            count=HASHES,
            tier=tier,
            layers=1,
            set_blocks=HASHES,
        )
    blocks = max(_SLABS, round_bytes // shape.block_bytes)
    blocks -= blocks % (
        _SLABS if blocks < _SLABS * STORE_SLOTS_MAX else STORE_SLOTS_MAX
    )
    return StoreWork(
        verb=verb,
        nbytes=shape.block_bytes,
        count=min(blocks, ONE_BY_ONE_MAX) if verb == ONE else blocks,
        tier=tier,
        layers=shape.layers,
        set_blocks=blocks,
    )


class LastTwo(Generic[T]):
    """The last two things that were put somewhere, to be got in turns."""

    def __init__(self) -> None:
        self._things: list[T] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._things)

    def add(self, thing: T) -> None:
        """This is now the one that was used last."""
        self._things = [*self._things, thing][-2:]

    def next(self) -> T:
        """The one that was used longer ago, which is now the one that was used last."""
        self._things.reverse()
        return self._things[-1]

    def older(self) -> T:
        """The one that was used longer ago, which it stays."""
        return self._things[0]
