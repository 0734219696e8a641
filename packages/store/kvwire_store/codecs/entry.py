"""Entries: images as a tier stores them, encoded, after a head that describes them.

An entry is a head of 40 bytes, which has the codec, form, length and checksum, and then
the codec's payload. It is always shorter than the image: an image that does not shrink
is stored as it is, without a head. So the length distinguishes an entry from an image,
and images that were stored before codecs existed stay valid.

The checksum covers the head and the decoded image, so decoding is known to have
restored it. Nothing is decoded unless the head fits the memory to fill.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import xxhash

from kvwire.errors import IntegrityError
from kvwire.kv.floats import Bytes
from kvwire_store.codecs import planes
from kvwire_store.codecs.form import FORM_BYTES, ImageForm

HEAD_BYTES: Final = 40

_MAGIC: Final = b"KVE\1"
_HEAD: Final = struct.Struct(f"<4sB3xQQ{FORM_BYTES}s")
_SUM: Final = struct.Struct("<Q")

assert _HEAD.size + _SUM.size == HEAD_BYTES


def encode_entry(image: Bytes, form: ImageForm, into: Bytes) -> int:
    """Encode an image as an entry.

    Returns:
        The length of the entry, always less than the image; 0 if there is no entry and
        the caller should keep the image.
    """
    assert image.size == form.nbytes == into.size
    payload = into[HEAD_BYTES : form.nbytes - 1]
    nbytes = planes.encode(image, form, payload) if payload.size else 0
    if not nbytes:
        return 0
    head = _HEAD.pack(_MAGIC, planes.NUMBER, form.nbytes, nbytes, form.digest)
    into[:HEAD_BYTES] = np.frombuffer(head + _sum(head, image), np.uint8)
    return HEAD_BYTES + nbytes


def decode_entry(entry: Bytes, form: ImageForm, into: Bytes) -> None:
    """Decode an entry into an image; bytes after the entry are ignored.

    Args:
        entry: The entry's bytes, with or without padding.
        form: The form of the image.
        into: The memory to fill.

    Raises:
        IntegrityError: The entry is damaged, has another form or length, or its codec
            is unknown. The memory then has arbitrary content.
        ModuleNotFoundError: The codec's library is missing.
    """
    if entry.size < HEAD_BYTES:
        raise IntegrityError(
            f"the entry has {entry.size} bytes, fewer than its header needs"
        )
    head = entry[: _HEAD.size].tobytes()
    magic, number, image_bytes, nbytes, digest = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise IntegrityError(
            f"the entry begins with {magic!r}; this version of kvwire reads {_MAGIC!r}"
        )
    if number != planes.NUMBER:
        raise IntegrityError(
            f"the entry uses codec {number}, which this version does not know"
        )
    if image_bytes != into.size or digest != form.digest:
        raise IntegrityError(
            f"the entry's image has {image_bytes} bytes, and {into.size} were expected"
            + ("" if image_bytes != into.size else " in another form")
        )
    if nbytes > entry.size - HEAD_BYTES:
        raise IntegrityError(
            f"the entry has {entry.size} bytes, but its header says {nbytes}"
        )
    payload = entry[HEAD_BYTES : HEAD_BYTES + nbytes]
    total = entry[_HEAD.size : HEAD_BYTES].tobytes()
    planes.decode(payload, form, into)
    if total != _sum(head, into):
        raise IntegrityError(
            f"the checksum of the image that {planes.NAME} decoded does not match"
        )


def _sum(head: bytes, checked: Bytes) -> bytes:
    seed = xxhash.xxh3_64_intdigest(head)
    return _SUM.pack(xxhash.xxh3_64_intdigest(checked.data, seed=seed))
