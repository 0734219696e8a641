"""The blocks of a transfer that did not land, each with a reason and its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import DEFAULT_GROUP, Bits, BlockSet, Ids, distinct

Codes = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class MissingOfGroup:
    """Lists what one group misses: ids, which of the reasons each has, lost layers.

    ``lost`` has the shape (layers, ids): which of the layers did not land.
    """

    ids: Ids
    codes: Codes
    layers: range
    lost: Bits


class MissingBlocks(Mapping[tuple[str, int], str]):
    """Says why blocks did not land, by (group, block id).

    Args:
        groups: What each group of the transfer misses.
        reasons: What the codes mean; not each of them need have a block.
    """

    __slots__ = ("_blocks", "groups", "meanings")

    def __init__(
        self, groups: Mapping[str, MissingOfGroup], reasons: Sequence[str]
    ) -> None:
        self.groups: Mapping[str, MissingOfGroup] = groups
        self.meanings: tuple[str, ...] = tuple(reasons)
        self._blocks = BlockSet({name: group.ids for name, group in groups.items()})

    def ids(self, group: str = DEFAULT_GROUP) -> Ids:
        """Return the missing ids of one group.

        Raises:
            UsageError: There is no such group.
        """
        return self._blocks.ids(group)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return each reason that a missing block has, once."""
        codes = [group.codes for group in self.groups.values()]
        used = distinct(np.concatenate(codes)).tolist() if codes else []
        return tuple(dict.fromkeys(self.meanings[code] for code in used))

    def layers(self, block: tuple[str, int]) -> tuple[int, ...]:
        """Return the layers of a block that did not land, by the model's index.

        Raises:
            KeyError: The block is not missing.
        """
        group = self.groups[block[0]]
        lost = np.flatnonzero(group.lost[:, self._position(block)])
        return tuple(group.layers[row] for row in lost.tolist())

    def __getitem__(self, block: tuple[str, int]) -> str:
        position = self._position(block)
        return self.meanings[int(self.groups[block[0]].codes[position])]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        why = "".join(f"; {reason}" for reason in self.reasons)
        return f"MissingBlocks({len(self)} blocks{why})"

    def _position(self, block: tuple[str, int]) -> int:
        position = self._blocks.position(block)
        if position < 0:
            raise KeyError(block)
        return position


def nothing_missing(groups: Mapping[str, range]) -> MissingBlocks:
    """Return that no block is missing, of groups with the layers that were to come."""
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


def join_missing(shares: Sequence[MissingBlocks]) -> MissingBlocks:
    """Return what any of several shares of the same blocks misses.

    The reason is that of the first share that misses the block; its layers are those
    that any share misses.
    """
    groups = {
        name: _join_group([share.groups[name] for share in shares], _offsets(shares))
        for name in shares[0].groups
    }
    return MissingBlocks(groups, [text for share in shares for text in share.meanings])


def _offsets(shares: Sequence[MissingBlocks]) -> list[int]:
    """Return where each share's reasons begin among those of all."""
    counts = [len(share.meanings) for share in shares]
    return [sum(counts[:index]) for index in range(len(counts))]


def _join_group(
    parts: Sequence[MissingOfGroup], offsets: Sequence[int]
) -> MissingOfGroup:
    ids = distinct(np.concatenate([part.ids for part in parts]))
    first = min(part.layers.start for part in parts)
    layers = range(first, max(part.layers.stop for part in parts))
    codes = np.zeros(ids.size, np.uint16)
    lost = np.zeros((len(layers), ids.size), np.bool_)
    # Backwards, so that the first share has the last word.
    for part, offset in zip(reversed(parts), reversed(offsets), strict=True):
        at = np.searchsorted(ids, part.ids)
        codes[at] = part.codes + np.uint16(offset)
        top = part.layers.start - first
        lost[top : top + len(part.layers), at] |= part.lost
    return MissingOfGroup(ids, codes, layers, lost)
