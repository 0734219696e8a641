"""A codec in front of a tier: entries go down, images come back.

A put encodes each image, and the tier keeps what is shorter; what does not shrink it
keeps as it is. A get decodes into the image's own memory, whatever the tier was opened
with: a length says whether an image or an entry was kept, and an entry which codec made
it. So a tier whose ``codec=`` is changed or left out goes on giving what it has.

A codec that loses bits is agreed upon by name. A key names one content for ever, and
what such a codec gives back is another one: its blocks have keys of their own, made of
the codec's name. A tier that is opened with another codec does not find them, and
nobody gets one who has not asked for it.

All of it runs on threads. What is being encoded takes as much memory again as the
images, which are those of a few batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from typing import Final

import msgspec
import numpy as np

from kvwire.errors import IntegrityError
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.codecs.base import BlockCodec, Bytes, form_of
from kvwire.kv.codecs.entry import decode_entry, encode_entry
from kvwire.kv.fragments import Fragments
from kvwire.store.cleanup import gather_all
from kvwire.store.images import views_of
from kvwire.store.index import Keys, Orders, as_keys
from kvwire.store.namespace import DIGEST_BYTES, ORDERS, Namespace
from kvwire.store.threads import Threads
from kvwire.store.tiers.base import (
    Batch,
    BlockResult,
    BlockResults,
    TenantUse,
    Tier,
    TierStats,
)
from kvwire.store.tiers.slabs import rounded

# Lengths of entries in a tier of slots: so many for images of one size. A slab has
# slots of one length, and each length that there is takes slabs of its own.
_LENGTHS: Final = 16
# Threads that encode or decode one batch.
_LANES: Final = 4


class CodedTier(Tier):
    """Keeps blocks of another tier as entries of a codec."""

    def __init__(
        self, inner: Tier, codec: BlockCodec | None, *, slotted: bool = False
    ) -> None:
        self.name = inner.name
        self.durable = inner.durable
        self.inner: Tier = inner
        self._codec = codec
        self._slotted = slotted
        self._threads = Threads()
        self._error = ""
        # Blocks that the tier gave and nobody could decode.
        self._failed = 0
        self.lossy: str = codec.name if codec is not None and codec.lossy else ""
        named = sha256(self.lossy.encode()).digest()[:DIGEST_BYTES]
        self._mask = np.frombuffer(named, np.uint8)

    @property
    def error(self) -> str:  # type: ignore[override]
        return self.inner.error or self._error

    @property
    def unavailable_reason(self) -> str:  # type: ignore[override]
        return self.inner.unavailable_reason

    @property
    def asks(self) -> bool:  # type: ignore[override]
        return self.inner.asks

    @property
    def taking(self) -> bool:
        return self.inner.taking

    async def find(self, keys: Keys) -> Orders:
        return await self.inner.find(self._kept_as(keys))

    async def holds(self, keys: Keys) -> Bits:
        return await self.inner.holds(self._kept_as(keys))

    def touch(self, keys: Keys) -> None:
        self.inner.touch(self._kept_as(keys))

    async def write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Encode images, and let the tier take what came of it."""
        batch = batch._replace(keys=self._kept_as(batch.keys))
        if self._codec is None:
            return await self.inner.write(namespace, batch)
        room = np.empty((batch.keys.size, namespace.image_bytes), np.uint8)
        lengths = np.zeros(batch.keys.size, np.int64)

        async def encode(part: Ids) -> None:
            job = partial(self._encode, namespace, batch, part, room)
            lengths[part] = await self._threads.run(job)

        await gather_all(*map(encode, _lanes(batch.keys.size)))
        entries = batch._replace(images=_entries(batch.images, room, lengths))
        if not self._slotted:
            return await self.inner.write(namespace, entries)
        results = np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        for length in sorted(set(lengths.tolist())):
            which = np.flatnonzero(lengths == length)
            part = entries.selected(which)
            results[which] = await self.inner.write(namespace, part)
        return results

    async def read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Read what was kept into the images, and decode it there."""
        sizes = np.zeros(batch.keys.size, np.int64)
        asked = batch._replace(keys=self._kept_as(batch.keys), sizes=sizes)
        results = await self.inner.read(namespace, asked)
        coded = results == BlockResult.LANDED
        coded &= sizes != namespace.image_bytes
        which = np.flatnonzero(coded)

        async def decode(part: Ids) -> None:
            at = which[part]
            job = partial(self._decode, namespace, asked.selected(at))
            results[at] = await self._threads.run(job)

        await gather_all(*map(decode, _lanes(which.size)))
        self._failed += int(np.count_nonzero(results[which]))
        return results

    async def delete(self, keys: Keys) -> None:
        await self.inner.delete(self._kept_as(keys))

    async def delete_namespace(self, digest: bytes) -> None:
        (kept_as,) = self._kept_as(as_keys((digest,)))
        await self.inner.delete_namespace(kept_as)

    async def pin(self, keys: Keys, *, pinned: bool) -> Bits:
        return await self.inner.pin(self._kept_as(keys), pinned=pinned)

    def tenant_uses(self) -> tuple[TenantUse, ...]:
        return self.inner.tenant_uses()

    def stats(self) -> TierStats:
        """Return what is in the tier; what cannot be decoded has failed."""
        stats = self.inner.stats()
        landed = stats.read_blocks - self._failed
        failed = stats.failed_blocks + self._failed
        return msgspec.structs.replace(stats, read_blocks=landed, failed_blocks=failed)

    def namespaces(self) -> Iterable[Namespace]:
        return self.inner.namespaces()

    async def flush(self) -> None:
        await self.inner.flush()

    async def close(self) -> None:
        try:
            await self.inner.close()
        finally:
            self._threads.close()

    # --- inside -----------------------------------------------------------------------

    def _kept_as(self, keys: Keys) -> Keys:
        """Return the keys that the tier has for some blocks."""
        if not self.lossy:
            return keys
        listed = keys.tolist()
        digests = np.frombuffer(b"".join(k[:DIGEST_BYTES] for k in listed), np.uint8)
        others = (digests.reshape(-1, DIGEST_BYTES) ^ self._mask).tobytes()
        starts = range(0, len(others), DIGEST_BYTES)
        return as_keys(
            others[at : at + DIGEST_BYTES] + key[DIGEST_BYTES:]
            for at, key in zip(starts, listed, strict=True)
        )

    # --- on a thread ------------------------------------------------------------------

    def _encode(
        self, namespace: Namespace, batch: Batch, part: Ids, room: _Rows
    ) -> list[int]:
        """Encode images, each into a row of ``room``; the lengths of the entries."""
        assert self._codec is not None
        images = _arrays(batch.images.selected(part))
        orders = batch.orders[part].tolist()
        lengths = []
        for image, order, at in zip(images, orders, part.tolist(), strict=True):
            form = form_of(namespace.spec, ORDERS[order])
            nbytes = encode_entry(self._codec, image, form, room[at])
            kept = min(self._padded(nbytes, image.size), image.size)
            room[at, nbytes:kept] = 0
            lengths.append(kept)
        return lengths

    def _padded(self, nbytes: int, image_bytes: int) -> int:
        """Return the bytes that an entry is kept as, or the image without one."""
        if not nbytes:
            return image_bytes
        step = rounded(-(-image_bytes // _LENGTHS)) if self._slotted else 1
        return -(-nbytes // step) * step

    def _decode(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """Decode the entries that images begin with."""
        results = np.full(batch.keys.size, BlockResult.LANDED, np.uint8)
        assert batch.sizes is not None
        sizes, orders = batch.sizes.tolist(), batch.orders.tolist()
        for at, image in enumerate(_arrays(batch.images)):
            form = form_of(namespace.spec, ORDERS[orders[at]])
            try:
                decode_entry(image[: sizes[at]].copy(), form, image, self.lossy)
            except (IntegrityError, ModuleNotFoundError) as exc:
                results[at], self._error = BlockResult.FAILED, str(exc)
        return results


_Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


def _lanes(count: int) -> list[Ids]:
    """Return positions in as many parts as there are threads for."""
    return [p for p in np.array_split(np.arange(count), _LANES) if p.size]


def _arrays(images: Fragments) -> list[Bytes]:
    return [np.frombuffer(view, np.uint8) for view in views_of(images)]


def _entries(images: Fragments, room: _Rows, lengths: Ids) -> Fragments:
    """Return each entry, or the image itself where there is none shorter."""
    rows = np.arange(lengths.size, dtype=np.uint64) * np.uint64(room.shape[1])
    rows += np.uint64(room.ctypes.data)
    shorter = lengths < room.shape[1]
    return Fragments(
        np.where(shorter, rows, images.addresses),
        lengths.astype(np.uint64),
        owner=(images.owner, room),
        writable=False,
    )
