"""The codec ``zstd-planes``, which compresses byte planes without loss.

Floating-point KV hardly repeats, so a general compressor finds nothing in it. But the
exponents within a block are close together, and account for nearly everything that can
be saved without loss (ZipNN, https://arxiv.org/abs/2411.05239). So the codec groups the
exponent bytes. In bfloat16 and float32 a sign bit precedes eight bits of exponent;
after rotating elements left by one bit, the top byte is exactly the exponent. A plane
that does not shrink is stored unchanged.

The payload is one length per plane (32 bits, little-endian, highest plane first), then
the planes. A length equal to the element count means that the plane is stored
unchanged.

It runs on threads: NumPy and zstd release the interpreter's lock as they work.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvwire.errors import IntegrityError
from kvwire.extras import needed_by
from kvwire.kv.floats import Bytes
from kvwire_store.codecs.form import ImageForm

NAME: Final = "zstd-planes"
NUMBER: Final = 1
"""Its number in stored entries, which never changes."""

_LENGTH: Final = np.dtype("<u4")
# Types whose exponent would be split over two bytes because of the sign bit.
_TURNED: Final[dict[str, tuple[np.dtype[Any], int]]] = {
    "bfloat16": (np.dtype(np.uint16), 15),
    "float32": (np.dtype(np.uint32), 31),
}


def require() -> None:
    """Import the library.

    Raises:
        ModuleNotFoundError: It is missing; the message names it.
    """
    _zstd()


def encode(image: Bytes, form: ImageForm, into: Bytes) -> int:
    """Encode an image.

    Returns:
        The number of bytes written to ``into``; 0 if they do not fit there, and the
        caller should keep the image as it is.
    """
    rows = _turned(image, form).reshape(-1, form.item_bytes)
    lengths = np.zeros(form.item_bytes, _LENGTH)
    at = lengths.nbytes
    for number, column in enumerate(rows.T[::-1]):
        plane = np.ascontiguousarray(column)
        packed = np.frombuffer(_packed(plane), np.uint8)
        stored = packed if packed.size < plane.size else plane
        if at + stored.size > into.size:
            return 0
        into[at : at + stored.size] = stored
        lengths[number] = stored.size
        at += stored.size
    into[: lengths.nbytes] = lengths.view(np.uint8)
    return at


def decode(payload: Bytes, form: ImageForm, into: Bytes) -> None:
    """Decode a payload into an image.

    The image's length follows from the form and never from the payload, and nothing
    larger is allocated.

    Raises:
        IntegrityError: The payload is none for this form.
        ModuleNotFoundError: The library is missing.
    """
    planes = form.item_bytes
    size = form.elements
    head = planes * _LENGTH.itemsize
    if payload.size < head:
        raise IntegrityError(
            f"the payload has {payload.size} bytes, and its lengths alone need {head}"
        )
    lengths = payload[:head].view(_LENGTH).astype(np.int64)
    if int(lengths.sum()) != payload.size - head or (lengths > size).any():
        raise IntegrityError(
            f"planes of {lengths.tolist()} bytes do not fit {payload.size - head} "
            f"bytes, or exceed {size} each"
        )
    rows = into.reshape(-1, planes)
    at = head
    for length, column in zip(lengths.tolist(), rows.T[::-1], strict=True):
        stored = payload[at : at + length]
        column[:] = stored if length == size else _unpacked(stored, size)
        at += length
    _turn_back(into, form)


def _turned(image: Bytes, form: ImageForm) -> Bytes:
    """Return the image, with the elements of some types rotated left by one bit."""
    if form.dtype not in _TURNED:
        return image
    word, high = _TURNED[form.dtype]
    words = image.view(word)
    turned = words << word.type(1)
    turned |= words >> word.type(high)
    as_bytes: Bytes = turned.view(np.uint8)
    return as_bytes


def _turn_back(image: Bytes, form: ImageForm) -> None:
    if form.dtype in _TURNED:
        word, high = _TURNED[form.dtype]
        words = image.view(word)
        sign = words << word.type(high)
        words >>= word.type(1)
        words |= sign


def _zstd() -> Any:
    with needed_by(f"codec {NAME}", extra="codecs", distribution="kvwire-store"):
        import zstandard  # noqa: PLC0415 - an extra
    return zstandard


def _packed(plane: Bytes) -> bytes:
    # Level 1 codes exponents by their frequency. Higher levels look for repetitions,
    # find none, and only take longer.
    packed: bytes = _zstd().ZstdCompressor(level=1).compress(plane)
    return packed


def _unpacked(stored: Bytes, size: int) -> Bytes:
    """Decompress a plane of exactly ``size`` bytes; allocates no more than that."""
    zstd = _zstd()
    try:
        # The library allocates as much as the frame claims, so check the claim first.
        claimed = zstd.frame_content_size(stored)
        if claimed != size:
            raise IntegrityError(
                f"a zstd frame claims {claimed} bytes; {size} were expected"
            )
        plane = zstd.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstd.ZstdError as exc:
        raise IntegrityError(f"zstd: {exc}") from None
    if len(plane) != size:
        raise IntegrityError(f"a plane has {len(plane)} bytes; {size} were expected")
    return np.frombuffer(plane, np.uint8)
