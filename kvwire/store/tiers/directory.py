"""The directory of a disk tier: the index, and the file of images beside it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from kvwire.errors import UsageError
from kvwire.store.tiers.disk_index import DiskIndex
from kvwire.store.tiers.file import File
from kvwire.store.tiers.slabs import stride_of

_INDEX: Final = "index.sqlite"
_IMAGES: Final = "images"
# The file of the first format, which had no SQLite.
_FORMER: Final = "blocks"


class TierDirectory:
    """Owns one directory, which no other process uses meanwhile.

    Attributes:
        index: Which image is where.
        file: The images.
        slabs: How many slabs the file has.
        synced: As it was opened.
        whole: Whether every image is what its row says, as far as can be known.
    """

    def __init__(
        self,
        path: Path,
        nbytes: int,
        slab_bytes: int,
        synced: bool,
        file_type: type[File],
    ) -> None:
        self.synced = synced
        path.mkdir(parents=True, exist_ok=True)
        if (path / _FORMER).exists():
            raise UsageError(
                f"{path}: its blocks were written by an earlier kvwire, and this one "
                f"does not read that format; delete the directory, or give another one"
            )
        with contextlib.ExitStack() as opened:
            self.file: File = file_type(path / _IMAGES, create=True)
            opened.callback(self.file.close)
            # SQLite's ends when this process closes any descriptor of its file; and its
            # first sync makes the names of both files safe.
            if not self.file.lock():
                raise UsageError(
                    f"{path}: another process has this store open; one at a time can, "
                    f"so give each its own directory"
                )
            self.index: DiskIndex = DiskIndex(path / _INDEX, slab_bytes, synced=synced)
            opened.callback(self.index.close, in_order=False)
            slab_bytes = self.index.slab_bytes
            self.slabs: int = nbytes // slab_bytes
            if self.slabs < 1:
                raise UsageError(
                    f"{path}: its slabs have {slab_bytes} bytes, so size={nbytes} is "
                    f"too little; give it a larger size, or an empty directory"
                )
            self.whole: bool = self.index.closed
            self._resize(self.slabs * slab_bytes)
            opened.pop_all()  # they are this one's now

    def close(self, *, in_order: bool) -> None:
        """Close everything, whether the disk fails or not; see :class:`DiskIndex`."""
        try:
            self.index.close(in_order=in_order)
        finally:
            self.file.close()

    def _resize(self, nbytes: int) -> None:
        if self.file.nbytes > nbytes:
            # First their rows: they would fit nothing once the file grows again.
            end = self.slabs * stride_of(self.index.slab_bytes)
            self.index.erase([range(end, 2**62)])
        elif self.file.nbytes < nbytes:
            # Somebody may have cut it, or taken it away.
            self.whole = False
        self.file.resize(nbytes)
