"""The verbs of a store, and their result for each block.

A verb prefetches, pins or unpins blocks without copying bytes into a cache: see
:class:`~kvwire_store.management.StoreManagement`, which has a method for each. All
return a :class:`Placement`. A verb does not raise if it fails for some blocks: each
block has its own state.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.aio import seconds_of
from kvwire.kv.blocks import Bits, Codes, Ids, all_of, any_of
from kvwire_store.limits import STORE_TTL_S_MAX

BlockStates: TypeAlias = npt.NDArray[np.uint8]


class BlockState(enum.IntEnum):
    """A verb's result for one block; the best comes first."""

    DONE = 0
    """It is in the state that the verb requests."""
    CLIPPED = 1
    """It is beyond the limit for pinning or prefetching."""
    DEFERRED = 2
    """It could not be done now; the same call may succeed later."""
    REFUSED = 3
    """Its tier or server does not support the verb."""
    MISSING = 4
    """It is not in the store, or its bytes are damaged."""


class VerbKind(enum.IntEnum):
    """The verbs; their numbers are used on the wire."""

    PREFETCH = 0
    PIN = 1
    UNPIN = 2


# The states in the order in which they count if tiers differ: the lowest wins.
_ANY: Final = np.arange(len(BlockState))
_EACH: Final = np.where(_ANY == BlockState.DEFERRED, -1, _ANY)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb and its arguments.

    Attributes:
        kind: The kind of verb.
        place: The tier of a prefetch; "" for memory.
        ttl_s: The duration of a pin in seconds; 0 for no end.
    """

    kind: VerbKind
    place: str = ""
    ttl_s: float = 0.0

    @classmethod
    def pin(cls, ttl_s: float | None) -> Self:
        """Return a pin, which ends after some seconds; None for never."""
        if ttl_s is None:
            return cls(VerbKind.PIN)
        seconds = min(seconds_of("ttl_s", ttl_s), STORE_TTL_S_MAX)
        return cls(VerbKind.PIN, ttl_s=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A verb's result for each block.

    Blocks are in the order of the call. For a grouped cache, the groups' blocks are
    joined in the order of the groups; see :meth:`of_group`.

    Attributes:
        states: The state of each block, a :class:`BlockState`.
        reasons: The distinct reasons why blocks are not done.
        codes: For each block the position of its reason in ``reasons``, plus 1; 0 for
            none.
        groups: The blocks of each cache group.
    """

    states: BlockStates
    reasons: tuple[str, ...] = ()
    codes: Codes
    groups: Mapping[str, slice] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self.states.size

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"<Placement of {len(self)} blocks: {counts or 'none'}>"

    @property
    def done(self) -> Bits:
        """The blocks that are in the requested state."""
        them: Bits = self.states == BlockState.DONE
        return them

    @property
    def clipped(self) -> Bits:
        """The blocks beyond a tenant's limit."""
        them: Bits = self.states == BlockState.CLIPPED
        return them

    @property
    def deferred(self) -> Bits:
        """The blocks for which the same call may succeed later."""
        them: Bits = self.states == BlockState.DEFERRED
        return them

    @property
    def refused(self) -> Bits:
        """The blocks in places that cannot execute the verb."""
        them: Bits = self.states == BlockState.REFUSED
        return them

    @property
    def missing(self) -> Bits:
        """The blocks that are not in the store."""
        them: Bits = self.states == BlockState.MISSING
        return them

    @property
    def complete(self) -> bool:
        """Whether every block is done."""
        return not any_of(self.states)

    @property
    def prefix(self) -> int:
        """The number of leading blocks that are done, for a single group."""
        return leading(self.states == BlockState.DONE)

    @property
    def counts(self) -> dict[str, int]:
        """The number of blocks per state, by its lower-case name."""
        counts = np.bincount(self.states, minlength=len(BlockState)).tolist()
        return {one.name.lower(): counts[one] for one in BlockState if counts[one]}

    def reason(self, position: int) -> str:
        """Return why a block is not done, or ""."""
        code = int(self.codes[position])
        return self.reasons[code - 1] if code else ""

    def of_group(self, name: str) -> Placement:
        """Return the placement of one cache group's blocks."""
        return self.selected(self.groups[name])

    def selected(self, which: slice | Ids | Bits) -> Placement:
        """Return the placement of some blocks, without groups."""
        return Placement(
            states=self.states[which],
            reasons=self.reasons,
            codes=self.codes[which],
        )


