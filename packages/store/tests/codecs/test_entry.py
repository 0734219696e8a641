"""Entries: exact for any form, refused when anything of them is wrong."""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import IntegrityError
from kvwire.kv.floats import FLOATS, Bytes, put_floats
from kvwire.kv.spec import DTYPE_BYTES, KVSpec
from kvwire_store.codecs import planes
from kvwire_store.codecs.entry import HEAD_BYTES, decode_entry, encode_entry
from kvwire_store.codecs.form import ImageForm, form_of
from tests.support.depth import examples

ORDERS = tuple(itertools.permutations(("layer", "kv", "token", "head", "dim")))


def form(
    dtype: Any = "bfloat16", order: int = 0, components: int = 2, head_dim: int = 32
) -> ImageForm:
    """A form of 2 layers, 2 heads and 8 tokens."""
    spec = KVSpec(
        layers=2,
        kv_heads=2,
        head_dim=head_dim,
        block_tokens=8,
        dtype=dtype,
        components=components,
    )
    return form_of(spec, ORDERS[order])


def image(of: ImageForm, seed: int = 0) -> Bytes:
    """Normal numbers, and 20 more in every eighth channel, for all tokens."""
    rng = np.random.default_rng(seed)
    if of.dtype not in FLOATS:
        return rng.integers(0, 256, of.nbytes, np.uint8)
    values = rng.normal(size=of.shape).astype(np.float32)
    np.moveaxis(values, of.axes.index("dim"), 0)[::8] += np.float32(20)
    made = np.empty(of.nbytes, np.uint8)
    put_floats(values, of.dtype, made)
    return made


def encoded(given_: Bytes, of: ImageForm) -> Bytes:
    room = np.empty(of.nbytes, np.uint8)
    return room[: encode_entry(given_, of, room)]


def decoded(entry: Bytes, of: ImageForm) -> Bytes:
    into = np.full(of.nbytes, 0xEE, np.uint8)
    decode_entry(entry, of, into)
    return into


@settings(max_examples=examples(150))
@given(
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    order=st.integers(0, len(ORDERS) - 1),
    components=st.integers(1, 2),
    head_dim=st.integers(1, 40),
    seed=st.integers(0, 1000),
    bits=st.integers(1, 8),
)
def test_nothing_is_lost(
    dtype: str, order: int, components: int, head_dim: int, seed: int, bits: int
) -> None:
    of = form(dtype, order, components, head_dim)
    random = np.random.default_rng(seed).integers(0, 2**bits, of.nbytes, np.uint8)
    for given_ in (image(of, seed), random, np.zeros(of.nbytes, np.uint8)):
        entry = encoded(given_, of)
        if entry.size:
            assert entry.size < of.nbytes
            padded = np.concatenate((entry, np.zeros(17, np.uint8)))
            assert (decoded(padded, of) == given_).all()


def test_damage_at_every_byte_is_refused() -> None:
    of = form(head_dim=16)
    entry = encoded(image(of), of)
    whole = decoded(entry, of)
    for at in range(entry.size):
        bad = entry.copy()
        bad[at] ^= 1 << at % 8
        try:
            got = decoded(bad, of)
        except IntegrityError:
            continue
        # zstd has bits that mean nothing; what comes out is exact even so.
        assert at > HEAD_BYTES
        assert (got == whole).all()
    for size in (0, HEAD_BYTES - 1, HEAD_BYTES, entry.size - 1):
        with pytest.raises(IntegrityError):
            decoded(entry[:size], of)


def test_an_entry_is_decoded_only_into_what_it_is_of() -> None:
    entry = encoded(image(form()), form())
    for other in (form("float16"), form(order=3)):
        with pytest.raises(IntegrityError, match="in another form"):
            decoded(entry, other)
    with pytest.raises(IntegrityError, match="4096 bytes, and 8192 were expected"):
        decoded(entry, form(head_dim=64))


def test_a_codec_and_an_entry_of_a_later_version_are_refused_by_name() -> None:
    entry = encoded(image(form()), form())
    assert (planes.NAME, planes.NUMBER, entry[4]) == ("zstd-planes", 1, 1), "for ever"
    entry[4] = 77
    with pytest.raises(IntegrityError, match="codec 77, which this version does not"):
        decoded(entry, form())
    entry[3] = 2
    said = "begins with b'KVE\\x02'; this version of kvwire reads b'KVE\\x01'"
    with pytest.raises(IntegrityError, match=re.escape(said)):
        decoded(entry, form())


def test_what_does_not_shrink_or_is_too_small_for_a_head_is_left_alone() -> None:
    small = form("int8", components=1, head_dim=1)
    assert not encoded(np.zeros(32, np.uint8), small).size
    of = form("uint8")
    guard = np.full(of.nbytes, 7, np.uint8)
    assert planes.encode(image(of), of, guard[: of.nbytes - 41]) == 0
    assert (guard[of.nbytes - 41 :] == 7).all()


@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 0.75), ("float16", 0.95), ("float32", 0.9)]
)
def test_exponents_are_stored_as_less(dtype: str, most: float) -> None:
    of = form(dtype, head_dim=256)
    nbytes = encoded(image(of), of).size
    assert 0 < nbytes < most * of.nbytes


# --- frames that are not what they claim ----------------------------------------------


def payload(of_planes: list[bytes]) -> Bytes:
    lengths = np.array([len(plane) for plane in of_planes], "<u4")
    return np.frombuffer(lengths.tobytes() + b"".join(of_planes), np.uint8)


OF = form()
LESS = bytes(OF.elements - 1)
MORE = bytes(2**24)
BAD = [
    (np.zeros(3, np.uint8), "its lengths alone need 8"),
    (payload([b"x", b"y"])[:9], "planes of"),
    (payload([bytes(OF.elements + 1), b""]), "planes of"),
    (payload([b"junk", b"junk"]), "zstd"),
    (payload([zstandard.compress(MORE)] * 2), "a zstd frame claims 16777216 bytes"),
    (payload([zstandard.compress(LESS)] * 2), f"a zstd frame claims {len(LESS)}"),
    (payload([zstandard.compress(LESS + b"1") + b"1"] * 2), "zstd: "),
    (payload([zstandard.compress(LESS + b"1")[:-1]] * 2), "zstd: "),
]


@pytest.mark.parametrize(("stored", "why"), BAD)
def test_a_frame_that_claims_something_else_is_refused(stored: Bytes, why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        planes.decode(stored, OF, np.empty(OF.nbytes, np.uint8))


def test_a_missing_library_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planes.require()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ModuleNotFoundError, match="codecs"):
        planes.require()
