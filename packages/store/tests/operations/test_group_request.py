"""Images against the slow model of a cache: element by element."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.kv.spec import KVSpec
from kvwire.memory.copy import copy
from kvwire_store.namespace import ORDERS, namespace_of, order_of
from kvwire_store.operations.group_request import GroupRequest
from tests.kv.reference import Element, Store, shapes
from tests.support.caches import chain
from tests.support.depth import examples

SIZES = [(1, 1), (4, 4), (2, 4), (4, 2), (6, 4), (4, 6), (1, 3), (3, 1)]
"""Tokens of a block, and of a hash."""


def image_bytes(request: GroupRequest, positions: list[int], order: int) -> bytes:
    """The images, copied out of the cache."""
    fragments = request.fragments(np.array(positions), order)
    gathered = bytearray(fragments.nbytes)
    copy(fragments, memoryview(gathered))
    return bytes(gathered)


def slow_image(store: Store, ids: Sequence[int], tokens: range, order: int) -> bytes:
    steps = {
        "layer": store.spec.layer_indices,
        "kv": range(store.spec.components),
        "token": tokens,
        "head": store.spec.heads,
        "dim": range(store.spec.head_dim),
    }
    parts = []
    for at in itertools.product(*(steps[axis] for axis in ORDERS[order])):
        named = dict(zip(ORDERS[order], at, strict=True))
        raw, index = store.place(ids, Element(**named))
        parts.append(raw[index].tobytes())
    return b"".join(parts)


@given(st.data())
@settings(max_examples=examples(120), deadline=None, derandomize=True)
def test_an_image_has_every_element_in_its_place(data: st.DataObject) -> None:
    """Any layout, block size and order; and back into another layout."""
    block_tokens, hash_tokens = data.draw(st.sampled_from(SIZES))
    fields = {
        "layers": data.draw(st.integers(1, 3)),
        "kv_heads": data.draw(st.sampled_from([1, 2])),
        "head_dim": data.draw(st.integers(1, 3)),
        "components": data.draw(st.sampled_from([1, 2])),
        "dtype": data.draw(st.sampled_from(["float16", "float32", "uint8"])),
    }
    spec = KVSpec(**fields, block_tokens=block_tokens)  # type: ignore[arg-type]
    units = np.lcm(block_tokens, hash_tokens) * 2 // hash_tokens
    blocks = int(units) * hash_tokens // block_tokens
    ids = data.draw(st.permutations(range(blocks + 1)))[:blocks]
    source = Store(spec, blocks + 1, data.draw(shapes(spec)))
    source.fill(ids)
    cache = source.cache()
    group = cache.groups["kv"]
    hashes = chain(int(units))
    namespace = namespace_of(group, hash_tokens)
    request = GroupRequest(cache, "kv", np.array(ids), hashes, namespace)
    order = data.draw(st.integers(0, len(ORDERS) - 1))
    some = sorted(data.draw(st.sets(st.integers(0, int(units) - 1), min_size=1)))

    expected = b"".join(
        slow_image(source, ids, range(p * hash_tokens, (p + 1) * hash_tokens), order)
        for p in some
    )
    images = image_bytes(request, some, order)
    assert images == expected
    assert 0 <= order_of(group.order) < len(ORDERS)

    target = Store(spec, blocks + 1, data.draw(shapes(spec)))
    there = GroupRequest(target.cache(), "kv", np.array(ids), hashes, namespace)
    into = there.fragments(np.array(some), order)
    assert isinstance(into, Fragments)
    copy(memoryview(images), into)
    assert image_bytes(there, some, order) == expected
