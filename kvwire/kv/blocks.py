"""Block lists: the blocks that a transfer moves, in order.

The list is in token order: the block at position 0 holds the request's first
``block_tokens`` tokens, and so on. A *position* is an index into the list, a block *id*
an index into the pool. A hybrid model has one list per cache group, so a block's full
name is (group, id).

An outcome contains the landed blocks as a set of such names, and the missing blocks as
a mapping from name to reason. Both are backed by arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvwire import limits
from kvwire.errors import UsageError
from kvwire.kv.tensors import refuse_masked

DEFAULT_GROUP: Final = "kv"
"""The group of a cache that was described without groups."""

Ids: TypeAlias = npt.NDArray[np.int64]
Bits: TypeAlias = npt.NDArray[np.bool_]
Codes: TypeAlias = npt.NDArray[np.uint16]
BlockIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
Blocks: TypeAlias = "BlockIds | Mapping[str, BlockIds]"
"""Block ids as callers pass them: a list for the only group, or {group: ids}."""

# The methods with these names on arrays run a Python function first.
any_of: Final = np.logical_or.reduce
all_of: Final = np.logical_and.reduce

# A list of so few ids is checked faster without arrays.
_FEW: Final = 16
# A table of a pool that is no larger finds repeated ids sooner than sorting them.
_POOL_PER_ID: Final = 64

UNNAMED: Final = -1
"""The id of a position whose block the producer has not named yet."""


class BlockLists(dict[str, Ids]):
    """Checked block ids: one array per group, in the cache's order.

    Attributes:
        pools: The number of blocks that each group of that cache has.
    """

    pools: Mapping[str, int]

    def check_total(self, least: int) -> None:
        """Refuse too few or too many blocks.

        Raises:
            UsageError: There are fewer than ``least``, or more than a transfer takes.
        """
        total = 0
        for ids in self.values():
            total += ids.size
        if not least <= total <= limits.KV_BLOCKS_MAX:
            raise _wrong_total(total)

    def padded(self, blocks: Mapping[str, int]) -> BlockLists:
        """Return a copy in which each group has ``blocks[group]`` positions.

        The added positions at the end are :data:`UNNAMED`.
        """
        padded = BlockLists(
            (name, np.pad(ids, (0, blocks[name] - ids.size), constant_values=UNNAMED))
            for name, ids in self.items()
        )
        padded.pools = self.pools
        return padded


def block_lists(
    blocks: Blocks, pools: Mapping[str, int], *, least: int = 1
) -> BlockLists:
    """Check block ids and return them as one array per group.

    Args:
        blocks: The block ids.
        pools: The number of blocks that each group of the cache has.
        least: The smallest number of blocks in all lists together.

    Raises:
        UsageError: A group is unknown or missing, an id is out of range or listed
            twice, or the lists are too long or too short in total.
    """
    if type(blocks) is list and (few := _few(blocks, pools, least)) is not None:
        return few
    # The abstract class comes last, because checking it takes several times as long.
    if isinstance(blocks, list | np.ndarray) or not isinstance(blocks, Mapping):
        if len(pools) != 1:
            raise UsageError(
                f"blocks: this cache has the groups {', '.join(pools)}; pass {{group: "
                "ids}, with [] for a group without blocks"
            )
        blocks = {next(iter(pools)): blocks}
    for name in blocks:
        if name not in pools:
            raise UsageError(
                f"blocks: unknown group {name!r}; this cache has {', '.join(pools)}"
            )
    for name in pools:
        if name not in blocks:
            raise UsageError(
                f"blocks: group {name!r} is missing; pass [] for no blocks"
            )
    lists = BlockLists()
    lists.pools = pools
    total = 0
    for name, num_blocks in pools.items():
        lists[name] = _checked(blocks[name], name, num_blocks)
        total += lists[name].size
    if not least <= total <= limits.KV_BLOCKS_MAX:
        raise _wrong_total(total)
    return lists


def _few(ids: list[int], pools: Mapping[str, int], least: int) -> BlockLists | None:
    """Return a short list of a cache with one group; None if it is not both."""
    if len(pools) != 1 or not least <= len(ids) <= _FEW:
        return None
    ((name, num_blocks),) = pools.items()
    if not ids or not _are_right(ids, num_blocks):
        return None
    lists = BlockLists()
    lists.pools = pools
    lists[name] = np.array(ids, np.int64)
    return lists


def _wrong_total(total: int) -> UsageError:
    return UsageError(
        f"blocks: the lists have {total} blocks; a transfer takes 1 to "
        f"{limits.KV_BLOCKS_MAX}"
    )


class BlockSet(AbstractSet[tuple[str, int]]):
    """A set of blocks as (group, id) tuples, which are only created by iteration.

    Args:
        ids: The block ids of each group.
    """

    __slots__ = ("_ids", "_sorted")

    def __init__(self, ids: Mapping[str, Ids]) -> None:
        self._ids = dict(ids)
        self._sorted: dict[str, Ids] = {}

    def ids(self, group: str = DEFAULT_GROUP) -> Ids:
        """Return the ids of one group, in the order of the transfer's list.

        Raises:
            UsageError: There is no such group.
        """
        if group not in self.groups:
            raise UsageError(
                f"unknown group {group!r}; the groups are {', '.join(self._ids)}"
            )
        return self._ids[group]

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the names of all groups, including groups without blocks here."""
        return tuple(self._ids)

    def __contains__(self, block: object) -> bool:
        return self.position(block) >= 0

    def position(self, block: object) -> int:
        """Return the index of ``(group, id)`` among its group's ids, or -1."""
        if not isinstance(block, tuple) or len(block) != 2:
            return -1
        group, block_id = block
        if not isinstance(group, str) or group not in self._ids:
            return -1
        if not isinstance(block_id, int | np.integer):
            return -1
        ids = self._ids[group]
        if group not in self._sorted:
            self._sorted[group] = np.argsort(ids, kind="stable")
        order = self._sorted[group]
        found = int(np.searchsorted(ids, block_id, sorter=order))
        if found == ids.size or ids[order[found]] != block_id:
            return -1
        return int(order[found])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for group, ids in self._ids.items():
            for block_id in ids.tolist():
                yield group, block_id

    def __len__(self) -> int:
        return sum(ids.size for ids in self._ids.values())

    def __repr__(self) -> str:
        counts = (f"{group}: {ids.size}" for group, ids in self._ids.items())
        return f"BlockSet({', '.join(counts)})"

    @classmethod
    def _from_iterable(cls, it: Iterable[_Block]) -> frozenset[_Block]:
        """Return a plain set, for ``&`` and the other set operations."""
        return frozenset(it)


