"""Conversion between float32 and other floats, including NumPy's missing bfloat16."""

from __future__ import annotations

from functools import cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

FLOATS: Final = frozenset({"bfloat16", "float16", "float32"})
"""The element types that can be converted to float32."""
E4M3_MAX: Final = 448.0
"""The largest number of float8_e4m3fn."""


def as_floats(image: Bytes, dtype: str) -> Floats:
    """Return an image's elements as a new float32 array."""
    if dtype == "bfloat16":
        words = image.view(np.uint16).astype(np.uint32)
        words <<= np.uint32(16)
        return words.view(np.float32)
    source = np.float16 if dtype == "float16" else np.float32
    return image.view(source).astype(np.float32)


def put_floats(values: Floats, dtype: str, into: Bytes) -> None:
    """Round values to an element type and write them to an image; ties go to even."""
    if dtype == "bfloat16":
        words = values.reshape(-1).view(np.uint32)
        # Add half of the last kept bit, or a little less if that bit is 0, so that ties
        # go to even.
        words += ((words >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        words >>= np.uint32(16)
        into.view(np.uint16)[:] = words
        return
    target = np.float16 if dtype == "float16" else np.float32
    with np.errstate(over="ignore"):
        into.view(target)[:] = values.reshape(-1)


def to_e4m3(values: Floats) -> Bytes:
    """Round finite values of magnitude :data:`E4M3_MAX` or less to float8_e4m3fn."""
    found: Bytes = _e4m3_of_halves()[values.astype(np.float16).view(np.uint16)]
    return found


def of_e4m3(codes: Bytes) -> Floats:
    """Return float8_e4m3fn codes as float32."""
    values: Floats = _e4m3_values()[codes]
    return values


@cache
def _e4m3_values() -> Floats:
    """Compute all 256 values: a sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    codes = np.arange(256)
    exponent = codes >> 3 & 15
    mantissa = codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent > 0, normal, mantissa / 8 * 2.0**-6)
    values[(codes & 127) == 127] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


@cache
def _e4m3_of_halves() -> Bytes:
    """Compute the nearest float8_e4m3fn code of every float16; ties go to even."""
    halves = np.arange(2**15, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves[np.isnan(halves)] = E4M3_MAX
    values = _e4m3_values()[:127]
    middles = (values[1:] + values[:-1]) / 2
    codes = np.searchsorted(middles, halves)
    tied = halves == middles[np.minimum(codes, middles.size - 1)]
    codes[tied] += codes[tied] & 1
    return np.concatenate((codes, codes | 128)).astype(np.uint8)
