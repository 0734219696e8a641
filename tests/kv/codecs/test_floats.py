"""Element types in NumPy: every number of float8, the rounding of bfloat16."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.kv.codecs.floats import E4M3_MAX, as_floats, of_e4m3, put_floats, to_e4m3


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
