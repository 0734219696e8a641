"""Row codecs, for transfers: each head of each token is encoded to a fixed size.

A transfer moves any part of a cache, in any order, to a cache that may have other block
sizes or shards. So its codec works on *rows*, not blocks: a row is the elements of one
head of one token. It is encoded to the same number of bytes whatever its values are,
with its own scales after the codes.

=========  ============================  ====================  ================
codec      codes                         then                  128 x bfloat16
=========  ============================  ====================  ================
``fp8``    float8_e4m3fn                 largest / 448         132 of 256 bytes
``int8``   -127 to 127                   largest / 127         132 of 256 bytes
``int4``   0 to 15, two in a byte        least, step           72 of 256 bytes
=========  ============================  ====================  ================

The numbers after the codes are float32. A row that contains a non-finite number is
decoded to NaNs; other rows are not affected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from kvwire.errors import UsageError, nearest
from kvwire.kv.floats import E4M3_MAX, Bytes, Floats, of_e4m3, to_e4m3

TransferCodec: TypeAlias = Literal["fp8", "int8", "int4"]
"""The possible values of a transfer's ``codec=``."""

# The largest number of each code of 8 bits, and the largest code of 4 bits.
_LARGEST: Final = {"fp8": E4M3_MAX, "int8": 127.0}
_INT4_MAX: Final = 15
# The smallest scale: dividing by a smaller one could overflow.
_SCALE_MIN: Final = np.float32(2.0**-100)


@dataclass(frozen=True, slots=True)
class RowCodec:
    """Encodes rows of numbers; NumPy releases the interpreter's lock while it works."""

    name: TransferCodec

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of an encoded row with ``head_dim`` elements."""
        if self.name == "int4":
            return -(-head_dim // 2) + 8
        return head_dim + 4

    def encode(self, rows: Floats, into: Bytes) -> None:
        """Encode rows, (n, head_dim), into (n, row_bytes); overwrites ``rows``."""
        with np.errstate(all="ignore"):
            if self.name == "int4":
                codes, numbers = _nibbles(rows)
            else:
                numbers = _scale_of(rows, self.name)
                _mark_unfinite(rows, numbers)
                codes = _to_codes(rows, numbers, self.name)
        into[:, : codes.shape[1]] = codes
        into[:, codes.shape[1] :] = numbers.view(np.uint8)

    def decode(self, encoded: Bytes, head_dim: int) -> Floats:
        """Decode rows to numbers, shape (n, head_dim)."""
        width = self.row_bytes(head_dim) - (8 if self.name == "int4" else 4)
        codes = encoded[:, :width]
        numbers = np.ascontiguousarray(encoded[:, width:]).view(np.float32)
        with np.errstate(all="ignore"):
            if self.name == "int4":
                rows = _unpack_nibbles(codes, head_dim)
                rows *= numbers[:, 1:]
                rows += numbers[:, :1]
            else:
                rows = _of_codes(codes, self.name)
                rows *= numbers
        return rows


ROW_CODECS: Final[Mapping[str, RowCodec]] = {
    "fp8": RowCodec("fp8"),
    "int8": RowCodec("int8"),
    "int4": RowCodec("int4"),
}


def row_codec(name: object) -> RowCodec:
    """Return the row codec with a name that a user wrote.

    Raises:
        UsageError: No row codec has this name; the message suggests one.
    """
    found = ROW_CODECS.get(name) if isinstance(name, str) else None
    if found is None:
        raise UsageError(
            f"codec={name!r}: a transfer takes only codecs with a known output size "
            f"({', '.join(ROW_CODECS)}); {nearest(str(name), ROW_CODECS)}"
        )
    return found


def _nibbles(rows: Floats) -> tuple[Bytes, Floats]:
    """Return the packed codes of rows, and each row's smallest value and step."""
    least = rows.min(1, keepdims=True)
    most = rows.max(1, keepdims=True)
    step = np.maximum((most - least) / np.float32(_INT4_MAX), _SCALE_MIN)
    _mark_unfinite(rows, step)
    rows -= least
    rows /= step
    np.clip(np.rint(rows, out=rows), 0, _INT4_MAX, out=rows)
    codes = np.nan_to_num(rows, copy=False).astype(np.uint8)
    return _pack_nibbles(codes), np.concatenate((least, step), axis=1)


def _mark_unfinite(rows: Floats, scale: Floats) -> None:
    """Give rows whose scale is not finite codes that decode to NaNs."""
    wrong = ~np.isfinite(scale[:, 0])
    if wrong.any():
        scale[wrong] = np.nan
        rows[wrong] = 0


def _scale_of(rows: Floats, code: str) -> Floats:
    """Return the divisor for each row that makes its numbers fit a code."""
    peak = np.maximum(rows.max(1, keepdims=True), -rows.min(1, keepdims=True))
    scale: Floats = np.maximum(peak / np.float32(_LARGEST[code]), _SCALE_MIN)
    return scale


def _to_codes(values: Floats, scale: Floats, code: str) -> Bytes:
    """Return the codes of ``values / scale``; overwrites the (finite) ``values``."""
    largest = np.float32(_LARGEST[code])
    values /= scale
    np.clip(values, -largest, largest, out=values)
    if code == "fp8":
        return to_e4m3(values)
    return np.rint(values, out=values).astype(np.int8).view(np.uint8)


def _of_codes(codes: Bytes, code: str) -> Floats:
    """Return codes as numbers, not yet multiplied by their scale."""
    if code == "fp8":
        return of_e4m3(codes)
    return np.ascontiguousarray(codes).view(np.int8).astype(np.float32)


def _pack_nibbles(codes: Bytes) -> Bytes:
    """Pack pairs of 4-bit codes into bytes, the first in the lower half."""
    packed = codes[..., ::2].copy()
    packed[..., : codes.shape[-1] // 2] |= codes[..., 1::2] << np.uint8(4)
    return packed


def _unpack_nibbles(packed: Bytes, count: int) -> Floats:
    """Return the first ``count`` 4-bit codes along the last axis, as float32."""
    values = np.empty((*packed.shape[:-1], count), np.float32)
    values[..., ::2] = packed & np.uint8(15)
    values[..., 1::2] = packed[..., : count // 2] >> np.uint8(4)
    return values
