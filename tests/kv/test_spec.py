"""A spec counts what is here, and names what two sides do not share."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.spec import DTYPE_BYTES, KVSpec, dtype_name
from tests.support.depth import examples

SPEC = KVSpec(layers=32, kv_heads=8, head_dim=128, block_tokens=16)


def test_dtypes_by_other_names() -> None:
    assert replace(SPEC, dtype=dtype_name("torch.bfloat16")) == SPEC
    float16: Any = np.dtype(np.float16)
    assert replace(SPEC, dtype=float16).dtype == "float16"


def test_replicated_heads() -> None:
    """Eight shards of a model with four heads: two shards hold each."""
    heads = [
        replace(SPEC, kv_heads=1, shard=(rank, 8), model_kv_heads=4).heads
        for rank in range(8)
    ]
    assert heads == [range(n // 2, n // 2 + 1) for n in range(8)]


def test_mla_is_replicated_without_being_asked() -> None:
    spec = replace(SPEC, kv_heads=1, components=1, head_dim=576, shard=(5, 8))
    assert (spec.total_kv_heads, spec.heads, spec.replicas) == (1, range(1), 8)
    split = replace(SPEC, kv_heads=2, components=1, shard=(1, 2))
    assert split.heads == range(2, 4), "one component of several heads is split"


def test_whole_numbers_of_any_type() -> None:
    """A shape, or a configuration file's reader, has those of NumPy."""
    names = [field.name for field in dataclasses.fields(KVSpec)]
    numbers = {n: v for n in names if isinstance(v := getattr(SPEC, n), int)}
    optional = {"model_kv_heads": SPEC.kv_heads, "model_layers": SPEC.layers}
    given: dict[str, Any] = {n: np.int64(v) for n, v in (numbers | optional).items()}
    shard: Any = (np.int32(0), np.uint16(1))
    spec = replace(SPEC, **given, shard=shard)
    assert spec == replace(SPEC, **dict[str, Any](optional))
    for name in (*numbers, *optional):
        assert type(getattr(spec, name)) is int, name
    assert [type(number) for number in spec.shard] == [int, int]
    assert KVSpec.from_pairs(spec.to_pairs()) == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers=0: pass a number from 1"),
        ({"layers": 1e3}, "layers=1000.0"),
        ({"kv_heads": -1}, "kv_heads=-1"),
        ({"head_dim": True}, "head_dim=True"),
        ({"layers": np.True_}, "layers=np.True_"),
        ({"components": True}, "components=True"),
        ({"shard": (False, True)}, "shard size=True"),
        ({"block_tokens": 2**40}, "block_tokens=1099511627776"),
        ({"dtype": "bf16"}, "dtype='bf16' is unknown; .*bfloat16"),
        (
            {"dtype": "torch.float8_e4m3fnuz"},
            "codes of another one are other numbers; describe its bytes as uint8",
        ),
        ({"components": 3}, "components=3: use 2 for keys and values, or 1 for MLA"),
        ({"fingerprint": "x" * 200}, "fingerprint='xxx"),
        ({"fingerprint": None}, "fingerprint=None"),
        ({"fingerprint": 7}, "a string of at most"),
        ({"fingerprint": "\udcff"}, "half of a surrogate pair"),
        ({"shard": 3}, r"shard=3: use \(rank, size\)"),
        ({"shard": (2, 2)}, "shard rank=2: pass a number from 0 to 1"),
        ({"shard": (0, 0)}, "shard size=0"),
        (
            {"model_kv_heads": 4},
            "4 model_kv_heads cannot be split into 1 shards of kv_h",
        ),
        ({"model_kv_heads": 0}, "model_kv_heads=0"),
        ({"model_kv_heads": 16, "shard": (0, 3)}, "16 model_kv_heads .* 3 shards"),
        ({"first_layer": -1}, "first_layer=-1"),
        ({"first_layer": 1, "model_layers": 32}, r"first_layer=1 \+ layers=32 is more"),
        ({"model_layers": 10**6}, "model_layers=1000000"),
        ({"kind": "else"}, "kind='else'"),
        ({"kind": "state"}, "state\\W+ needs kv_heads=1, block_tokens=1"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(SPEC, **fields)


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    parts = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0]))
    replicas = draw(st.integers(1, 4))
    first = draw(st.integers(0, 9))
    return KVSpec(
        layers=draw(st.integers(1, 99)),
        kv_heads=heads // parts,
        head_dim=draw(st.integers(1, 999)),
        block_tokens=draw(st.integers(1, 999)),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        components=draw(st.sampled_from([1, 2])),
        shard=(draw(st.integers(0, parts * replicas - 1)), parts * replicas),
        fingerprint=draw(st.text(max_size=9)),
        model_kv_heads=heads,
        first_layer=first,
    )