class Placing:
    """Builds a placement; each block starts as ``state`` with a reason."""

    def __init__(
        self, count: int, state: BlockState = BlockState.MISSING, reason: str = ""
    ) -> None:
        self.states: BlockStates = np.full(count, state, np.uint8)
        self.codes: Codes = np.zeros(count, np.uint16)
        self._reasons: dict[str, int] = {}
        if reason and count:
            self.codes[:] = self._code(reason)

    def rule(
        self, which: slice | Ids | Bits, state: BlockState, reason: str = ""
    ) -> None:
        """Set the state of some blocks, and the reason for it."""
        self.states[which] = state
        self.codes[which] = self._code(reason)

    def better(self, which: Ids, other: Placement, verb: Verb) -> None:
        """Adopt the better states from a placement of some blocks.

        A pin or unpin applies to every tier that has a block, so a tier that could not
        be asked outweighs a tier where the verb is done.
        """
        rank = _ANY if verb.kind is VerbKind.PREFETCH else _EACH
        self._take(which, other, rank[other.states] < rank[self.states[which]])

    def worse(self, other: Placement) -> None:
        """Adopt the worse states from a placement of the same blocks."""
        self._take(np.arange(self.states.size), other, other.states > self.states)

    def place(self, which: slice | Ids, other: Placement) -> None:
        """Adopt all states from a placement of some blocks."""
        mine = np.arange(self.states.size)[which]
        self._take(mine, other, np.ones(mine.size, np.bool_))

    def end(self, groups: Mapping[str, slice] | None = None) -> Placement:
        """Return the finished placement."""
        texts = ("", *self._reasons)
        used, codes = np.unique(np.append(0, self.codes), return_inverse=True)
        return Placement(
            states=self.states,
            reasons=tuple(texts[code] for code in used[1:].tolist()),
            codes=codes[1:].astype(np.uint16),
            groups=groups or {},
        )

    def _take(self, mine: Ids, other: Placement, taken: Bits) -> None:
        table = np.array([0, *map(self._code, other.reasons)], np.uint16)
        self.states[mine[taken]] = other.states[taken]
        self.codes[mine[taken]] = table[other.codes[taken]]

    def _code(self, reason: str) -> int:
        if not reason:
            return 0
        return self._reasons.setdefault(reason, len(self._reasons) + 1)


def leading(there: Bits) -> int:
    """Return the number of leading blocks that are present."""
    return there.size if there.all() else int(there.argmin())


def all_placed(count: int, state: BlockState, reason: str = "") -> Placement:
    """Return a placement with the same state for each block."""
    return Placing(count, state, reason).end()


def joined(parts: Mapping[str, Placement]) -> Placement:
    """Return the placement of all groups of a call."""
    placing = Placing(sum(map(len, parts.values())))
    groups: dict[str, slice] = {}
    first = 0
    for name, part in parts.items():
        groups[name] = slice(first, first + len(part))
        placing.place(groups[name], part)
        first += len(part)
    return placing.end(groups)


def of_shards(parts: Sequence[Placement]) -> Placement:
    """Return the placement of blocks that are split over several namespaces.

    A block gets the worst state of its parts. A namespace with none of the blocks
    belongs to another model, and is left out.
    """
    mine = [part for part in parts if not all_of(part.missing)] or parts[:1]
    placing = Placing(len(mine[0]), BlockState.DONE)
    for part in mine:
        placing.worse(part)
    return placing.end()
