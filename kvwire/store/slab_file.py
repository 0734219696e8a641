"""The file of a disk tier: slabs, and in front of each the entries of its slots.

::

    superblock | slab 0                                      | slab 1 ...
    one page   | head, entry, entry, ... | slot | slot | ... |

An *entry* of 128 bytes says what is in a slot: key, order, length and checksum of the
image. A slab's *head* says how long its slots are; when a slab goes to another size,
the entries of its former one do not fit it any more. Heads and entries have checksums
of their own.

What is on the disk is one fact for each slot, written in place. There is no log to be
replayed or shortened, and a restart reads 128 bytes a slot, whatever has happened
before. See docs/adr/0013-a-store-of-slots.md.

Images are written first and their entries afterwards. If the process is killed between
the two, the slot's former entry is still there, and does not fit the bytes any more. A
power cut may leave any mixture. So an image that is read is compared with its entry's
checksum, always.

All numbers are little-endian. What is read is checked before it is used for anything.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvwire.errors import UsageError
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB, STORE_HASH_BYTES_MAX, STORE_SLAB_BYTES_MAX
from kvwire.store.file import File, fragments_of
from kvwire.store.index import Keys, Orders, as_keys
from kvwire.store.slabs import GRAIN_BYTES, Slabs, rounded
from kvwire.store.space import DIGEST_BYTES, ORDERS

MAGIC: Final = b"kvwstore"
VERSION: Final = 1
ENTRY_BYTES: Final = 128
SUPERBLOCK_BYTES: Final = GRAIN_BYTES

SERIAL_MAX: Final = 2**62
"""Of an entry: a serial goes on from the largest of them, and has to fit as well."""

Sums = npt.NDArray[np.uint64]

_SUPERBLOCK: Final = struct.Struct("<8sIxxxxQ")
_HEAD: Final = struct.Struct("<8sQ")
_SUM: Final = struct.Struct("<Q")
_KEY_BYTES_MAX: Final = DIGEST_BYTES + STORE_HASH_BYTES_MAX
_ENTRY: Final = np.dtype(
    [
        ("key", "u1", (_KEY_BYTES_MAX,)),
        ("key_bytes", "<u2"),
        ("order", "u1"),
        ("used", "u1"),
        ("spare", "<u4"),
        ("serial", "<u8"),
        ("nbytes", "<u8"),
        ("image_sum", "<u8"),
        ("spares", "<u8"),
        ("sum", "<u8"),
    ]
)
# Images are hashed in pieces of so many bytes, and then other threads have a turn.
_TURN_BYTES: Final = 1 * MIB

assert _ENTRY.itemsize == ENTRY_BYTES


class Found(NamedTuple):
    """What the entries of one slab say.

    Attributes:
        slab: Its number.
        slot_bytes: The size of its slots.
        slots: The slots with a valid entry.
        keys, orders, sums: What is in each.
        serials: When it was written: larger is later.
    """

    slab: int
    slot_bytes: int
    slots: Ids
    keys: Keys
    orders: Orders
    sums: Sums
    serials: npt.NDArray[np.uint64]


def make_superblock(slab_bytes: int) -> bytes:
    """What a new file begins with."""
    text = _SUPERBLOCK.pack(MAGIC, VERSION, slab_bytes)
    return _summed(text).ljust(SUPERBLOCK_BYTES, b"\0")


def read_superblock(file: File) -> int:
    """The bytes of a slab of a file.

    Raises:
        UsageError: It is no file of a store, or of another version.
        OSError: It cannot be read.
    """
    where = f"{file.path}"
    if file.nbytes < SUPERBLOCK_BYTES:
        raise UsageError(f"{where}: too short for a store; give an empty directory")
    page = np.zeros(SUPERBLOCK_BYTES, np.uint8)
    file.read(fragments_of(page), 0)
    text = page[: _SUPERBLOCK.size].tobytes()
    magic, version, slab_bytes = _SUPERBLOCK.unpack(text)
    if magic != MAGIC:
        raise UsageError(f"{where}: this is no store; give an empty directory")
    if version != VERSION:
        raise UsageError(
            f"{where}: written in format {version}, and this kvwire reads {VERSION}; "
            f"give another directory"
        )
    valid = page[: _SUPERBLOCK.size + _SUM.size].tobytes() == _summed(text)
    sound = 0 < slab_bytes <= STORE_SLAB_BYTES_MAX and slab_bytes % GRAIN_BYTES == 0
    if not (valid and sound):
        raise UsageError(f"{where}: its first page is damaged; give another directory")
    return int(slab_bytes)


def make_head(slot_bytes: int) -> bytes:
    """The head of a slab that goes to a size."""
    return _summed(_HEAD.pack(MAGIC, slot_bytes)).ljust(ENTRY_BYTES, b"\0")


def make_entries(
    keys: Keys, orders: Orders, nbytes: int, sums: Sums, serials: Sums
) -> npt.NDArray[np.void]:
    """The entries of slots that hold images of one length; the keys have one length."""
    entries = np.zeros(keys.size, _ENTRY)
    joined = np.frombuffer(b"".join(keys.tolist()), np.uint8)
    width = joined.size // max(keys.size, 1)
    entries["key"][:, :width] = joined.reshape(keys.size, width)
    entries["key_bytes"] = width
    entries["order"] = orders
    entries["used"] = 1
    entries["serial"] = serials
    entries["nbytes"] = nbytes
    entries["image_sum"] = sums
    entries["sum"] = _entry_sums(entries)
    return entries


def slab_offset(slab: int, slab_bytes: int) -> int:
    """Where a slab begins in the file."""
    return SUPERBLOCK_BYTES + slab * slab_bytes


def scan(file: File, slabs: Slabs) -> Iterator[Found]:
    """What is in each slab of a file that has been used, as far as it is valid.

    Raises:
        OSError: The file cannot be read.
    """
    head = np.zeros(ENTRY_BYTES, np.uint8)
    for slab in range(len(slabs)):
        begin = slab_offset(slab, slabs.slab_bytes)
        file.read(fragments_of(head), begin)
        text = head[: _HEAD.size].tobytes()
        magic, slot_bytes = _HEAD.unpack(text)
        if magic != MAGIC or head[: _HEAD.size + _SUM.size].tobytes() != _summed(text):
            continue
        if slot_bytes % GRAIN_BYTES or not 0 < slot_bytes <= slabs.slab_bytes:
            continue
        count = slabs.capacity(slot_bytes)
        if count:
            entries = np.zeros(count, _ENTRY)
            file.read(fragments_of(entries), begin + ENTRY_BYTES)
            yield _valid(entries, slab, slot_bytes, slabs.stride)


def image_sums(images: Fragments) -> Sums:
    """The checksum of each image, which is one fragment: xxh3, 64 bits of it."""
    count, nbytes = len(images), int(images.lengths[0])
    view = (ctypes.c_char * nbytes).from_address
    sums = np.zeros(count, np.uint64)
    step = max(1, _TURN_BYTES // nbytes)
    for first in range(0, count, step):
        part = slice(first, first + step)
        views = map(view, images.addresses[part].tolist())
        sums[part] = list(map(xxhash.xxh3_64_intdigest, views))
        time.sleep(0)
    return sums


def _valid(entries: npt.NDArray[Any], slab: int, slot_bytes: int, stride: int) -> Found:
    """Those entries of a slab that are whole, and of slots of its size."""
    key_bytes = entries["key_bytes"].astype(np.int64)
    sizes = entries["nbytes"]
    good = (
        (entries["used"] == 1)
        & (key_bytes > DIGEST_BYTES)
        & (key_bytes <= _KEY_BYTES_MAX)
        & (entries["order"] < len(ORDERS))
        & (entries["serial"] <= SERIAL_MAX)
        & (sizes <= slot_bytes)
        & (sizes > slot_bytes - GRAIN_BYTES)
        & (entries["sum"] == _entry_sums(entries))
    )
    places = np.flatnonzero(good)
    keys = np.empty(places.size, np.object_)
    for width in sorted(set(key_bytes[places].tolist())):
        which = key_bytes[places] == width
        raw = np.ascontiguousarray(entries["key"][places[which], :width])
        keys[which] = as_keys(raw.view(f"V{width}").ravel().tolist())
    return Found(
        slab,
        slot_bytes,
        places + slab * stride,
        keys,
        entries["order"][places],
        entries["image_sum"][places].astype(np.uint64),
        entries["serial"][places].astype(np.uint64),
    )


def _entry_sums(entries: npt.NDArray[Any]) -> Sums:
    raw = entries.view(np.uint8).reshape(entries.size, ENTRY_BYTES)
    found = map(xxhash.xxh3_64_intdigest, raw[:, : ENTRY_BYTES - _SUM.size])
    return np.fromiter(found, np.uint64, entries.size)


def _summed(text: bytes) -> bytes:
    return text + _SUM.pack(xxhash.xxh3_64_intdigest(text))


assert rounded(ENTRY_BYTES) == GRAIN_BYTES
