"""Tiers that keep entries of a codec: writes encode, reads decode.

A put encodes each image. The tier keeps the entry if it is shorter than the image, and
the image otherwise. A get decodes into the image's own memory, whether the tier was
opened with a codec or not: the length shows whether an image or an entry was stored,
and an entry names its codec. So a tier whose ``codec=`` is added or removed can still
read its older blocks.

Encoding and decoding run on threads. Encoding needs additional memory: as much as the
images of the few batches that are being encoded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Final

import numpy as np

from kvwire.aio import gather_all
from kvwire.errors import IntegrityError, UsageError, nearest, shown
from kvwire.kv.blocks import Ids
from kvwire.kv.floats import Bytes
from kvwire.kv.fragments import Fragments
from kvwire_store.address import TierAddress
from kvwire_store.codecs import planes
from kvwire_store.codecs.entry import decode_entry, encode_entry
from kvwire_store.codecs.form import form_of
from kvwire_store.images import views_of
from kvwire_store.namespace import ORDERS, Namespace
from kvwire_store.threads import Threads
from kvwire_store.tiers.base import FAILED, LANDED, Batch, BlockResults, Tier
from kvwire_store.tiers.slabs import rounded

# How many different entry lengths a tier with slots has for images of one size. A slab
# has slots of one length, so each length needs its own slabs.
_LENGTHS: Final = 16
# Threads that encode or decode one batch.
_LANES: Final = 4

REDIS: Final = ("redis", "rediss", "valkey", "valkeys")
_NOT_CODED: Final[Mapping[str, str]] = {
    "memory": "its blocks are copied directly to caches; use the codec in a tier below "
    "it, which may be in memory: disk:/dev/shm/DIRECTORY?size=SIZE&codec=NAME",
    "kvwire": "set it for the server's own tiers: kvwire store serve",
    **dict.fromkeys(REDIS, "its values are images; use a codec in disk or object"),
}


def is_coded(address: TierAddress) -> bool:
    """Return whether a tier is to encode new blocks.

    Raises:
        UsageError: There is no such codec, or the tier takes none.
    """
    name = address.options.get("codec")
    if name is None:
        return False
    why = ""
    if beside := _NOT_CODED.get(address.scheme):
        why = f"this tier takes no codec; {beside}"
    elif name != planes.NAME:
        why = f"codec={shown(name)}: {nearest(name, (planes.NAME,))}"
    if why:
        raise UsageError(f"tier {address.text!r}: {why}")
    return True


class CodedTier(Tier):
    """Encodes written images, and decodes read ones. Subclassed.

    Attributes:
        slotted: Whether it keeps blocks in slots of a few lengths.
    """

    slotted: ClassVar[bool] = False

    def __init__(self, address: TierAddress) -> None:
        super().__init__(address.text)
        self._encodes = is_coded(address)
        self._threads = Threads()
        # Why an entry could not be decoded; "" once others were.
        self._undecoded = ""

    @abstractmethod
    async def _write_entries(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Write images or entries; for a slotted tier, all of one length."""

    @abstractmethod
    async def _read_entries(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Read images or entries into the images' memory, and set ``batch.sizes``."""

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Encode images, and write the entries."""
        if not self._encodes:
            return await self._write_entries(namespace, batch)
        room = np.empty((batch.keys.size, namespace.image_bytes), np.uint8)
        lengths = np.zeros(batch.keys.size, np.int64)

        async def encode(part: Ids) -> None:
            job = partial(self._encode, namespace, batch, part, room)
            lengths[part] = await self._threads.run(job)

        await gather_all(*map(encode, _lanes(batch.keys.size)))
        entries = batch._replace(images=_entries(batch.images, room, lengths))
        if not self.slotted:
            return await self._write_entries(namespace, entries)
        results = np.full(batch.keys.size, FAILED, np.uint8)
        for length in sorted(set(lengths.tolist())):
            which = np.flatnonzero(lengths == length)
            part = entries.selected(which)
            results[which] = await self._write_entries(namespace, part)
        return results

    async def _read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Read entries into the images' memory, and decode them there."""
        sizes = np.zeros(batch.keys.size, np.int64)
        asked = batch._replace(sizes=sizes)
        results = await self._read_entries(namespace, asked)
        coded = (results == LANDED) & (sizes != namespace.image_bytes)
        which = np.flatnonzero(coded)
        if not which.size:
            return results

        async def decode(part: Ids) -> None:
            at = which[part]
            job = partial(self._decode, namespace, asked.selected(at))
            results[at] = await self._threads.run(job)

        await gather_all(*map(decode, _lanes(which.size)))
        if self._undecoded and (results[which] == LANDED).all():
            if self.error == self._undecoded:
                self.error = ""
            self._undecoded = ""
        return results

    # --- on a thread ------------------------------------------------------------------

    def _encode(
        self, namespace: Namespace, batch: Batch, part: Ids, room: _Rows
    ) -> list[int]:
        """Encode images, each into a row of ``room``; return the entry lengths."""
        images = _arrays(batch.images.selected(part))
        orders = batch.orders[part].tolist()
        lengths = []
        for image, order, at in zip(images, orders, part.tolist(), strict=True):
            form = form_of(namespace.spec, ORDERS[order])
            nbytes = encode_entry(image, form, room[at])
            kept = min(self._padded(nbytes, image.size), image.size)
            room[at, nbytes:kept] = 0
            lengths.append(kept)
        return lengths

    def _padded(self, nbytes: int, image_bytes: int) -> int:
        """Return the bytes to store: a padded entry, or the whole image."""
        if not nbytes:
            return image_bytes
        step = rounded(-(-image_bytes // _LENGTHS)) if self.slotted else 1
        return -(-nbytes // step) * step

    def _decode(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Decode each entry in place, at the beginning of its image."""
        results = np.full(batch.keys.size, LANDED, np.uint8)
        assert batch.sizes is not None
        sizes = batch.sizes.tolist()
        orders = batch.orders.tolist()
        for at, image in enumerate(_arrays(batch.images)):
            form = form_of(namespace.spec, ORDERS[orders[at]])
            try:
                decode_entry(image[: sizes[at]].copy(), form, image)
            except (IntegrityError, ModuleNotFoundError) as exc:
                results[at] = FAILED
                self.error = self._undecoded = str(exc)
        return results


_Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


def _lanes(count: int) -> list[Ids]:
    """Split positions into one part per thread."""
    return [p for p in np.array_split(np.arange(count), _LANES) if p.size]


def _arrays(images: Fragments) -> list[Bytes]:
    return [np.frombuffer(view, np.uint8) for view in views_of(images)]


def _entries(images: Fragments, room: _Rows, lengths: Ids) -> Fragments:
    """Return each block's entry, or its image if that is shorter."""
    rows = np.arange(lengths.size, dtype=np.uint64) * np.uint64(room.shape[1])
    rows += np.uint64(room.ctypes.data)
    shorter = lengths < room.shape[1]
    return Fragments(
        np.where(shorter, rows, images.addresses),
        lengths.astype(np.uint64),
        owner=(images.owner, room),
        writable=False,
    )
