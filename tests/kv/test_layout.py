"""Axis orders are read, and shapes and strides that do not fit are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire.kv.layout import (
    Axis,
    choose_dims,
    parse_layout,
    read_axes,
)
from kvwire.kv.spec import KVSpec

SPEC = KVSpec(layers=3, kv_heads=4, head_dim=8, block_tokens=2)
MLA = KVSpec(layers=3, kv_heads=1, head_dim=8, block_tokens=2, components=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block heads dim", "no axis 'heads'; the axes are layer, block, kv, token"),
        ("nhd", "no axis 'nhd'.* NHD and HND"),
        ("block dim block", "axis 'block' is there twice"),
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


@pytest.mark.parametrize(
    ("layout", "layered", "apart", "message"),
    [
        (
            "NHD",
            False,
            False,
            r"shape \(7,\) is not NHD .*\(blocks, kv 2, token",
        ),
        ("NHD", True, True, r"is \(blocks, layer 3, token 2, head 4, dim 8\)"),
        (
            "block token head dim",
            False,
            False,
            "lacks axis 'kv', of which .* 2",
        ),
        ("block kv token dim", False, False, "lacks axis 'head'"),
        ("block kv token head dim", True, False, "lacks axis 'layer'"),
        ("layer block kv token head dim", False, False, "one tensor for each layer"),
        ("block kv token head dim", False, True, "one tensor for each key and value"),
    ],
)
def test_layouts_of_other_tensors(
    layout: str, layered: bool, apart: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=f"t: .*{message}"):
        choose_dims(layout, SPEC, (7,), layered=layered, apart=apart, where="t")


def axes_of(
    text: str, array: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
) -> dict[str, Axis]:
    return read_axes(parse_layout(text), SPEC, array.shape, array.strides, where="t")


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("block kv token head dim", (9, 2, 2, 4), r"4 dimensions .* has 5"),
        ("block kv token head dim", (9, 2, 2, 3, 8), "a dimension of 3 .* be head 4"),
        ("block head token (kv dim)", (9, 4, 2, 15), "of 15 .* be kv 2 x dim 8"),
        ("kv (block token) head dim", (2, 19, 4, 8), "of 19 .* be blocks x token 2"),
        ("block kv token head dim", (0, 2, 2, 4, 8), "of 0 .* should be blocks"),
    ],
)
def test_shapes_that_do_not_fit(
    text: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=f"t: .*{message}"):
        axes_of(text, np.zeros(shape, np.uint16))


def test_strides_that_do_not_work() -> None:
    """Flipped, expanded, overlapping, and with gaps between elements."""
    array = np.zeros((9, 2, 2, 4, 8), np.uint16)
    expanded = np.broadcast_to(array[:, :1], array.shape)
    gaps = np.zeros((9, 2, 2, 4, 16), np.uint16)[..., ::2]
    overlap = np.lib.stride_tricks.as_strided(array, strides=(128, 256, 64, 16, 2))
    wrong = [
        (array[:, :, ::-1], "axis 'token' has stride -64; .* flipped nor expanded"),
        (expanded, "axis 'kv' has stride 0"),
        (
            gaps,
            "axis 'dim' is the innermost and has a stride of 4 bytes",
        ),
        (overlap[:4], "axis 'kv' has a stride of 256 bytes, less than the 512 bytes"),
    ]
    for tensor, message in wrong:
        with pytest.raises(UsageError, match=f"t: {message}"):
            axes_of("block kv token head dim", tensor)
