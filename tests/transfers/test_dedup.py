"""Hashes and what a consumer has: one hash a block, and a wrong call is told so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import KVSpec, PagedCache, UsageError
from kvwire.kv.geometry import Geometry, Tokens, describe
from kvwire.transfers.dedup import digest, held, listed_hashes

SPEC = KVSpec(layers=1, kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")


def geometry(tokens: Tokens = None, **groups: int) -> Geometry:
    """Of so many blocks of each group."""
    counts = groups or {"kv": 3}
    cache = PagedCache.grouped(
        {name: (SPEC, [np.zeros((8, 2, 4, 1, 2), np.float32)]) for name in counts}
    )
    lists = cache.block_lists({name: range(count) for name, count in counts.items()})
    return describe(cache, lists, tokens)


def test_one_hash_for_each_block() -> None:
    assert listed_hashes(None, geometry()) == {}
    assert listed_hashes([b"a", b"b", b"c"], geometry()) == {"kv": [b"a", b"b", b"c"]}
    both = {"w": [b"x"], "f": [b"a", b"b"]}
    assert list(listed_hashes(both, geometry(f=2, w=1))) == ["f", "w"]


def test_a_last_block_that_is_not_full_has_no_name() -> None:
    assert listed_hashes([b"a", b"b"], geometry(tokens=9)) == {"kv": [b"a", b"b"]}
    with pytest.raises(UsageError, match="2 hashes for 3 blocks"):
        listed_hashes([b"a", b"b"], geometry(tokens=12))


@pytest.mark.parametrize(
    ("hashes", "groups", "said"),
    [
        ([b"a"], {}, "1 hashes for 3 blocks of group 'kv'"),
        ([b"a"] * 4, {}, "4 hashes for 3 blocks"),
        ([b"a", 7, b"c"], {}, "one of group 'kv' is not bytes"),
        ([b"a", "b", b"c"], {}, "one of group 'kv' is not bytes"),
        ([b"a", b"b", b"c"], {"f": 2, "w": 1}, "pass {group: hashes} for f, w"),
        ({"f": [b"a", b"b"]}, {"f": 2, "w": 1}, "the groups are f, w"),
        ({"f": [b"a"] * 2, "x": [b"a"]}, {"f": 2, "w": 1}, "the groups are f, w"),
    ],
)
def test_hashes_that_do_not_fit(hashes: Any, groups: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        listed_hashes(hashes, geometry(**groups))


LISTS = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.binary(max_size=3), max_size=4)
)


@given(LISTS, LISTS)
def test_digests_are_equal_exactly_if_the_hashes_are(
    one: dict[str, list[bytes]], other: dict[str, list[bytes]]
) -> None:
    """Wherever one hash ends and the next begins, and whatever the groups' order."""
    same = list(one.items()) == list(other.items())
    assert (digest(one) == digest(other)) == same
    assert len(digest(one)) == (32 if one else 0)


def test_content_takes_the_place_of_hashes() -> None:
    """So two sides that cut it into other blocks compare the same."""
    assert digest({"kv": [b"a"]}, b"x") == digest({"kv": [b"b", b"c"]}, b"x")
    assert len({digest({}, b"x"), digest({}, b"y"), digest({"kv": [b"x"]})}) == 3
    for odd in ("x", b""):
        with pytest.raises(UsageError, match="bytes that identify the tokens"):
            digest({}, odd)


@pytest.mark.parametrize(
    "have",
    [[b"b", b"z"], {b"b"}, {b"b": 1}, (b"b",), lambda name: name == b"b"],
    ids=["list", "set", "dict", "tuple", "predicate"],
)
def test_what_is_here_by_collection_or_predicate(have: Any) -> None:
    lists = {"kv": np.arange(4)}
    found = held(have, {"kv": [b"a", b"b", b"c"]}, lists)
    # The last block has no name, so nobody has it.
    assert found["kv"].tolist() == [False, True, False, False]
    assert found["kv"].dtype == np.bool_
    assert held(None, {}, lists) == {}


@pytest.mark.parametrize("have", [b"b", bytearray(b"b"), "b", [[b"b"]], 5])
def test_what_is_no_collection_of_hashes_is_refused(have: Any) -> None:
    with pytest.raises(UsageError, match="have=: pass a collection of hashes"):
        held(have, {"kv": [b"b"]}, {"kv": np.arange(1)})
