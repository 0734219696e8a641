"""A plan moves exactly the elements that both sides have, and nothing else."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire import limits
from kvwire.errors import ProfileMismatch, UsageError
from kvwire.kv import mapping
from kvwire.kv.blocks import Bits, Blocks
from kvwire.kv.canonical import negotiate
from kvwire.kv.geometry import Geometry, GroupGeometry, describe, geometry_of
from kvwire.kv.layout import AxisOrder
from kvwire.kv.mapping import GroupMap, Steps
from kvwire.kv.paged import PagedCache, computed_once
from kvwire.kv.plan import PlanSide, Segment, TransferPlan
from kvwire.kv.spec import KVSpec
from kvwire.limits import MIB
from tests.kv.reference import LAYOUTS, Shape, Store, read_walk, walk_elements
from tests.kv.scenarios import End, Scenario, partitions, scenarios, segments_of
from tests.memory.fragments import content, fill
from tests.support.depth import examples

SPEC = KVSpec(layers=2, kv_heads=2, head_dim=3, block_tokens=1)
SPEC4 = replace(SPEC, block_tokens=4)
BLOCK_BYTES = SPEC4.layer_block_bytes


@given(scenarios(), st.data())
@settings(max_examples=examples(400), deadline=None, derandomize=True)
def test_any_two_shares(scenario: Scenario, data: st.DataObject) -> None:
    """Any layouts, block sizes, shards, replicas and stages; marks in any order."""
    check_transfer(scenario, data.draw(partitions(scenario.plans()[0])))


@given(scenarios(), st.data())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_touched_cells_are_those_of_the_bytes(
    scenario: Scenario, data: st.DataObject
) -> None:
    plan, _ = scenario.plans()
    (walk,) = plan.groups
    segment = data.draw(st.sampled_from(data.draw(partitions(plan))))
    nbytes = plan.nbytes_of(segment)
    start = data.draw(st.integers(0, nbytes))
    stop = data.draw(st.integers(start, nbytes))
    expected = np.zeros((segment.layers, segment.granules), np.bool_)
    for number, element in enumerate(walk_elements(walk, segment)):
        if start < (number + 1) * walk.item_bytes and number * walk.item_bytes < stop:
            granule = element.token // walk.granule_tokens
            expected[element.layer - segment.layer, granule - segment.granule] = True
    if start == stop:
        expected[:] = False
    touched = plan.touched(segment, start, stop - start)
    np.testing.assert_array_equal(touched, expected)


@given(scenarios(), st.data())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_what_the_consumer_has_is_not_moved(
    scenario: Scenario, data: st.DataObject
) -> None:
    """Dropped granules leave the rest as it is, and the consumer's blocks alone."""
    blocks = len(scenario.consumer.ids)
    have = data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))
    check_transfer(scenario, data.draw(partitions(scenario.plans()[0])), have)


def test_marks_of_groups_name_their_group() -> None:
    spec = KVSpec(layers=2, kv_heads=1, head_dim=2, block_tokens=2)
    groups = {name: (spec, Store(spec, 3, LAYOUTS["NHD"]).tensors()) for name in "ab"}
    cache = PagedCache.grouped(groups)
    plan = plan_for(cache, {"a": [0, 2], "b": [1]}, cache, PlanSide.PRODUCER)
    assert segments_of(plan, 1, slice(1, 2), group="a") == (Segment(0, 1, 1, 1, 1),)
    assert segments_of(plan, group="b") == (Segment(1, 0, 2, 0, 1),)
    with pytest.raises(UsageError, match="unknown group 'c'; the groups are a, b"):
        plan.group_index("c")


def test_blocks_of_a_segment() -> None:
    """The consumer's blocks are half as large: a producer's block is two of them."""
    ends = [
        End(Store(replace(SPEC, block_tokens=size), 6, LAYOUTS["NHD"]), ids, None)
        for size, ids in ((4, [3, 2, 1]), (2, [5, 4, 3, 2, 1, 0]))
    ]
    producer, consumer = Scenario(*ends).plans()
    (segment,) = segments_of(producer, blocks=1)
    assert producer.positions(segment) == slice(1, 2)
    assert consumer.positions(segment) == slice(2, 4)
    assert (
        producer.maps[0].granules_per_block,
        consumer.maps[0].granules_per_block,
    ) == (2, 1)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(1, 0, 1, 0, 1), "group 1 does not exist"),
        (Segment(-1, 0, 1, 0, 1), "group -1 does not exist"),
        (Segment(0, 1, 2, 0, 1), "layers 1 to 2; group 'kv' carries 0 to 1"),
        (Segment(0, -1, 1, 0, 1), "layers -1 to -1"),
        (Segment(0, 0, 0, 0, 1), "layers 0 to -1"),
        (Segment(0, 0, 1, 2, 2), "granules 2 to 3 are outside the 3"),
        (Segment(0, 0, 1, 0, 0), "granules 0 to -1 are outside the 3"),
        (Segment(0, 0, 1, -1, 1), "granules -1 to -1 are outside the 3"),
    ],
    ids=str,
)
def test_a_segment_of_nothing_here_is_refused(segment: Segment, message: str) -> None:
    plan, _ = plans_of(LAYOUTS["NHD"], LAYOUTS["NHD"])
    with pytest.raises(UsageError, match=message):
        plan.check(segment)


