"""A paged cache finds every element, however its tensors are cut, and keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire.kv.layout import AxisOrder, choose_dims, parse_layout
from kvwire.kv.paged import PagedCache
from kvwire.kv.spec import KVSpec
from tests.kv.tensors import torch_like

SPEC = KVSpec(layers=3, kv_heads=4, head_dim=8, block_tokens=2)
SHAPE = (9, 2, 2, 4, 8)


def layers(*shape: int, count: int = 3) -> list[Any]:
    return [np.zeros(shape or SHAPE, np.uint16) for _ in range(count)]


def order_of(cache: PagedCache) -> str:
    return " ".join(cache.groups["kv"].order)


@pytest.mark.parametrize(
    ("memory", "order"),
    [
        ((1, 0, 2, 3, 4), "layer kv block token head dim"),
        ((0, 1, 3, 2, 4), "layer block kv head token dim"),
        ((0, 3, 2, 1, 4), "layer block head token kv dim"),
    ],
)
def test_the_memory_decides_the_order(memory: tuple[int, ...], order: str) -> None:
    """Engines pass permuted views: the shape says NHD, the strides something else."""
    tensors = [
        np.zeros([SHAPE[axis] for axis in memory], np.uint16).transpose(
            np.argsort(memory)
        )
        for _ in range(3)
    ]
    cache = PagedCache(SPEC, tensors, AxisOrder("block kv token head dim"))
    assert order_of(cache) == order


def test_an_axis_of_one_element_goes_where_it_usually_is() -> None:
    spec = replace(SPEC, kv_heads=1, components=1, layers=1)
    assert order_of(PagedCache(spec, np.zeros((9, 2, 8), np.uint16))) == (
        "layer block kv token head dim"
    )


def test_tensors_with_others_between_them_share_no_memory() -> None:
    """Keys of all layers in one place and values in another, layers in any order."""
    shape = (9, 2, 4, 8)  # block token head dim
    memory = np.zeros((2, 3, *shape), np.uint16)
    tensors = [(memory[0, at], memory[1, at]) for at in (1, 2, 0)]
    cache = PagedCache(SPEC, tensors)
    assert order_of(cache) == "layer kv block token head dim"
    tensors[2] = (memory[0, 0], memory[0, 2])
    with pytest.raises(UsageError, match=r"layer 1 .* and layer 2 .* share memory"):
        PagedCache(SPEC, tensors)


def test_tensors_interleaved_by_chance_are_as_good_as_any() -> None:
    """k0 . k1 v0 k2 v1 . v2: equally far apart, but not one inside the other."""
    part = 9 * 2 * 4 * 8
    buffer = np.zeros(8 * part, np.uint16)

    def piece(n: int) -> Any:
        return buffer[n * part : (n + 1) * part].reshape(9, 2, 4, 8)

    pairs = [(piece(0), piece(3)), (piece(2), piece(5)), (piece(4), piece(7))]
    cache = PagedCache(SPEC, pairs)
    assert order_of(cache) == "layer kv block token head dim"


def test_groups() -> None:
    window = replace(SPEC, layers=1, block_tokens=4)
    cache = PagedCache.grouped(
        {
            "full": (SPEC, layers()),
            "window": (window, np.zeros((5, 2, 4, 4, 8), np.uint16), "HND"),
        }
    )
    assert list(cache.groups) == ["full", "window"]
    assert [group.num_blocks for group in cache.groups.values()] == [9, 5]
    assert repr(cache) == (
        "PagedCache('full': 3 layers x 9 blocks of 2 tokens, bfloat16, "
        "layer block kv token head dim; 'window': 1 layers x 5 blocks of 4 tokens, "
        "bfloat16, layer block kv head token dim)"
    )
    for attribute in ("spec", "num_blocks"):
        with pytest.raises(UsageError, match="has the groups full, window"):
            getattr(cache, attribute)
    with pytest.raises(UsageError, match="group 'window': block id 7"):
        cache.block_lists({"full": [7], "window": [7]})


def test_checked_lists_are_not_checked_twice_but_their_number_is() -> None:
    cache = PagedCache(SPEC, layers())
    lists = cache.block_lists([3, 1])
    assert cache.block_lists(lists) is lists
    none = cache.block_lists([], least=0)
    assert cache.block_lists(none, least=0) is none
    with pytest.raises(UsageError, match="0 blocks; a transfer takes 1 to"):
        cache.block_lists(none)


def test_lists_of_another_cache_are_checked_again() -> None:
    cache = PagedCache(SPEC, layers())
    larger = PagedCache(SPEC, layers(18, *SHAPE[1:]))
    same = cache.block_lists(larger.block_lists([8]))
    assert same["kv"].tolist() == [8]
    with pytest.raises(UsageError, match="block id 9 at position 0 is out of range"):
        cache.block_lists(larger.block_lists([9]))


def test_groups_may_share_memory() -> None:
    """Hybrid models have one pool for all groups, whose ids do not collide."""
    pool = layers()
    cache = PagedCache.grouped({"a": (SPEC, pool), "b": (SPEC, pool)}, layout="NHD")
    assert list(cache.groups) == ["a", "b"]


def wrong_tensors() -> list[tuple[Any, str, str]]:
    """Tensors, their layout, and what is said of them."""
    good = layers()
    half = np.zeros(SHAPE, np.float16)
    other_blocks = np.zeros((8, *SHAPE[1:]), np.uint16)
    padded = np.zeros((9, 2, 3, 4, 8), np.uint16)[:, :, :2]
    on_gpu = torch_like(np.zeros(SHAPE, np.uint16), "torch.bfloat16", device="cuda")
    keys = layers(9, 2, 4, 8)
    big = np.zeros((10, *SHAPE[1:]), np.uint16)
    tiny = np.zeros(7, np.uint16)
    gaps = np.zeros((9, 2, 2, 4, 16), np.uint16)[..., ::2]
    expanded = np.broadcast_to(good[0][:, :1], SHAPE)
    overlap = np.lib.stride_tricks.as_strided(good[0], strides=(128, 256, 64, 16, 2))
    named = "block kv token head dim"
    return [
        (good[:2], "NHD", "2 tensors for layers=3; pass one for each layer"),
        ([*good[:2], half], "NHD", r"tensors\[2\]: dtype is float16, .* has bfloat16"),
        (
            [*good[:2], other_blocks],
            "NHD",
            r"tensors\[2\]: it has 8 blocks, .* first tensor has 9",
        ),
        ([*good[:2], padded], "NHD", r"tensors\[2\]: axis 'block' has a stride of 384"),
        ([*good[:2], on_gpu], "NHD", r"tensors\[2\]: it is in memory of cuda:0"),
        ([*good[:2], None], "NHD", r"tensors\[2\]: a NoneType is neither"),
        (
            [*good[:2], good[0]],
            "NHD",
            "layer 0 component 0 and layer 2 .* share memory",
        ),
        ([*good[:2], (good[2],) * 3], "NHD", r"tensors\[2\] is 3 tensors"),
        ([*good[:2], (good[2], good[2])], "NHD", r"tensors\[2\] is 2 tensors"),
        ([(k, k) for k in keys], "NHD", "component 0 and layer . component 1 share"),
        ([big[:9], big[1:], good[0]], "NHD", "layer 0 .* and layer 1 .* share memory"),
        (good, "HND", r"tensors\[0\]: shape \(9, 2, 2, 4, 8\) does not fit layout HND"),
        (
            [tiny] * 3,
            "NHD",
            r"shape \(7,\) does not fit layout NHD.*\(blocks, kv 2, token",
        ),
        ([(tiny, tiny)], "NHD", r"is \(blocks, layer 3, token 2, head 4, dim 8\)"),
        (
            good,
            "block token head dim",
            r"tensors\[0\]: layout .* lacks axis 'kv'; .* size 2",
        ),
        (good, "block kv token dim", "lacks axis 'head'"),
        (good[0], named, "lacks axis 'layer'"),
        (good, f"layer {named}", "one tensor for each layer"),
        ([(k, k) for k in keys], named, "one tensor for each key and value"),
        (layers(9, 2, 2, 4), named, "4 dimensions .* has 5"),
        (layers(*SHAPE, 1), named, "6 dimensions .* has 5"),
        (layers(9, 2, 2, 3, 8), named, "a dimension of 3 .* be head 4"),
        (layers(9, 4, 2, 15), "block head token (kv dim)", "15 .* be kv 2 x dim 8"),
        (layers(2, 19, 4, 8), "kv (block token) head dim", "19 .* blocks x token 2"),
        (layers(0, 2, 2, 4, 8), named, "of 0 .* should be blocks"),
        ([good[0][:, :, ::-1]] * 3, named, "'token' has stride -64; .* flipped nor"),
        ([expanded] * 3, named, "axis 'kv' has stride 0"),
        ([gaps] * 3, named, "the innermost axis 'dim' has a stride of 4 bytes"),
        ([overlap[:4]] * 3, named, "'kv' has a stride of 256 bytes, less than the 512"),
        (
            good[0],
            "NHD",
            r"the cross-layer tensor: shape \(9, 2, 2, 4, 8\) does not fit layout NHD",
        ),
        ([(keys[0], good[0])] * 3, "NHD", r"tensors\[0\]\[1\]: shape"),
    ]


@pytest.mark.parametrize(
    ("tensors", "layout", "message"),
    wrong_tensors(),
    ids=[message for _, _, message in wrong_tensors()],
)
def test_r35_wrong_tensors_are_named(tensors: Any, layout: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"group 'kv': .*{message}"):
        PagedCache(SPEC, tensors, AxisOrder(layout))


def test_wrong_groups_are_named() -> None:
    for groups in ({}, {f"g{n}": (SPEC, layers()) for n in range(65)}):
        with pytest.raises(UsageError, match=f"{len(groups)} groups; 1 to 64"):
            PagedCache.grouped(groups)
    for name in ("", "half \udcff"):
        with pytest.raises(UsageError, match="group name"):
            PagedCache.grouped({name: (SPEC, layers())})
    with pytest.raises(UsageError, match="group 'window': 2 tensors for layers=3"):
        PagedCache.grouped({"window": (SPEC, layers(count=2))})


# --- axis orders are read; which tensors do not fit them, test_paged says -------------


MLA = KVSpec(layers=3, kv_heads=1, head_dim=8, block_tokens=2, components=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block heads dim", "unknown axis .*'heads'; did you mean 'head'"),
        ("nhd", "unknown axis .*'nhd'.* HND, NHD"),
        ("block dim block", "axis 'block' appears twice"),
        ("token head dim", "axis 'block' is missing"),
        ("", "axis 'block' is missing"),
    ],
)
def test_layouts_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "spec", "shape", "layered", "apart", "axes"),
    [
        ("NHD", SPEC, (9, 2, 2, 4, 8), False, False, "block kv token head dim"),
        ("HND", SPEC, (9, 2, 4, 2, 8), False, False, "block kv head token dim"),
        ("NHD", SPEC, (9, 3, 2, 2, 4, 8), True, False, "block layer kv token head dim"),
        ("HND", SPEC, (9, 4, 2, 8), False, True, "block head token dim"),
        ("NHD", MLA, (9, 2, 8), False, False, "block token dim"),
        ("HND", MLA, (9, 2, 8), False, False, "block token dim"),
        ("NHD", MLA, (9, 3, 2, 8), True, False, "block layer token dim"),
        ("NHD", MLA, (9, 2, 1, 8), False, False, "block token head dim"),
        ("NHD", MLA, (9, 1, 2, 8), False, False, "block kv token dim"),
        ("HND", MLA, (9, 1, 2, 8), False, False, "block head token dim"),
        ("NHD", MLA, (9, 1, 2, 1, 8), False, False, "block kv token head dim"),
    ],
)
def test_short_forms_adapt(
    layout: str,
    spec: KVSpec,
    shape: tuple[int, ...],
    layered: bool,
    apart: bool,
    axes: str,
) -> None:
    dims = choose_dims(layout, spec, shape, layered=layered, apart=apart, where="t")
    assert " ".join(axis for (axis,) in dims) == axes
