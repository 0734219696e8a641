"""Axis orders are read; which tensors do not fit them, test_paged says."""

from __future__ import annotations

import pytest

from kvwire.errors import UsageError
from kvwire.kv.layout import choose_dims, parse_layout
from kvwire.kv.spec import KVSpec

SPEC = KVSpec(layers=3, kv_heads=4, head_dim=8, block_tokens=2)
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
