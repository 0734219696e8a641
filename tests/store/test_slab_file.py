"""The file of a disk tier, byte by byte: what was written is read, and nothing else."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire import UsageError
from kvwire.limits import KIB, MIB
from kvwire.store.file import File, fragments_of
from kvwire.store.images import images_in
from kvwire.store.index import as_keys
from kvwire.store.slab_file import (
    ENTRY_BYTES,
    SERIAL_MAX,
    SUPERBLOCK_BYTES,
    Found,
    image_sums,
    make_entries,
    make_head,
    make_superblock,
    read_superblock,
    scan,
    slab_offset,
)
from kvwire.store.slabs import GRAIN_BYTES, Slabs, rounded
from kvwire.store.space import DIGEST_BYTES, ORDERS

SLAB = 64 * KIB
SLABS = 3

_OFFSETS = {
    "key": (0, "80s"),
    "key_bytes": (80, "<H"),
    "order": (82, "<B"),
    "used": (83, "<B"),
    "serial": (88, "<Q"),
    "nbytes": (96, "<Q"),
}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    with closing(File(tmp_path / "blocks", create=True)) as made:
        made.resize(SUPERBLOCK_BYTES + SLABS * SLAB)
        yield made


def slabs() -> Slabs:
    return Slabs(SLABS, SLAB, entry_bytes=ENTRY_BYTES)


def put(file: File, raw: bytes | np.ndarray[Any, Any], offset: int) -> None:
    array = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else raw
    file.write(fragments_of(array), offset)


def scanned(file: File) -> list[Found]:
    return list(scan(file, slabs()))


def entry(**fields: Any) -> bytes:
    """One entry of a slot of one grain, which is valid but for some fields."""
    keys, one = as_keys([bytes(range(48))]), np.ones(1, np.uint64)
    raw = make_entries(keys, np.zeros(1, np.uint8), GRAIN_BYTES, one, one).tobytes()
    for name, value in fields.items():
        offset, form = _OFFSETS[name]
        packed = struct.pack(form, value)
        raw = raw[:offset] + packed + raw[offset + len(packed) :]
    body = raw[:-8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


# --- what was written -----------------------------------------------------------------


@given(data=st.data())
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_entries_are_found_as_they_were_made(file: File, data: st.DataObject) -> None:
    """Of slabs of any size of slot, with any keys, in any of their slots."""
    for slab in range(SLABS):
        nbytes = data.draw(st.integers(1, SLAB // 2 - GRAIN_BYTES))
        room, number = slabs(), data.draw(st.integers(0, 2))
        count = min(number, room.capacity(nbytes))
        width = data.draw(st.integers(DIGEST_BYTES + 1, DIGEST_BYTES + 64))
        made = [bytes([slab, n, *range(2, width)]) for n in range(count)]
        # NumPy would drop zeros at the end of a text; a hash may end with them.
        keys = as_keys(key[:-1] + b"\0" for key in made)
        orders = np.array(
            data.draw(st.lists(st.integers(0, 119), min_size=count, max_size=count)),
            np.uint8,
        )
        numbers = st.lists(st.integers(0, 2**62), min_size=count, max_size=count)
        sums, serials = (np.array(data.draw(numbers), np.uint64) for _ in range(2))
        begin = slab_offset(slab, SLAB)
        put(file, bytes(SLAB), begin)
        put(file, make_head(rounded(nbytes)), begin)
        if count:
            entries = make_entries(keys, orders, nbytes, sums, serials)
            put(file, entries, begin + ENTRY_BYTES)
        found = {one.slab: one for one in scanned(file)}[slab]
        assert found.slot_bytes == rounded(nbytes)
        assert found.slots.tolist() == [slab * room.stride + n for n in range(count)]
        assert found.keys.tolist() == keys.tolist()
        assert found.orders.tolist() == orders.tolist()
        assert found.sums.tolist() == sums.tolist()
        assert found.serials.tolist() == serials.tolist()


def test_a_new_file_has_nothing(file: File) -> None:
    assert scanned(file) == []


@pytest.mark.parametrize("slab_bytes", [GRAIN_BYTES, 64 * MIB])
def test_a_first_page_is_read_as_it_was_made(file: File, slab_bytes: int) -> None:
    put(file, make_superblock(slab_bytes), 0)
    assert read_superblock(file) == slab_bytes


# --- what was not ---------------------------------------------------------------------


@pytest.mark.parametrize("bit", range(32 * 8))
def test_no_bit_of_a_first_page_may_change(file: File, bit: int) -> None:
    page = bytearray(make_superblock(SLAB))
    page[bit // 8] ^= 1 << bit % 8
    put(file, bytes(page), 0)
    with pytest.raises(UsageError, match="give an"):
        read_superblock(file)


@pytest.mark.parametrize(
    "slab_bytes", [0, 1, GRAIN_BYTES - 1, GRAIN_BYTES + 1, 2**40, 2**63]
)
def test_a_slab_size_that_is_none_is_damage(file: File, slab_bytes: int) -> None:
    """Also where the checksum is right."""
    put(file, make_superblock(slab_bytes), 0)
    with pytest.raises(UsageError, match="damaged"):
        read_superblock(file)


@pytest.mark.parametrize("slot_bytes", [0, 1, GRAIN_BYTES + 1, SLAB, 2 * SLAB, 2**63])
def test_a_head_of_no_size_is_none(file: File, slot_bytes: int) -> None:
    put(file, make_head(slot_bytes), SUPERBLOCK_BYTES)
    put(file, entry(), SUPERBLOCK_BYTES + ENTRY_BYTES)
    assert scanned(file) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"key_bytes": DIGEST_BYTES},
        {"key_bytes": 81},
        {"key_bytes": 2**16 - 1},
        {"order": len(ORDERS)},
        {"order": 255},
        {"used": 0},
        {"used": 2},
        {"nbytes": 0},
        {"nbytes": GRAIN_BYTES + 1},
        {"nbytes": 2**63},
        {"serial": SERIAL_MAX + 1},
        {"serial": 2**64 - 1},
    ],
    ids=str,
)
def test_an_entry_out_of_range_is_none(file: File, fields: dict[str, int]) -> None:
    """Also where its checksum is right."""
    put(file, make_head(GRAIN_BYTES), SUPERBLOCK_BYTES)
    put(file, entry() + entry(**fields) + entry(), SUPERBLOCK_BYTES + ENTRY_BYTES)
    (found,) = scanned(file)
    assert found.slots.tolist() == [0, 2]


def test_entries_of_another_size_are_left_over(file: File) -> None:
    """A slab that went to another size still has the entries of its former one."""
    put(file, make_head(2 * GRAIN_BYTES), SUPERBLOCK_BYTES)
    put(file, entry() * 3, SUPERBLOCK_BYTES + ENTRY_BYTES)
    (found,) = scanned(file)
    assert found.slots.size == 0


@given(raw=st.binary(max_size=4 * ENTRY_BYTES), at=st.integers(0, 3 * ENTRY_BYTES))
@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_bytes_are_sound_or_nothing(file: File, raw: bytes, at: int) -> None:
    put(file, bytes(SLAB), SUPERBLOCK_BYTES)
    put(file, make_head(GRAIN_BYTES) + entry() * 3, SUPERBLOCK_BYTES)
    before = np.zeros(max(1, len(raw)), np.uint8)
    file.read(fragments_of(before), SUPERBLOCK_BYTES + at)
    if raw:
        put(file, raw, SUPERBLOCK_BYTES + at)
    for found in scanned(file):
        assert found.slot_bytes == GRAIN_BYTES
        assert set(found.slots.tolist()) <= {0, 1, 2}
        assert set(found.keys.tolist()) <= {bytes(range(48))}
        assert (found.orders < len(ORDERS)).all()


def test_a_file_that_ends_too_soon_is_an_error(file: File) -> None:
    put(file, make_head(GRAIN_BYTES), SUPERBLOCK_BYTES)
    file.resize(SUPERBLOCK_BYTES + 2 * ENTRY_BYTES)
    with pytest.raises(OSError, match="shorter"):
        scanned(file)


# --- checksums ------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 3 * MIB // 2))
@settings(max_examples=25)
def test_the_checksum_of_each_image(count: int, nbytes: int) -> None:
    """Whether many of them fit in a turn or one is longer than it."""
    rng = np.random.default_rng(nbytes)
    memory = rng.integers(0, 256, count * nbytes, np.uint8)
    sums = image_sums(images_in(memory, nbytes, count))
    for number in range(count):
        begin = memory.ctypes.data + number * nbytes
        image = ctypes.string_at(begin, nbytes)
        assert sums[number] == xxhash.xxh3_64_intdigest(image)
