"""Numbers as codes of 8 or 4 bits, in NumPy: a scale, and what is left after it.

``fp8`` has the numbers of float8_e4m3fn, ``int8`` those from -127 to 127. Codes of 4
bits are two in a byte, the first one in its lower half.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvwire.kv.codecs.base import Bytes
from kvwire.kv.codecs.floats import E4M3_MAX, Floats, of_e4m3, to_e4m3

LARGEST: Final = {"fp8": E4M3_MAX, "int8": 127.0}
"""The largest number of each code of 8 bits."""
INT4_MAX: Final = 15
SCALE_MIN: Final = np.float32(2.0**-100)
"""Smaller ones would make a division overflow; what they lose is nothing."""


def scale_of(values: Floats, over: int | tuple[int, ...], code: str) -> Floats:
    """Return what the largest magnitude over some axes is divided by to fit a code."""
    peak = np.maximum(values.max(over, keepdims=True), -values.min(over, keepdims=True))
    scale: Floats = np.maximum(peak / np.float32(LARGEST[code]), SCALE_MIN)
    return scale


def to_codes(values: Floats, scale: Floats, code: str) -> Bytes:
    """Return the codes of finite values that were divided by a scale; uses them up."""
    largest = np.float32(LARGEST[code])
    values /= scale
    np.clip(values, -largest, largest, out=values)
    if code == "fp8":
        return to_e4m3(values)
    return np.rint(values, out=values).astype(np.int8).view(np.uint8)


def of_codes(codes: Bytes, code: str) -> Floats:
    """Return the values of codes, before their scale."""
    if code == "fp8":
        return of_e4m3(codes)
    return np.ascontiguousarray(codes).view(np.int8).astype(np.float32)


def pack_nibbles(codes: Bytes) -> Bytes:
    """Return codes of 4 bits two in a byte, along the last axis."""
    packed = codes[..., ::2].copy()
    packed[..., : codes.shape[-1] // 2] |= codes[..., 1::2] << np.uint8(4)
    return packed


def unpack_nibbles(packed: Bytes, count: int) -> Floats:
    """Return the first ``count`` codes of 4 bits along the last axis, as numbers."""
    values = np.empty((*packed.shape[:-1], count), np.float32)
    values[..., ::2] = packed & np.uint8(15)
    values[..., 1::2] = packed[..., : count // 2] >> np.uint8(4)
    return values
