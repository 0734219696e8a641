"""Byte planes: what they save, and frames that are not what they claim."""

from __future__ import annotations

import sys

import lz4.block
import numpy as np
import pytest
import zstandard

from kvwire.errors import IntegrityError
from kvwire.kv.codecs.base import BlockCodec, Bytes
from kvwire.kv.codecs.planes import PlanesCodec
from tests.kv.codecs.images import form, image

ZSTD = PlanesCodec("zstd-planes", 1, "zstd")
LZ4 = PlanesCodec("lz4-planes", 2, "lz4")
both = pytest.mark.parametrize("codec", [ZSTD, LZ4], ids=lambda codec: codec.name)


@pytest.mark.parametrize(
    ("codec", "dtype", "most"),
    [
        (ZSTD, "bfloat16", 0.75),
        (ZSTD, "float16", 0.95),
        (ZSTD, "float32", 0.9),
        (LZ4, "bfloat16", 0.95),
    ],
)
def test_exponents_are_stored_as_less(
    codec: BlockCodec, dtype: str, most: float
) -> None:
    of = form(dtype, head_dim=256)
    given = image(of)
    into = np.empty(of.nbytes, np.uint8)
    nbytes = codec.encode(given, of, into)
    assert 0 < nbytes < most * of.nbytes
    again = np.empty(of.nbytes, np.uint8)
    codec.decode(into[:nbytes], of, again)
    assert (again == given).all()


@both
def test_what_does_not_shrink_is_left_alone(codec: BlockCodec) -> None:
    of = form("uint8")
    guard = np.full(of.nbytes, 7, np.uint8)
    assert codec.encode(image(of), of, guard[: of.nbytes - 41]) == 0
    assert (guard[of.nbytes - 41 :] == 7).all()


def payload(of_planes: list[bytes]) -> Bytes:
    lengths = np.array([len(plane) for plane in of_planes], "<u4")
    return np.frombuffer(lengths.tobytes() + b"".join(of_planes), np.uint8)


OF = form()
LESS = bytes(OF.elements - 1)
MORE = bytes(2**24)
BAD = [
    (ZSTD, np.zeros(3, np.uint8), "its lengths alone need 8"),
    (ZSTD, payload([b"x", b"y"])[:9], "planes of"),
    (ZSTD, payload([bytes(OF.elements + 1), b""]), "planes of"),
    (ZSTD, payload([b"junk", b"junk"]), "zstd"),
    (
        ZSTD,
        payload([zstandard.compress(MORE)] * 2),
        "a zstd frame claims 16777216 bytes",
    ),
    (ZSTD, payload([zstandard.compress(LESS)] * 2), f"a zstd frame claims {len(LESS)}"),
    (ZSTD, payload([zstandard.compress(LESS + b"1") + b"1"] * 2), "zstd: "),
    (ZSTD, payload([zstandard.compress(LESS + b"1")[:-1]] * 2), "zstd: "),
    (LZ4, payload([b"junk", b"junk"]), "lz4: "),
    (LZ4, payload([lz4.block.compress(LESS, store_size=False)] * 2), "a plane has"),
    (LZ4, payload([lz4.block.compress(MORE, store_size=False)[:500]] * 2), "lz4: "),
]


@pytest.mark.parametrize(("codec", "stored", "why"), BAD)
def test_a_frame_that_claims_something_else_is_refused(
    codec: BlockCodec, stored: Bytes, why: str
) -> None:
    with pytest.raises(IntegrityError, match=why):
        codec.decode(stored, OF, np.empty(OF.nbytes, np.uint8))


@both
def test_a_missing_library_says_what_installs_it(
    codec: BlockCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec.require()
    for name in ("zstandard", "lz4", "lz4.block"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="codecs"):
        codec.require()
