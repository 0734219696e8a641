"""Quantised numbers: codes of 8 or 4 bits after division by a scale, in NumPy.

An ``fp8`` code is a float8_e4m3fn number, an ``int8`` code an integer from -127 to 127.
Codes of 4 bits are packed in pairs, the first in the lower half of the byte.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvwire.kv.codecs.floats import E4M3_MAX, Bytes, Floats, of_e4m3, to_e4m3

LARGEST: Final = {"fp8": E4M3_MAX, "int8": 127.0}
"""The largest number of each 8-bit code."""
INT4_MAX: Final = 15
SCALE_MIN: Final = np.float32(2.0**-100)
"""The smallest scale: dividing by a smaller one could overflow."""


def scale_of(values: Floats, over: int | tuple[int, ...], code: str) -> Floats:
    """Return the divisor for each group that makes its values fit a code.

    A group is all elements along the axes ``over``.
    """
    peak = np.maximum(values.max(over, keepdims=True), -values.min(over, keepdims=True))
    scale: Floats = np.maximum(peak / np.float32(LARGEST[code]), SCALE_MIN)
    return scale


def to_codes(values: Floats, scale: Floats, code: str) -> Bytes:
    """Return the codes of ``values / scale``; overwrites the (finite) ``values``."""
    largest = np.float32(LARGEST[code])
    values /= scale
    np.clip(values, -largest, largest, out=values)
    if code == "fp8":
        return to_e4m3(values)
    return np.rint(values, out=values).astype(np.int8).view(np.uint8)


def of_codes(codes: Bytes, code: str) -> Floats:
    """Return codes as numbers, not yet multiplied by their scale."""
    if code == "fp8":
        return of_e4m3(codes)
    return np.ascontiguousarray(codes).view(np.int8).astype(np.float32)


def pack_nibbles(codes: Bytes) -> Bytes:
    """Pack pairs of 4-bit codes into bytes, along the last axis."""
    packed = codes[..., ::2].copy()
    packed[..., : codes.shape[-1] // 2] |= codes[..., 1::2] << np.uint8(4)
    return packed


def unpack_nibbles(packed: Bytes, count: int) -> Floats:
    """Return the first ``count`` 4-bit codes along the last axis, as float32."""
    values = np.empty((*packed.shape[:-1], count), np.float32)
    values[..., ::2] = packed & np.uint8(15)
    values[..., 1::2] = packed[..., : count // 2] >> np.uint8(4)
    return values
