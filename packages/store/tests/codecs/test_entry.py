"""Entries: exact for any form, refused when anything of them is wrong."""

from __future__ import annotations

import re
import sys

import lz4.block
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import IntegrityError, UsageError
from kvwire.kv.floats import Bytes
from kvwire_store.codecs.base import BlockCodec, ImageForm
from kvwire_store.codecs.entry import HEAD_BYTES, decode_entry, encode_entry
from kvwire_store.codecs.planes import PlanesCodec
from kvwire_store.codecs.registry import CODECS, codec_named
from packages.store.tests.codecs.images import DTYPES, ORDERS, form, image
from tests.support.depth import examples

every = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)


def encoded(codec: BlockCodec, given_: Bytes, of: ImageForm) -> Bytes:
    room = np.empty(of.nbytes, np.uint8)
    return room[: encode_entry(codec, given_, of, room)]


def decoded(entry: Bytes, of: ImageForm) -> Bytes:
    into = np.full(of.nbytes, 0xEE, np.uint8)
    decode_entry(entry, of, into)
    return into


@settings(max_examples=examples(150))
@given(
    codec=st.sampled_from([*CODECS.values()]),
    dtype=st.sampled_from(DTYPES),
    order=st.integers(0, len(ORDERS) - 1),
    components=st.integers(1, 2),
    head_dim=st.integers(1, 40),
    seed=st.integers(0, 1000),
    bits=st.integers(1, 8),
)
def test_nothing_is_lost(
    codec: BlockCodec,
    dtype: str,
    order: int,
    components: int,
    head_dim: int,
    seed: int,
    bits: int,
) -> None:
    of = form(dtype, order, components, head_dim)
    random = np.random.default_rng(seed).integers(0, 2**bits, of.nbytes, np.uint8)
    for given_ in (image(of, seed), random, np.zeros(of.nbytes, np.uint8)):
        entry = encoded(codec, given_, of)
        if entry.size:
            assert entry.size < of.nbytes
            padded = np.concatenate((entry, np.zeros(17, np.uint8)))
            assert (decoded(padded, of) == given_).all()


@every
def test_damage_at_every_byte_is_refused(codec: BlockCodec) -> None:
    of = form(head_dim=16)
    given_ = image(of)
    entry = encoded(codec, given_, of)
    whole = decoded(entry, of)
    for at in range(entry.size):
        bad = entry.copy()
        bad[at] ^= 1 << at % 8
        try:
            got = decoded(bad, of)
        except IntegrityError:
            continue
        # A compressor has bits that mean nothing; what comes out is exact even so.
        assert at > HEAD_BYTES
        assert (got == whole).all()
    for size in (0, HEAD_BYTES - 1, HEAD_BYTES, entry.size - 1):
        with pytest.raises(IntegrityError):
            decoded(entry[:size], of)


@every
def test_an_entry_is_decoded_only_into_what_it_is_of(codec: BlockCodec) -> None:
    entry = encoded(codec, image(form()), form())
    for other in (form("float16"), form(order=3)):
        with pytest.raises(IntegrityError, match="in another form"):
            decoded(entry, other)
    with pytest.raises(IntegrityError, match="4096 bytes, and 8192 were expected"):
        decoded(entry, form(head_dim=64))


def test_a_codec_and_an_entry_of_a_later_version_are_refused_by_name() -> None:
    entry = encoded(codec_named("zstd-planes"), image(form()), form())
    entry[4] = 77
    with pytest.raises(
        IntegrityError, match="codec 77, which this version does not know"
    ):
        decoded(entry, form())
    entry[3] = 2
    said = re.escape(
        "begins with b'KVE\\x02'; this version of kvwire reads b'KVE\\x01'"
    )
    with pytest.raises(IntegrityError, match=said):
        decoded(entry, form())


@every
def test_an_image_too_small_for_a_head_is_kept(codec: BlockCodec) -> None:
    of = form("int8", components=1, head_dim=1)
    assert of.nbytes == 32
    assert not encoded(codec, np.zeros(32, np.uint8), of).size


def test_names_and_numbers_are_for_ever() -> None:
    known = {codec.name: codec.number for codec in CODECS.values()}
    assert known == {"zstd-planes": 1, "lz4-planes": 2}
    with pytest.raises(UsageError, match="did you mean 'zstd-planes'"):
        codec_named("zstd-plane")


# --- byte planes: what they save, and frames that are not what they claim -------------


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
