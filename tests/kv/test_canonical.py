"""Two descriptions that do not fit are told apart by field.

Which walk those that fit agree on is compared in tests/protocol/test_raw_plan.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvwire.errors import ProfileMismatch
from kvwire.kv.canonical import negotiate
from kvwire.kv.geometry import Geometry, GroupGeometry
from kvwire.kv.spec import KVSpec

SPEC = KVSpec(layers=8, kv_heads=4, head_dim=64, block_tokens=16)

NHD = "layer block kv token head dim"


def side(order: str = NHD, blocks: int = 4, **fields: Any) -> Geometry:
    """One group of full blocks, unless ``tokens`` says otherwise."""
    tokens = fields.pop("tokens", None)
    name = fields.pop("name", "kv")
    spec = replace(SPEC, **fields)
    axes = tuple(order.split())
    return Geometry(
        (GroupGeometry(name=name, spec=spec, order=axes, blocks=blocks, tokens=tokens),)
    )


@pytest.mark.parametrize(
    ("producer", "consumer", "field", "message"),
    [
        (side(name="a"), side(name="b"), "groups", "producer has a, the consumer b"),
        (
            side(name="a"),
            side(name="\x1b[2J"),
            "groups",
            r"the consumer '\\x1b\[2J'; both",
        ),
        (
            Geometry(side(name="a" * 128).groups * 64),
            side(),
            "groups",
            "'a{128}, a{65,66}\\.\\.\\., the",
        ),
        (
            side(),
            side(dtype="float16"),
            "dtype",
            "'kv' differs in dtype: dtype is 'bfloat16' at the producer",
        ),
        (side(), side(components=1), "components", "'kv' differs in components"),
        (side(), side(blocks=5), "blocks", "producer lists 4 blocks of 16 tokens, the"),
        (side(), side(block_tokens=32), "blocks", "list the blocks of the same tokens"),
        (
            side(tokens=60),
            side(tokens=61),
            "tokens",
            "tokens=60, the consumer tokens=61",
        ),
        (side(), side(tokens=40, blocks=3), "blocks", "consumer 3 blocks .* tokens=40"),
        (
            side(kv_heads=1, shard=(0, 4)),
            side(kv_heads=1, shard=(1, 4)),
            "shard",
            "no KV head in common",
        ),
        (
            side(layers=4, model_layers=8),
            side(layers=4, first_layer=4),
            "first_layer",
            "no layer in common",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_r35_a_mismatch_names_the_field(
    producer: Geometry, consumer: Geometry, field: str, message: str
) -> None:
    with pytest.raises(ProfileMismatch, match=message) as caught:
        negotiate(producer, consumer)
    assert caught.value.fields == (field,)
