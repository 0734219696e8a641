"""The operations of ``kvwire bench ops``: what is counted and timed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvwire.cli.bench.case import Work
from kvwire.cli.bench.fragment_work import FragmentWork
from kvwire.cli.bench.fragments import size_name
from kvwire.limits import KIB, MIB

PULL: Final = "pull"
PUSH: Final = "push"
READY: Final = "ready"
ROUND_TRIP: Final = "round trip"
SEND: Final = "send"
PUT: Final = "put"
GET: Final = "get"
STORE_PUT: Final = "store put"
STORE_GET: Final = "store get"
STORES: Final = (STORE_PUT, STORE_GET)

# Operations of a round, and those that are counted: enough that what comes seldom,
# such as CREDIT, has its share.
COUNT: Final = 40
# Connections are dearer than what is done on them.
FRESH_COUNT: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsWork(Work):
    """``count`` operations of ``nbytes``, one after the other.

    Attributes:
        layers: Layers of the cache; 0 where there is none.
        blocks: Blocks of a transfer, that do not lie side by side.
        fresh: Each on a connection of its own.
    """

    layers: int = 0
    blocks: int = 1
    fresh: bool = False

    @property
    def transfer(self) -> FragmentWork:
        """One operation as fragments."""
        layers = max(1, self.layers)
        fragments = layers * self.blocks
        return FragmentWork(
            verb=PULL if self.verb == PULL else PUSH,
            nbytes=self.nbytes // fragments,
            count=fragments,
            layers=layers,
        )

    @property
    def name(self) -> str:
        """As it is shown."""
        whole = self.nbytes >= KIB
        size = size_name(self.nbytes) if whole else f"{self.nbytes} B"
        if self.verb == READY:
            return f"ready of a layer, {size_name(self.nbytes // self.layers)}"
        if self.verb not in (PULL, PUSH):
            return f"{self.verb}, {size}"
        first = "first " if self.fresh else ""
        return f"{first}{self.verb}, {size}, {self.layers} layers"


def operations(*, store: bool = True) -> Sequence[OpsWork]:
    """All of them; ``store`` for those of a store too."""
    return [
        _transfer(PULL, 64 * KIB, 1, 16, fresh=True),
        _transfer(PULL, 64 * KIB, 1, 16),
        _transfer(PULL, 256 * KIB, 2, 16),
        _transfer(PUSH, 256 * KIB, 2, 16),
        _transfer(PUSH, 4 * MIB, 2, 32),
        OpsWork(verb=READY, nbytes=80 * 64 * KIB, count=79, layers=80),
        OpsWork(verb=ROUND_TRIP, nbytes=64, count=10 * COUNT),
        OpsWork(verb=SEND, nbytes=64 * KIB, count=COUNT),
        OpsWork(verb=SEND, nbytes=MIB, count=COUNT),
        OpsWork(verb=PUT, nbytes=64 * KIB, count=COUNT),
        OpsWork(verb=GET, nbytes=64 * KIB, count=COUNT),
        *(
            OpsWork(verb=verb, nbytes=nbytes, count=COUNT, layers=16)
            for nbytes in (64 * KIB, MIB)
            for verb in STORES
            if store
        ),
    ]


def _transfer(
    verb: str, nbytes: int, blocks: int, layers: int, *, fresh: bool = False
) -> OpsWork:
    return OpsWork(
        verb=verb,
        nbytes=nbytes,
        count=FRESH_COUNT if fresh else COUNT,
        layers=layers,
        blocks=blocks,
        fresh=fresh,
    )
