"""An encoded image as it is stored: which codec, of which form, how long, and a sum.

An entry is a head of 40 bytes and the codec's payload. It is always shorter than the
image: what does not shrink is kept as the image itself, without a head. So a length
says which of the two lies there, and images from before there were codecs stay what
they are.

The checksum of a codec without loss is over the image, so what comes out is what went
in. That of a lossy one is over the payload. Both begin with the head. Nothing is
decoded before the head agrees with the memory that is to be filled.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import xxhash

from kvwire.errors import IntegrityError
from kvwire.kv.codecs.base import FORM_BYTES, BlockCodec, Bytes, ImageForm
from kvwire.kv.codecs.registry import CODECS

HEAD_BYTES: Final = 40

_MAGIC: Final = b"KVE\1"
_HEAD: Final = struct.Struct(f"<4sB3xQQ{FORM_BYTES}s")
_SUM: Final = struct.Struct("<Q")

assert _HEAD.size + _SUM.size == HEAD_BYTES


def encode_entry(codec: BlockCodec, image: Bytes, form: ImageForm, into: Bytes) -> int:
    """Encode an image as an entry.

    Returns:
        The bytes of the entry, less than those of the image; 0 if there is none, and
        the image is to be kept.
    """
    assert image.size == form.nbytes == into.size
    payload = into[HEAD_BYTES : form.nbytes - 1]
    nbytes = codec.encode(image, form, payload) if payload.size else 0
    if not nbytes:
        return 0
    head = _HEAD.pack(_MAGIC, codec.number, form.nbytes, nbytes, form.digest)
    checked = payload[:nbytes] if codec.lossy else image
    into[:HEAD_BYTES] = np.frombuffer(head + _sum(head, checked), np.uint8)
    return HEAD_BYTES + nbytes


def decode_entry(entry: Bytes, form: ImageForm, into: Bytes, lossy: str = "") -> None:
    """Fill an image from an entry; there may be padding behind it.

    Raises:
        IntegrityError: It is damaged, of another form, claims another length, or is
            made by a codec that is not known or not wanted. The image may hold
            anything.
        ModuleNotFoundError: The codec's library is missing.
    """
    if entry.size < HEAD_BYTES:
        raise IntegrityError(f"an entry of {entry.size} bytes; its head has more")
    head = entry[: _HEAD.size].tobytes()
    magic, number, image_bytes, nbytes, digest = _HEAD.unpack(head)
    if magic != _MAGIC or number not in _BY_NUMBER:
        raise IntegrityError(f"an entry of codec {number}, which is not known here")
    codec = _BY_NUMBER[number]
    if codec.lossy and codec.name != lossy:
        raise IntegrityError(f"an entry of {codec.name}, which nobody has asked for")
    if image_bytes != into.size or digest != form.digest:
        raise IntegrityError(
            f"an entry of an image of {image_bytes} bytes for one of {into.size}"
            + ("" if image_bytes != into.size else " and another form")
        )
    if nbytes > entry.size - HEAD_BYTES:
        raise IntegrityError(f"an entry of {entry.size} bytes claims {nbytes} in it")
    payload = entry[HEAD_BYTES : HEAD_BYTES + nbytes]
    total = entry[_HEAD.size : HEAD_BYTES].tobytes()
    if codec.lossy and total != _sum(head, payload):
        raise IntegrityError(f"an entry of {codec.name} whose checksum is another")
    codec.decode(payload, form, into)
    if not codec.lossy and total != _sum(head, into):
        raise IntegrityError(f"{codec.name} gave an image whose checksum is another")


def _sum(head: bytes, checked: Bytes) -> bytes:
    seed = xxhash.xxh3_64_intdigest(head)
    return _SUM.pack(xxhash.xxh3_64_intdigest(checked.data, seed=seed))


_BY_NUMBER: Final = {codec.number: codec for codec in CODECS.values()}
