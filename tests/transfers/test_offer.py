"""What the two sides tell each other: read back as it was, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire import KVSpec, PagedCache, ProfileMismatch, UsageError, limits
from kvwire.kv.geometry import Geometry, describe
from kvwire.transfers.offer import (
    ENDPOINT_ID_BYTES,
    TransferOffer,
    new_trace,
    pack_have,
    traceparent,
)

SPEC = KVSpec(layers=2, kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
END = b"endpoint"
assert len(END) == ENDPOINT_ID_BYTES


@dataclass
class Fields:
    """Something to describe."""

    blocks: int = 3

    @property
    def geometry(self) -> Geometry:
        shape = (self.blocks, 2, 4, 1, 2)
        cache = PagedCache(SPEC, [np.zeros(shape, np.float32) for _ in range(2)])
        return describe(cache, cache.block_lists(range(self.blocks)))

    def made(self, **more: Any) -> TransferOffer:
        return TransferOffer(geometry=self.geometry.packed, endpoint_id=END, **more)


U32 = st.integers(0, 2**32 - 1)


@given(
    peer_id=st.sampled_from([b"", b"12345678"]),
    hashes=st.binary(max_size=32),
    landed=st.lists(st.tuples(U32, U32, U32, U32, U32), max_size=5).map(tuple),
    plan=st.binary(max_size=16),
    settled=st.booleans(),
    trace=st.binary(max_size=25),
)
def test_round_trip(**fields: Any) -> None:
    said = Fields().made(**fields)
    assert TransferOffer.decode(said.encode()) == said
    assert said.read_geometry().encoded == Fields().geometry.encoded


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_what_the_consumer_has_comes_back_bit_by_bit(bits: list[bool]) -> None:
    have = {"kv": np.array(bits)}
    said = Fields(len(bits)).made(have=pack_have(have))
    heard = TransferOffer.decode(said.encode())
    found = heard.read_have(heard.read_geometry())
    if any(bits):
        assert found["kv"].tolist() == bits
        assert found["kv"].dtype == np.bool_
    else:
        assert not found, "nothing travels where there is nothing"


@pytest.mark.parametrize(
    "have", [(("kv", b""),), (("kv", b"\x01\x00"),), (("other", b"\x01"),)]
)
def test_a_bitmap_that_does_not_fit(have: Any) -> None:
    said = Fields(8).made(have=have)
    with pytest.raises(ProfileMismatch, match="`have` of group") as caught:
        said.read_have(said.read_geometry())
    assert caught.value.fields == ("have",)


def test_a_name_that_is_no_text() -> None:
    """msgspec reports it as Python does, and not as its own error."""
    data = Fields().made().encode().replace(b"kv", b"k\xff", 1)
    with pytest.raises(ProfileMismatch, match=r"the peer's description.*utf-8"):
        TransferOffer.decode(data)


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint_id": b""},
        {"endpoint_id": b"123456789"},
        {"peer_id": b"123456789"},
        {"hashes": bytes(33)},
        {"plan": bytes(17)},
        {"landed": ((0, 0, 1, 0, 2**32),)},
        {"landed": ((0, 0, 1, 0, -1),)},
        {"landed": ((0, 0, 1, 0, 1),) * (limits.LANDED_BOXES_MAX + 1)},
        {"settled": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_field_out_of_range(change: dict[str, Any]) -> None:
    said = msgspec.structs.replace(Fields().made(), **change)
    with pytest.raises(ProfileMismatch):
        TransferOffer.decode(msgspec.msgpack.encode(said))


def test_a_geometry_out_of_range_names_the_peer() -> None:
    (group,) = msgspec.msgpack.decode(Fields().made().geometry)
    group[3] = 2**32 - 1
    geometry = msgspec.Raw(msgspec.msgpack.encode([group]))
    said = msgspec.structs.replace(Fields().made(), geometry=geometry)
    with pytest.raises(ProfileMismatch, match="the peer's description: group 'kv'"):
        TransferOffer.decode(msgspec.msgpack.encode(said))


def test_room_is_kept_for_what_will_have_landed() -> None:
    """A description that fits now fits with any boxes after a lost link as well."""
    worst = ((2**32 - 1,) * 5,) * limits.LANDED_BOXES_MAX
    low, high = 1, 8 * limits.DESCRIPTION_BYTES_MAX
    while low + 1 < high:
        blocks = (low + high) // 2
        have = (("kv", b"\xff" * blocks),)
        try:
            Fields().made(have=have).encode()
            low = blocks
        except UsageError:
            high = blocks
    assert low > 16_000, "bitmaps of 128,000 blocks fit"
    largest = Fields().made(have=(("kv", b"\xff" * low),), landed=worst)
    assert len(largest.encode()) <= limits.DESCRIPTION_BYTES_MAX
    with pytest.raises(UsageError, match="move fewer blocks at once"):
        Fields().made(have=(("kv", b"\xff" * high),)).encode()
    assert limits.DESCRIPTION_BYTES_MAX + limits.TRANSFER_ID_BYTES_MAX < 64 * 1024


@pytest.mark.parametrize(
    ("mine", "theirs", "differ"),
    [(b"a", b"b", True), (b"a", b"a", False), (b"", b"b", False), (b"a", b"", False)],
)
def test_hashes_are_compared_where_both_give_them(
    mine: bytes, theirs: bytes, differ: bool
) -> None:
    said = Fields().made(hashes=theirs)
    if not differ:
        said.require_same_hashes(mine)
        assert said.hashes == theirs
        return
    with pytest.raises(ProfileMismatch, match="hashes") as caught:
        said.require_same_hashes(mine)
    assert caught.value.fields == ("hashes",)


def test_the_answer_s_plan_must_be_ours() -> None:
    answer = Fields().made(plan=b"ours")
    answer.require_same_plan(b"ours")
    with pytest.raises(ProfileMismatch, match="order the bytes differently") as caught:
        answer.require_same_plan(b"another")
    assert caught.value.fields == ("plan",)


@pytest.mark.parametrize("where", ["groups", "fields of a group"])
def test_lists_that_are_longer_than_any_cache_needs(where: str) -> None:
    """They would be read each time that the question is asked again."""
    group: Any = ["kv", [["name", "value"]], "order", 1, None]
    geometry = [group] * (limits.KV_GROUPS_MAX + 1)
    if where != "groups":
        group[1] *= limits.PROFILE_FIELDS_MAX + 1
        geometry = [group]
    with pytest.raises(ProfileMismatch, match="of length <="):
        TransferOffer.decode(msgspec.msgpack.encode([geometry, END]))


def test_a_trace_travels_as_w3c_writes_it() -> None:
    trace = new_trace()
    assert Fields().made().trace == b""
    assert TransferOffer.decode(Fields().made(trace=trace).encode()).trace == trace
    assert traceparent(trace) == f"00-{trace[:16].hex()}-{trace[16:24].hex()}-01"
    assert traceparent(b"") == traceparent(b"short") == ""
