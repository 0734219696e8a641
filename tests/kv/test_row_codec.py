"""Codecs of rows: how much they lose, whatever is in a row, and that rows are apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvwire.errors import UsageError
from kvwire.kv.floats import Floats
from kvwire.kv.row_codec import ROW_CODECS, RowCodec, row_codec
from tests.support.depth import examples

CODECS = list(ROW_CODECS.values())
# Of the largest number of a row; of its range with int4.
LOSS = {"fp8": 1 / 16, "int8": 1 / 254, "int4": 1 / 30}


def there_and_back(codec: RowCodec, rows: Floats) -> Floats:
    encoded = np.full((len(rows), codec.row_bytes(rows.shape[1])), 0xAA, np.uint8)
    codec.encode(rows.copy(), encoded)
    return codec.decode(encoded, rows.shape[1])


@settings(max_examples=examples(150))
@given(
    codec=st.sampled_from(CODECS),
    head_dim=st.integers(1, 9),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_errors_are_bounded(
    codec: RowCodec, head_dim: int, scale: float, seed: int
) -> None:
    numbers = np.random.default_rng(seed).standard_normal((5, head_dim)) * scale
    rows = numbers.astype(np.float32)
    wide = np.abs(rows).max(1, keepdims=True)
    if codec.name == "int4":
        wide = np.ptp(rows, axis=1, keepdims=True)
    error = np.abs(there_and_back(codec, rows) - rows)
    assert (error <= wide * LOSS[codec.name] * 1.001 + np.abs(rows) * 2.0**-20).all()


@settings(max_examples=examples(150))
@given(
    codec=st.sampled_from(CODECS),
    bits=hnp.arrays(np.uint32, st.tuples(st.integers(1, 4), st.integers(1, 5))),
)
def test_any_bits_are_encoded_and_rows_are_apart(
    codec: RowCodec, bits: np.ndarray
) -> None:
    rows = bits.view(np.float32)
    together = there_and_back(codec, rows)
    alone = np.concatenate([there_and_back(codec, row[None]) for row in rows])
    np.testing.assert_array_equal(together, alone)
    unfinite = ~np.isfinite(rows).all(1)
    assert np.isnan(together[unfinite]).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_rows_of_one_number_come_back(codec: RowCodec) -> None:
    for number in (0.0, 1.0, -3.5):
        rows = np.full((2, 6), number, np.float32)
        np.testing.assert_allclose(there_and_back(codec, rows), rows, rtol=1e-6)


def test_a_name_that_no_transfer_has() -> None:
    with pytest.raises(UsageError, match=r"known output size .fp8, int8, int4.*'int8'"):
        row_codec("itn8")
    with pytest.raises(UsageError, match="codec=8"):
        row_codec(8)