_Block = TypeVar("_Block")
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class MissingOfGroup:
    """The missing blocks of one group.

    ``codes[i]`` is the number of the reason why ``ids[i]`` is missing. ``lost``, shape
    (layers, ids), marks the layers that did not land.
    """

    ids: Ids
    codes: Codes
    layers: range
    lost: Bits

    def only(self, these: Bits) -> MissingOfGroup:
        """Return the entries for a selection of the ids."""
        return MissingOfGroup(
            self.ids[these], self.codes[these], self.layers, self.lost[:, these]
        )


class MissingBlocks(Mapping[tuple[str, int], str]):
    """The reasons why blocks did not land, by (group, block id).

    Args:
        groups: The missing blocks of each group of the transfer.
        reasons: The text of each code; some may apply to no block.
        beside: The reasons for positions that never got a block.
    """

    __slots__ = ("_made", "beside", "groups", "meanings")

    def __init__(
        self,
        groups: Mapping[str, MissingOfGroup],
        reasons: Sequence[str],
        beside: Sequence[str] = (),
    ) -> None:
        self.groups: Mapping[str, MissingOfGroup] = groups
        self.meanings: tuple[str, ...] = tuple(reasons)
        self.beside: tuple[str, ...] = tuple(beside)
        # The blocks as a set, once somebody looks.
        self._made: BlockSet | None = None

    def ids(self, group: str = DEFAULT_GROUP) -> Ids:
        """Return the missing ids of one group.

        Raises:
            UsageError: There is no such group.
        """
        return self._blocks.ids(group)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return every distinct reason, of missing blocks and of unnamed positions."""
        codes = [group.codes for group in self.groups.values()]
        used = distinct(np.concatenate(codes)).tolist() if codes else []
        texts = [self.meanings[code] for code in used]
        return tuple(dict.fromkeys((*texts, *self.beside)))

    def layers(self, block: tuple[str, int]) -> tuple[int, ...]:
        """Return the missing layers of a missing block, by the model's index.

        Raises:
            UsageError: It is not the (group, id) of a missing block.
        """
        position = self._blocks.position(block)
        if position < 0:
            name = next(iter(self.groups), DEFAULT_GROUP)
            raise UsageError(
                f"layers: {block!r} is not a missing block; pass (group, id), such as "
                f"({name!r}, 5), for a block that is in `missing`"
            )
        group = self.groups[block[0]]
        lost = np.flatnonzero(group.lost[:, position])
        return tuple(group.layers[row] for row in lost.tolist())

    def __getitem__(self, block: tuple[str, int]) -> str:
        position = self._blocks.position(block)
        if position < 0:
            raise KeyError(block)
        return self.meanings[int(self.groups[block[0]].codes[position])]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        why = "".join(f"; {reason}" for reason in self.reasons)
        return f"MissingBlocks({len(self)} blocks{why})"

    @property
    def _blocks(self) -> BlockSet:
        if self._made is None:
            self._made = BlockSet({name: one.ids for name, one in self.groups.items()})
        return self._made


def named_of(lists: Mapping[str, Ids]) -> Mapping[str, Ids]:
    """Return the lists without their unnamed positions."""
    if all_named(lists.values()):
        return lists
    return {name: ids[ids != UNNAMED] for name, ids in lists.items()}


def all_named(lists: Iterable[Ids]) -> bool:
    """Return whether every position of these lists has a block."""
    # This runs for every transfer that ends. Unnamed positions are always last, so
    # looking at the end is enough.
    for ids in lists:  # noqa: SIM110 - a generator is a call for each list
        if ids.size and ids.item(-1) == UNNAMED:
            return False
    return True


def nothing_missing(groups: Mapping[str, range]) -> MissingBlocks:
    """Return an empty mapping for a transfer with these groups and layers."""
    return MissingBlocks(
        {
            name: MissingOfGroup(
                np.empty(0, np.int64),
                np.empty(0, np.uint16),
                layers,
                np.empty((len(layers), 0), np.bool_),
            )
            for name, layers in groups.items()
        },
        [],
    )


def missing_blocks(
    groups: Mapping[str, MissingOfGroup], reasons: Sequence[str]
) -> MissingBlocks:
    """Return the missing blocks; unnamed positions contribute only their reasons."""
    if all_named(group.ids for group in groups.values()):
        return MissingBlocks(groups, reasons)
    named = {name: group.ids != UNNAMED for name, group in groups.items()}
    beside = [groups[name].codes[~bits] for name, bits in named.items()]
    return MissingBlocks(
        {name: group.only(named[name]) for name, group in groups.items()},
        reasons,
        [reasons[code] for code in distinct(np.concatenate(beside)).tolist()],
    )


def join_missing(shares: Sequence[MissingBlocks]) -> MissingBlocks:
    """Merge the missing blocks of several shares of the same block list.

    If a block is missing in several shares, it gets the first share's reason, and the
    missing layers of all.
    """
    # Reasons are concatenated; share i's begin at offsets[i].
    *offsets, _ = accumulate((len(share.meanings) for share in shares), initial=0)
    groups = {
        name: _join_group([share.groups[name] for share in shares], offsets)
        for name in shares[0].groups
    }
    return MissingBlocks(
        groups,
        [text for share in shares for text in share.meanings],
        [text for share in shares for text in share.beside],
    )


# NumPy has both functions, but its versions import the package `numpy.ma` on first use.
# That blocks an event loop for 50 ms, and fails in a process that may no longer open
# files.


def distinct(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Return the distinct values in ascending order, as ``np.unique`` does."""
    ordered = values.copy()
    ordered.sort()
    first = np.empty(ordered.size, np.bool_)
    first[:1] = True
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def among(values: npt.NDArray[Number], others: npt.NDArray[Number]) -> Bits:
    """Return which values occur in ``others``, as ``np.isin`` does."""
    if not others.size:
        return np.zeros(values.size, np.bool_)
    ordered = np.sort(others)
    at = np.searchsorted(ordered, values)
    found: Bits = ordered.take(at, mode="clip") == values
    return found


