"""The head of an object: read as it was written, or not at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwire_store.limits import STORE_HASH_BYTES_MAX
from kvwire_store.namespace import DIGEST_BYTES, ORDERS
from kvwire_store.tiers.object_format import HEAD_BYTES, ObjectHead, path_of

heads = st.builds(
    ObjectHead,
    st.binary(min_size=DIGEST_BYTES + 1, max_size=DIGEST_BYTES + STORE_HASH_BYTES_MAX),
    st.integers(0, len(ORDERS) - 1),
    st.integers(1, 2**63),
    st.integers(0, 2**64 - 1),
)


@given(heads, st.binary(max_size=8))
def test_a_head_is_read_as_it_was_written(head: ObjectHead, image: bytes) -> None:
    raw = head.to_bytes()
    assert len(raw) == HEAD_BYTES
    assert ObjectHead.read(memoryview(raw + image)) == head


@given(heads, st.integers(0, HEAD_BYTES * 8 - 1))
def test_no_bit_of_a_head_may_change(head: ObjectHead, bit: int) -> None:
    raw = bytearray(head.to_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    assert ObjectHead.read(memoryview(raw)) is None


@given(st.binary(max_size=2 * HEAD_BYTES))
def test_other_bytes_are_no_head(raw: bytes) -> None:
    assert ObjectHead.read(memoryview(raw)) is None


@given(st.lists(heads, min_size=2, max_size=2, unique_by=lambda head: head.key))
def test_every_key_has_a_name_of_its_own(pair: list[ObjectHead]) -> None:
    assert path_of(pair[0].key) != path_of(pair[1].key)
