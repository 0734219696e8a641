"""Codecs that lose bits: how many, for any form; and what they leave alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import IntegrityError
from kvwire.kv.codecs.floats import E4M3_MAX, as_floats, of_e4m3, put_floats, to_e4m3
from kvwire_store.codecs.base import BlockCodec, ImageForm
from kvwire_store.codecs.registry import CODECS
from packages.store.tests.codecs.images import ORDERS, floats, form, image
from tests.support.depth import examples

LOSSY = [codec for codec in CODECS.values() if codec.lossy]
# Of a number of the dtype, rounded to the nearest.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}


def decoded(codec: BlockCodec, of: ImageForm, seed: int, scale: float) -> np.ndarray:
    into = np.empty(of.nbytes, np.uint8)
    nbytes = codec.encode(image(of, seed, scale), of, into)
    assert 0 < nbytes < of.nbytes
    again = np.full(of.nbytes, 255, np.uint8)
    codec.decode(into[:nbytes].copy(), of, again)
    return floats(again, of)


@settings(max_examples=examples(150))
@given(
    codec=st.sampled_from(LOSSY),
    dtype=st.sampled_from(sorted(ROUNDING)),
    order=st.integers(0, len(ORDERS) - 1),
    components=st.integers(1, 2),
    head_dim=st.sampled_from([5, 32]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_errors_are_bounded(
    codec: BlockCodec,
    dtype: str,
    order: int,
    components: int,
    head_dim: int,
    scale: float,
    seed: int,
) -> None:
    of = form(dtype, order, components, head_dim)
    exact = floats(image(of, seed, scale), of)
    error = np.abs(decoded(codec, of, seed, scale) - exact)
    token, dim, kv = of.places("token", "dim", "kv")
    if codec.name == "int4":
        # Half a step: of a channel over the tokens for keys, of a token for values.
        keys = np.ptp(exact, axis=token, keepdims=True)
        values = np.ptp(exact, axis=dim, keepdims=True)
        is_key = np.arange(components).reshape([-1 if i == kv else 1 for i in range(5)])
        wide = np.where((is_key == 0) & (components == 2), keys, values)
        # Numbers that describe a group are of float16: the least may be a bit less.
        most = wide / 30 * 1.01 + np.abs(exact) * 2.0**-10 + 1e-6
    else:
        peak = np.abs(exact).max((token, dim), keepdims=True)
        small = peak / (127 * 2 if codec.name == "int8" else 448 * 2**10)
        relative = 0.0 if codec.name == "int8" else np.abs(exact) * 2.0**-4
        most = np.maximum(small, relative) * 1.01
    # The last term: float16 has no numbers between those next to 0.
    most = most + (np.abs(exact) + most) * ROUNDING[dtype]
    most = most + (2.0**-25 if dtype == "float16" else 0.0)
    assert (error <= most).all(), float((error - most).max())


def test_large_channels_of_keys_cost_the_others_nothing() -> None:
    """Of an image whose every eighth channel is far off, for all tokens."""
    of = form()
    exact = floats(image(of), of)
    error = np.abs(decoded(CODECS["int4"], of, 0, 1.0) - exact)
    keys, values = error[:, 0], error[:, 1]
    assert keys[..., 1].mean() < 0.15 < values[..., 1].mean()


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_what_is_left_alone(codec: BlockCodec) -> None:
    of, into = form("float32"), np.empty(2**14, np.uint8)
    for number in (np.inf, -np.inf, np.nan):
        given_ = image(of).copy()
        given_.view(np.float32)[3] = number
        assert codec.encode(given_, of, into) == 0
    assert codec.encode(image(form("int8")), form("int8"), into) == 0
    assert codec.encode(image(of), of, into[:100]) == 0
    with pytest.raises(IntegrityError, match="2048 elements of float32 need"):
        codec.decode(into[:100], of, np.empty(of.nbytes, np.uint8))


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("number", [0.0, 3.0, -1e-30, 1e-40])
def test_blocks_of_one_number(codec: BlockCodec, number: float) -> None:
    of = form("float32")
    given_ = np.full(of.elements, number, np.float32).view(np.uint8)
    into, again = np.empty(of.nbytes, np.uint8), np.empty(of.nbytes, np.uint8)
    nbytes = codec.encode(given_, of, into)
    codec.decode(into[:nbytes], of, again)
    assert floats(again, of).ravel() == pytest.approx(number, rel=1e-3, abs=1e-7)


def test_what_float16_cannot_describe_is_left_alone() -> None:
    of = form("float32")
    into = np.empty(of.nbytes, np.uint8)
    assert CODECS["int4"].encode(image(of, scale=1e6), of, into) == 0
    assert CODECS["int8"].encode(image(of, scale=1e6), of, into) > 0


# --- element types in NumPy: every number of float8, the rounding of bfloat16 ---------


def test_every_float8_is_itself_again() -> None:
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 127) != 127]  # not a number
    assert of_e4m3(codes).max() == E4M3_MAX
    assert of_e4m3(np.array([1, 8, 56], np.uint8)).tolist() == [2**-9, 2**-6, 1.0]
    again = to_e4m3(of_e4m3(codes))
    assert (again == codes).all()
    assert np.isnan(of_e4m3(np.array([127, 255], np.uint8))).all()


def test_float8_is_the_nearest_one() -> None:
    rng = np.random.default_rng(1)
    values = (rng.normal(size=2000) * 2.0 ** rng.integers(-9, 8, 2000)).clip(-448, 448)
    # Numbers of float16, as which they are looked up: nothing is rounded twice.
    values = values.astype(np.float16).astype(np.float32)
    finite = of_e4m3(np.arange(127, dtype=np.uint8))
    best = np.abs(finite[None] - np.abs(values)[:, None]).min(1)
    got = np.abs(of_e4m3(to_e4m3(values)) - values)
    assert got == pytest.approx(best, abs=0)
    # Ties go to the even code: 17 lies between 16 (88) and 18 (89).
    assert to_e4m3(np.array([17, 19, -17], np.float32)).tolist() == [88, 90, 216]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_elements_are_themselves_again(dtype: str) -> None:
    rng = np.random.default_rng(2)
    exact = (rng.integers(-128, 128, 500) * 2.0**-3).astype(np.float32)
    image = np.empty(500 * (4 if dtype == "float32" else 2), np.uint8)
    put_floats(exact.copy(), dtype, image)
    assert (as_floats(image, dtype) == exact).all()


def test_bfloat16_is_rounded_to_the_nearest_and_then_to_even() -> None:
    last = 2.0**-7
    given = np.array([1 + last / 2, 1 + 3 * last / 2, 1 + last * 0.6], np.float32)
    image = np.empty(6, np.uint8)
    put_floats(given, "bfloat16", image)
    assert as_floats(image, "bfloat16").tolist() == [1, 1 + 2 * last, 1 + last]
