"""Send only the blocks that the consumer lacks, by comparing hashes.

Both sides may give one hash for each block of their lists. One digest shows whether the
lists of hashes, and thus the tokens, are equal; so a consumer's position 3 is certain
to be the producer's position 3. If the block sizes differ, no hashes agree; then the
sides compare one name for the whole content instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import TypeAlias

import numpy as np

from kvwire.errors import UsageError, wrong_type
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.geometry import Geometry, GroupGeometry

Hashes: TypeAlias = "Sequence[bytes] | Mapping[str, Sequence[bytes]] | None"
"""One hash for each block of the list, of each group of a grouped cache. A last block
that is not full may go without: it has no name, and always moves."""
Have: TypeAlias = "object | Callable[[bytes], bool] | None"
"""A collection of hashes, or a predicate that takes a hash."""


def listed_hashes(hashes: Hashes, geometry: Geometry) -> dict[str, list[bytes]]:
    """Return the hashes of each group, after checking them against its block list."""
    if hashes is None:
        return {}
    names = [group.name for group in geometry.groups]
    if not isinstance(hashes, Mapping):
        if len(names) != 1:
            raise UsageError(f"hashes: pass {{group: hashes}} for {', '.join(names)}")
        hashes = {names[0]: hashes}
    if set(hashes) != set(names):
        raise UsageError(f"hashes: the groups are {', '.join(names)}")
    return {
        group.name: _of_group(hashes[group.name], group) for group in geometry.groups
    }


def _of_group(hashes: Sequence[object], group: GroupGeometry) -> list[bytes]:
    full = group.capacity // group.spec.block_tokens
    if not isinstance(hashes, Sized):
        raise wrong_type("hashes", hashes, "a list with one for each block")
    if len(hashes) not in (group.blocks, full):
        raise UsageError(
            f"hashes: {len(hashes)} hashes for {group.blocks} blocks of group "
            f"{group.name!r}; pass one per block"
        )
    found = [one for one in hashes if isinstance(one, bytes)]
    if len(found) != len(hashes):
        raise UsageError(
            f"hashes: one of group {group.name!r} is not bytes; pass bytes, which are "
            "the same in every process"
        )
    return found


def digest(hashes: Mapping[str, list[bytes]], content: object = None) -> bytes:
    """Return a digest of all hashes, 32 bytes; empty if there are none.

    Args:
        hashes: The hashes of each group.
        content: A name for the content of all lists, used instead of the hashes.

    Raises:
        UsageError: ``content`` is not bytes, or empty.
    """
    if content is not None:
        if not isinstance(content, bytes) or not content:
            raise UsageError(
                f"content={content!r}: pass bytes that identify the tokens"
            )
        return hashlib.sha256(b"content:" + content).digest()
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
    """Return the list positions that a consumer already has."""
    if have is None:
        return {}
    if not hashes:
        raise UsageError("have=: it needs hashes=, which identify the blocks")
    test: Callable[[bytes], bool]
    if callable(have):
        test = have
    else:
        # A single hash is a collection as well, of numbers or letters.
        alone = isinstance(have, str | bytes | bytearray)
        try:
            if alone or not isinstance(have, Iterable):
                raise TypeError
            test = frozenset(have).__contains__
        except TypeError:
            raise UsageError(
                "have=: pass a collection of hashes, or a predicate"
            ) from None
    found: dict[str, Bits] = {}
    for group, ids in lists.items():
        named = hashes[group]
        found[group] = np.zeros(ids.size, np.bool_)
        found[group][: len(named)] = np.fromiter(map(test, named), np.bool_, len(named))
    return found