def test_bytes_outside_a_segment_are_refused() -> None:
    plan, _ = plans_of(LAYOUTS["NHD"], LAYOUTS["NHD"])
    (segment,) = segments_of(plan, layers=0)
    size = plan.nbytes_of(segment)
    for offset, nbytes in ((-1, 1), (0, -1), (0, size + 1), (size, 1)):
        with pytest.raises(UsageError, match=f"outside its {size} bytes"):
            plan.touched(segment, offset, nbytes)


def test_a_cache_that_cannot_be_written_receives_nothing() -> None:
    store = Store(SPEC4, 3, LAYOUTS["NHD"])
    for tensor in (tensors := store.tensors()):
        tensor.flags.writeable = False
    cache = PagedCache(SPEC4, tensors)
    plan_for(cache, [0], cache, PlanSide.PRODUCER)
    with pytest.raises(UsageError, match="read-only"):
        plan_for(cache, [0], cache, PlanSide.CONSUMER)


def test_a_transfer_larger_than_a_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "REQUEST_BYTES_MAX", 6 * BLOCK_BYTES - 1)
    with pytest.raises(UsageError, match="list fewer blocks"):
        plans_of(LAYOUTS["NHD"], LAYOUTS["NHD"])


@pytest.mark.parametrize("side", PlanSide)
@pytest.mark.parametrize("blocks", [15, 17])
def test_a_peer_whose_order_would_make_crumbs_of_our_memory(
    side: PlanSide, blocks: int
) -> None:
    """Tables of single elements are a dozen times as large as what they describe."""
    spec = KVSpec(layers=8, kv_heads=8, head_dim=128, block_tokens=4)
    shape = (blocks, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
    cache = PagedCache(spec, [np.zeros(shape, np.uint16) for _ in range(spec.layers)])
    # One block of all tokens, of which no two elements lie as they do here.
    peer = Geometry(
        (
            GroupGeometry(
                name="kv",
                spec=replace(spec, block_tokens=blocks * spec.block_tokens),
                order=("block", "kv", "token", "layer", "dim", "head"),
                blocks=1,
            ),
        )
    )
    elements = blocks * spec.block_bytes // spec.item_bytes
    assert (elements > limits.KV_PIECES_MAX) == (blocks == 17)
    if blocks == 15:
        plan = TransferPlan(cache, range(blocks), peer, side)
        (segment,) = plan.segments()
        assert len(plan.fragments(segment)) == elements
        return
    with pytest.raises(ProfileMismatch, match=f"become {elements} pieces") as caught:
        TransferPlan(cache, range(blocks), peer, side)
    assert caught.value.fields == ("order",)


def test_have_names_groups_and_fits_the_list() -> None:
    cache = Store(SPEC4, 3, LAYOUTS["NHD"]).cache()
    wrong: list[tuple[Any, str]] = [
        ({"full": np.ones(1, np.bool_)}, "unknown group 'full'"),
        (
            {"kv": np.ones(2, np.bool_)},
            r"shape \(2,\); pass one bool for each of the consumer's 1",
        ),
        ({"kv": np.ones(1, np.int64)}, "int64 of shape"),
    ]
    for have, message in wrong:
        with pytest.raises(UsageError, match=message):
            plan_for(cache, [0], cache, PlanSide.CONSUMER, have=have)


def test_transfers_of_one_size_share_a_template() -> None:
    here, there = (Store(SPEC4, 16, LAYOUTS["NHD"]).cache() for _ in range(2))
    first = plan_for(here, [1, 3], there, PlanSide.CONSUMER)
    again = plan_for(here, [5, 9], there, PlanSide.CONSUMER)
    assert again.template is first.template
    assert again.digest == first.digest
    more = plan_for(here, [5, 9, 11], there, PlanSide.CONSUMER)
    assert more.template is not first.template
    other = plan_for(here, [1, 3], there, PlanSide.PRODUCER)
    assert other.template is not first.template


def test_transfers_of_many_sizes_share_their_templates() -> None:
    """A server's requests have hundreds of lengths, and each comes again."""
    here, there = (Store(SPEC4, 300, LAYOUTS["NHD"]).cache() for _ in range(2))
    firsts, seconds = (
        [
            plan_for(here, range(count), there, PlanSide.CONSUMER).template
            for count in range(1, 300)
        ]
        for _ in range(2)
    )
    assert all(one is other for one, other in zip(firsts, seconds, strict=True))


def test_what_is_kept_while_several_threads_use_a_cache() -> None:
    """Each of them may drop the oldest result, and none of them fails for it."""
    here = Store(replace(SPEC4, layers=3), 16, LAYOUTS["NHD"]).cache()

    def use(thread: int) -> int:
        numbers = range(8 * limits.KV_TEMPLATES_MAX)
        found = (computed_once(here, (thread, n), partial(int, n)) for n in numbers)
        return sum(map(int.__eq__, found, numbers))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            right = list(threads.map(use, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert right == [8 * limits.KV_TEMPLATES_MAX] * 4


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computed again when it was let go of."""
    monkeypatch.setattr(limits, "KV_TEMPLATES_MAX", 4)
    here = Store(replace(SPEC4, layers=3), 16, LAYOUTS["NHD"]).cache()
    made: list[int] = []

    def compute(number: int) -> int:
        made.append(number)
        return number

    for number in (1, 2, 3, 4, 1, 5, 1):
        assert computed_once(here, number, partial(compute, number)) == number
    assert made == [1, 2, 3, 4, 5, 1]
    (steps,) = plan_for(here, [1], here, PlanSide.CONSUMER).template.steps
    for stop in (1, 2, 3):
        known = steps.of(range(stop))
        assert steps.of(range(stop)) is known
    before = steps.of(range(3))
    monkeypatch.setattr(mapping, "KV_TEMPLATE_STEPS_MAX", before[0].size)
    steps.of(range(1, 2))
    assert steps.of(range(3)) is not before
    monkeypatch.setattr(mapping, "KV_TEMPLATE_STEPS_MAX", 0)
    large = steps.of(range(1, 3))
    assert steps.of(range(1, 3)) is not large


def check_transfer(
    scenario: Scenario, segments: list[Segment], have: list[bool] | None = None
) -> None:
    """Move every segment by fragments; compare with moving element by element."""
    here, there = scenario.producer, scenario.consumer
    here.store.fill(here.ids)
    bits = None if have is None else {"kv": np.array(have, np.bool_)}
    producer, consumer = scenario.plans(bits)
    assert producer.digest == consumer.digest
    assert producer.nbytes == consumer.nbytes
    (walk,) = producer.groups
    expected = there.store.copy()
    for element in there.store.elements(len(there.ids)):
        held = have and have[element.token // there.store.spec.block_tokens]
        carried = element.token < walk.granules * walk.granule_tokens and not held
        if carried and element.layer in walk.layers and element.head in walk.heads:
            source, at = here.store.place(here.ids, element)
            target, to = expected.place(there.ids, element)
            target[to] = source[at]
    moved = 0
    for segment in segments:
        data = content(producer.fragments(segment))
        if have is None:
            assert data == read_walk(here.store, here.ids, walk, segment)
        assert len(data) == producer.nbytes_of(segment) == consumer.nbytes_of(segment)
        fill(consumer.fragments(segment), data)
        moved += len(data)
    assert moved == producer.nbytes
    for raw, wanted in zip(there.store.raw, expected.raw, strict=True):
        np.testing.assert_array_equal(raw, wanted)


def plans_of(
    producer: Shape, consumer: Shape, *, ids: Sequence[int] = (2, 0, 4)
) -> tuple[TransferPlan, TransferPlan]:
    """The plans of two caches of four tokens a block, one list of blocks for both."""
    caches = [Store(SPEC4, 5, shape).cache() for shape in (producer, consumer)]
    return (
        plan_for(caches[0], ids, caches[1], PlanSide.PRODUCER),
        plan_for(caches[1], ids, caches[0], PlanSide.CONSUMER),
    )


def plan_for(
    cache: PagedCache,
    blocks: Blocks,
    peer: PagedCache,
    side: PlanSide,
    *,
    have: Mapping[str, Bits] | None = None,
) -> TransferPlan:
    """A plan of one side where both list the same block ids; from the wire."""
    there = geometry_of(describe(peer, peer.block_lists(blocks)).encoded)
    return TransferPlan(cache, blocks, there, side, have=have)


# --- where a map puts the parts of a walk; that the bytes are right is in test_plan ---


MAPPED = KVSpec(layers=3, kv_heads=2, head_dim=4, block_tokens=2)
MAPPED_BLOCK_BYTES = MAPPED.layer_block_bytes


def map_of(
    cache: PagedCache, ids: list[int], wanted: list[bool] | None = None
) -> GroupMap:
    """The map of a cache that is both ends of a transfer."""
    lists = cache.block_lists(ids)
    here = describe(cache, lists)
    (walk,) = negotiate(here, here)
    bits = np.array(wanted or [True] * len(ids), np.bool_)
    return GroupMap(Steps(walk, cache.groups["kv"]), lists["kv"], bits)


def offsets(group_map: GroupMap, layers: range, granules: slice) -> list[int]:
    """Where each fragment begins, from the beginning of the tensor."""
    found = group_map.fragments(layers, granules)
    base = int(group_map.memory.bases.min())
    return [address - base for address in found.addresses.tolist()]


def blocks(*numbers: int) -> list[int]:
    """The offset of each, counted in blocks of one layer."""
    return [number * MAPPED_BLOCK_BYTES for number in numbers]


CROSS = PagedCache(MAPPED, np.zeros((9, 3, 2, 2, 2, 4), np.uint16))
LAYERS = PagedCache(
    MAPPED,
    np.zeros((3, 9, 2, 2, 2, 4), np.uint16),
    AxisOrder("layer block kv token head dim"),
)


def test_what_lies_together_is_one_fragment() -> None:
    """A block of all layers, and blocks that are neighbours; not what is not wanted."""
    cross = map_of(CROSS, ids=[4, 1, 7])
    assert offsets(cross, range(3), slice(0, 2)) == blocks(12, 3)
    assert offsets(cross, range(1, 3), slice(1, 3)) == blocks(4, 22)
    found = map_of(LAYERS, ids=[3, 4, 5])
    assert found.fragments(range(1), slice(0, 3)).lengths.tolist() == blocks(3)
    some = map_of(LAYERS, ids=[4, 1, 7], wanted=[True, False, True])
    assert some.moved(slice(1, 3)).tolist() == [2]
    assert offsets(some, range(1), slice(0, 3)) == blocks(4, 7)
    assert len(some.fragments(range(1), slice(1, 2))) == 0


def test_a_large_block_takes_no_memory_for_its_places() -> None:
    """What lies together is not listed element by element."""
    large = KVSpec(
        layers=1,
        kv_heads=1,
        head_dim=4 * MIB,
        block_tokens=1,
        dtype="uint8",
        components=1,
        kind="state",
    )
    memory = np.zeros((2, 1, 1, large.head_dim), np.uint8)
    cache = PagedCache.grouped({"kv": (large, [memory])})
    tracemalloc.start()
    try:
        found = map_of(cache, [1]).fragments(range(1), slice(0, 1))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert found.nbytes == large.layer_block_bytes


@pytest.mark.parametrize("cache", [CROSS, LAYERS], ids=["cross", "layers"])
def test_the_last_answer_is_moved_only_where_it_fits(cache: PagedCache) -> None:
    """Asked in any order, each answer is that of a map that was never asked before."""
    asked = [
        (range(1), slice(0, 2)),
        (range(2, 3), slice(0, 2)),
        (range(2, 3), slice(0, 1)),
        (range(2), slice(0, 1)),
        (range(1, 3), slice(0, 1)),
        (range(3), slice(0, 2)),
        (range(1), slice(0, 2)),
    ]
    used = map_of(cache, ids=[4, 1])
    base = int(used.memory.bases.min())
    for layers, granules in asked:
        fresh = map_of(cache, ids=[4, 1])
        found = used.fragments(layers, granules)
        expected = fresh.fragments(layers, granules)
        assert offsets(used, layers, granules) == offsets(fresh, layers, granules)
        assert found.lengths.tolist() == expected.lengths.tolist()
        assert found.owner is used.memory.owners
        assert int(found.addresses.min()) >= base


def test_layers_that_are_not_equally_far_apart() -> None:
    """Moving the last answer must not assume that one distance fits all layers."""
    buffer = np.zeros((6, 9, 2, 2, 2, 4), np.uint16)
    found = map_of(PagedCache(MAPPED, [buffer[0], buffer[1], buffer[5]]), ids=[2])
    step = 9 * MAPPED_BLOCK_BYTES
    at = 2 * MAPPED_BLOCK_BYTES
    assert offsets(found, range(2), slice(0, 1)) == [at, step + at]
    assert offsets(found, range(1, 3), slice(0, 1)) == [step + at, 5 * step + at]
