"""What is put and got: tiers that hold just as much, and sets that take turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvwire.cli.bench.store_work import (
    DISK,
    HASHES,
    MATCH,
    ONE,
    ONE_BY_ONE_MAX,
    PUT,
    SETS,
    SHAPES,
    LastTwo,
    Shape,
    StoreWork,
    work_of,
)
from kvwire.limits import GIB, KIB, MIB
from kvwire.store.address import TierAddress
from kvwire.store.tiers.slabs import Slabs

shapes = st.sampled_from(list(SHAPES.values()))
rounds = st.integers(4, 4096).map(lambda mib: mib * MIB)


def room(work: StoreWork, text: str) -> int:
    """How many blocks of a work a tier takes."""
    address = TierAddress.parse(text)
    nbytes = address.size(address.options.get("size") or address.place)
    slab = address.slab_bytes(nbytes)
    slabs = Slabs(nbytes // slab, slab)
    return len(slabs) * slabs.capacity(work.nbytes)


@given(shape=shapes, round_bytes=rounds, sets=st.integers(1, SETS))
def test_memory_has_room_for_whole_sets_and_no_more(
    shape: Shape, round_bytes: int, sets: int
) -> None:
    for verb in (PUT, MATCH):
        work = work_of(DISK, verb, shape, round_bytes)
        assert room(work, work.memory(sets)) == sets * work.set_blocks


@given(shape=shapes, round_bytes=rounds)
def test_a_disk_has_room_for_its_sets(shape: Shape, round_bytes: int) -> None:
    for verb in (PUT, MATCH):
        work = work_of(DISK, verb, shape, round_bytes)
        assert room(work, work.disk("/kv")) == SETS * work.set_blocks


@given(shape=shapes, round_bytes=rounds)
def test_a_round_is_about_as_large_as_it_should_be(
    shape: Shape, round_bytes: int
) -> None:
    work = work_of(DISK, PUT, shape, round_bytes)
    assert work.moved_bytes == work.set_bytes
    # Whole slabs: of 7 blocks 4 are left.
    assert round_bytes / 2 < work.set_bytes <= round_bytes
    assert work.transfer.moved_bytes == work.set_bytes


def test_the_shapes_are_those_of_the_documentation() -> None:
    large, small = SHAPES["large"], SHAPES["small"]
    assert (large.block_bytes, large.layer_bytes) == (1 * MIB, 32 * KIB)
    assert (small.block_bytes, small.layer_bytes) == (64 * KIB, 4 * KIB)


def test_one_by_one_are_some_and_a_match_has_its_own_blocks() -> None:
    one = work_of(DISK, ONE, SHAPES["small"], GIB)
    assert one.count == ONE_BY_ONE_MAX < one.set_blocks
    few = work_of(DISK, ONE, SHAPES["large"], 8 * MIB)
    assert few.count == few.set_blocks == 8
    match = work_of(DISK, MATCH, SHAPES["large"], GIB)
    assert match.count == match.set_blocks == HASHES


def test_the_last_two_take_turns() -> None:
    sets: LastTwo[str] = LastTwo()
    sets.add("a")
    assert sets.next() == "a"
    sets.add("b")
    assert [sets.next() for _ in range(3)] == ["a", "b", "a"]
    sets.add("c")
    assert len(sets) == 2
    assert [sets.next() for _ in range(3)] == ["a", "c", "a"]
    assert [sets.older() for _ in range(3)] == ["c"] * 3
