"""Send only what the consumer lacks, as hashes on both sides show it.

Both sides may give one hash for each block of their lists. Equal lists of hashes mean
equal tokens in equal order, which is checked as one digest, so a consumer's "I have
position 3" cannot mean another block than the producer's position 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import Bits, Ids

Hashes: TypeAlias = "Sequence[bytes] | Mapping[str, Sequence[bytes]] | None"
"""One hash for each block of the list; for each group of a grouped cache."""
Have: TypeAlias = "object | Callable[[bytes], bool] | None"
"""A collection of hashes, or a predicate on one."""


def listed_hashes(hashes: Hashes, lists: Mapping[str, Ids]) -> dict[str, list[bytes]]:
    """The hashes of each group, checked against the block lists.

    Raises:
        UsageError: A group is unknown or missing, or its hashes are not one a block.
    """
    if hashes is None:
        return {}
    if not isinstance(hashes, Mapping):
        if len(lists) != 1:
            raise UsageError(f"hashes: pass {{group: hashes}} for {', '.join(lists)}")
        hashes = {next(iter(lists)): hashes}
    if set(hashes) != set(lists):
        raise UsageError(f"hashes: the groups are {', '.join(lists)}")
    for group, ids in lists.items():
        if len(hashes[group]) != ids.size:
            raise UsageError(
                f"hashes: {len(hashes[group])} for the {ids.size} blocks of group "
                f"{group!r}"
            )
    return {group: list(hashes[group]) for group in lists}


def digest(hashes: Mapping[str, list[bytes]]) -> bytes:
    """32 bytes over all hashes, or none where none were given."""
    if not hashes:
        return b""
    total = hashlib.sha256()
    for group, listed in hashes.items():
        total.update(b"%d:%s" % (len(listed), group.encode()))
        total.update(b"".join(b"%d:" % len(one) + one for one in listed))
    return total.digest()


def held(
    have: Have, hashes: Mapping[str, list[bytes]], lists: Mapping[str, Ids]
) -> dict[str, Bits]:
    """Which positions of its lists a consumer has already.

    Raises:
        UsageError: ``have`` without hashes, or neither a collection nor a predicate.
    """
    if have is None:
        return {}
    if not hashes:
        raise UsageError("have=: which blocks are meant shows only with hashes=")
    if callable(have):
        test = have
    else:
        try:
            test = frozenset(have).__contains__  # type: ignore[call-overload]
        except TypeError:
            raise UsageError("have=: a collection of hashes, or a predicate") from None
    return {
        group: np.fromiter(map(test, hashes[group]), np.bool_, ids.size)
        for group, ids in lists.items()
    }