def _join_group(
    parts: Sequence[MissingOfGroup], offsets: Sequence[int]
) -> MissingOfGroup:
    ids = distinct(np.concatenate([part.ids for part in parts]))
    first = min(part.layers.start for part in parts)
    layers = range(first, max(part.layers.stop for part in parts))
    codes = np.zeros(ids.size, np.uint16)
    lost = np.zeros((len(layers), ids.size), np.bool_)
    # In reverse, so that the first share overwrites the others.
    for part, offset in zip(reversed(parts), reversed(offsets), strict=True):
        at = np.searchsorted(ids, part.ids)
        codes[at] = part.codes + np.uint16(offset)
        top = part.layers.start - first
        lost[top : top + len(part.layers), at] |= part.lost
    return MissingOfGroup(ids, codes, layers, lost)


def _checked(ids: BlockIds, group: str, num_blocks: int) -> Ids:
    if type(ids) is list and len(ids) <= _FEW and _are_right(ids, num_blocks):
        return np.array(ids, np.int64)
    if isinstance(ids, range) and ids:
        # NumPy would convert a range one number at a time.
        inside = range(num_blocks)
        if ids[0] in inside and ids[-1] in inside:
            return np.arange(ids.start, ids.stop, ids.step, dtype=np.int64)
    refuse_masked(ids, f"blocks of group {group!r}")
    given = _as_array(ids)
    if given.size == 0:
        return np.empty(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise UsageError(
            f"blocks of group {group!r}: pass a flat sequence of block ids, not "
            f"{given.ndim}-dimensional {given.dtype.name}"
        )
    checked = given.astype(np.int64, copy=not isinstance(ids, list | tuple))
    if np.minimum.reduce(checked) < 0 or np.maximum.reduce(checked) >= num_blocks:
        position = int(((given < 0) | (given >= num_blocks)).argmax())
        raise UsageError(
            f"blocks of group {group!r}: block id {int(given[position])} at position "
            f"{position} is out of range; the pool has blocks 0 to {num_blocks - 1}"
        )
    if not _are_distinct(checked, num_blocks):
        order = np.argsort(checked, kind="stable")
        twice = np.flatnonzero(np.diff(checked[order]) == 0)
        position = int(order[twice + 1].min())
        raise UsageError(
            f"blocks of group {group!r}: block id {int(checked[position])} appears "
            f"twice, again at position {position}"
        )
    return checked


def _as_array(ids: BlockIds) -> npt.NDArray[Any]:
    if isinstance(ids, list | tuple) and type(ids[0] if ids else None) is int:
        # In two thirds of the time that NumPy takes to find a type for all.
        with suppress(TypeError, OverflowError):
            return np.frombuffer(array("q", ids), np.int64)
    return np.asarray(ids)


def _are_distinct(ids: Ids, num_blocks: int) -> bool:
    """Return whether no id, each of which is in range, is listed twice."""
    if num_blocks <= _POOL_PER_ID * ids.size:
        seen = np.zeros(num_blocks, np.bool_)
        seen[ids] = True
        return int(np.count_nonzero(seen)) == ids.size
    ordered = ids.copy()
    ordered.sort()
    return not bool(any_of(ordered[1:] == ordered[:-1]))


def _are_right(ids: list[int], num_blocks: int) -> bool:
    """Return whether a list has distinct ids in range, and is not empty."""
    if len(ids) == 1:
        return type(ids[0]) is int and 0 <= ids[0] < num_blocks
    return (
        set(map(type, ids)) == {int}
        and min(ids) >= 0
        and max(ids) < num_blocks
        and len(set(ids)) == len(ids)
    )