STATE = KVSpec(
    layers=2,
    kv_heads=1,
    head_dim=5_000_000,
    block_tokens=1,
    dtype="uint8",
    components=1,
    shard=(1, 2),
    model_kv_heads=2,
    kind="state",
)


def test_a_state_is_larger_than_any_head() -> None:
    assert STATE.block_bytes == 10_000_000
    again = KVSpec.from_pairs(STATE.to_pairs())
    assert (again.kind, again.to_pairs()) == ("state", STATE.to_pairs())
    with pytest.raises(UsageError, match="head_dim=5000000"):
        replace(STATE, kind="tokens")
    with pytest.raises(UsageError, match="head_dim=1"):
        replace(STATE, head_dim=2**40)


@pytest.mark.parametrize("nbytes", [1, 10**9 - 1, 10**9, 2**30])
def test_a_state_of_any_size_crosses_the_wire(nbytes: int) -> None:
    """Plain bytes are one as well: 1 GiB of them has ten digits."""
    large = replace(STATE, head_dim=nbytes)
    assert KVSpec.from_pairs(large.to_pairs()).block_bytes == large.block_bytes
    longer = [(n, v + "0" if n == "head_dim" else v) for n, v in large.to_pairs()]
    if nbytes == 2**30:
        with pytest.raises(UsageError, match="not a number"):
            KVSpec.from_pairs(longer)


def test_a_state_is_none_of_tokens() -> None:
    small = replace(STATE, head_dim=64)
    assert small.differing(replace(small, kind="tokens")) == ("kind",)


@given(specs())
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_pairs_carry_the_whole_spec(spec: KVSpec) -> None:
    again = KVSpec.from_pairs([list(pair) for pair in spec.to_pairs()])
    assert again.to_pairs() == spec.to_pairs()
    assert (again.heads, again.layer_indices) == (spec.heads, spec.layer_indices)
    assert KVSpec.from_pairs((*spec.to_pairs(), ("newer", "field"))) == again


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[1:], "the peer's layers is '', not a number"),
        (lambda pairs: [p for p in pairs if p[0] != "dtype"], "lacks 'dtype'"),
        (lambda pairs: [*pairs, ("layers", "-1")], "layers is '-1', not a number"),
        (lambda pairs: [*pairs, ("layers", "9" * 5000)], "layers is '999"),
        (lambda pairs: [*pairs, ("layers", "²")], "layers is '²'"),
        (lambda pairs: [*pairs, ("layers", "0")], "layers=0"),
        (lambda pairs: [*pairs, ("shard_size", "99999")], "shard size=99999"),
        (lambda pairs: [*pairs, ("x", 1)], "values that are not strings"),
        (lambda pairs: [*pairs, ("x",)], "not a list of pairs"),
        (lambda pairs: [*pairs, "xy"], "not a list of pairs"),
        (lambda pairs: [("x", "y")] * 1000, "not a list of pairs"),
        (lambda pairs: None, "not a list of pairs"),
    ],
)
def test_what_a_peer_says_is_checked(change: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KVSpec.from_pairs(change(list(SPEC.to_pairs())))
