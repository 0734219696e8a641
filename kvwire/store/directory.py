"""The directory of a disk tier: a lock, the file of slots, the spaces in words."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.spec import KVSpec
from kvwire.limits import MIB, NAME_CHARS_MAX, STORE_SPACES_MAX
from kvwire.store.file import File, fragments_of
from kvwire.store.slab_file import SUPERBLOCK_BYTES, make_superblock, read_superblock
from kvwire.store.space import Space
from kvwire.unreadable import UNREADABLE

_LOCK: Final = "lock"
_BLOCKS: Final = "blocks"
_SPACES: Final = "spaces.json"
# Descriptions are a few hundred bytes each.
_SPACES_BYTES_MAX: Final = 16 * MIB


class _Described(msgspec.Struct):
    """One space in ``spaces.json``."""

    group: str
    spec: list[tuple[str, str]]


class Directory:
    """One directory, which no other process uses meanwhile. Made by :meth:`open`.

    Attributes:
        file: The file of slots.
        slab_bytes: Bytes of one of its slabs, which is decided when it is made.
        slabs: How many slabs it has.
        spaces: The spaces of its blocks, by digest; for words only, since a key has all
            that is needed to find a block.
    """

    def __init__(self, path: Path, lock: int, file: File, slab_bytes: int) -> None:
        self.path = path
        self.file = file
        self.slab_bytes = slab_bytes
        self.slabs = (file.nbytes - SUPERBLOCK_BYTES) // slab_bytes
        self.spaces = _read_spaces(path / _SPACES)
        self._lock = lock

    @classmethod
    def open(
        cls, path: Path, nbytes: int, slab_bytes: int, file_type: type[File]
    ) -> Directory:
        """Lock a directory and open its file, or make both.

        Args:
            path: Where it is.
            nbytes: How long its file is to be at most.
            slab_bytes: Bytes of a slab, if the file is new.
            file_type: How the file is read and written.

        Raises:
            UsageError: Another process has it, it holds something else, or a slab of
                its file is longer than ``nbytes``.
            OSError: It cannot be made or opened, or the disk has no room.
        """
        path.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.ExitStack() as opened:
                lock = _locked(path / _LOCK)
                opened.callback(os.close, lock)
                blocks = path / _BLOCKS
                if blocks.exists():
                    file = file_type(blocks)
                    opened.callback(file.close)
                    slab_bytes = read_superblock(file)
                else:
                    file = _made(path, slab_bytes, file_type)
                    opened.callback(file.close)
                slabs = (nbytes - SUPERBLOCK_BYTES) // slab_bytes
                if slabs < 1:
                    raise UsageError(
                        f"{path}: its slabs have {slab_bytes} bytes, so size={nbytes} "
                        f"is too little; give it a larger size, or an empty directory"
                    )
                file.resize(SUPERBLOCK_BYTES + slabs * slab_bytes)
                directory = cls(path, lock, file, slab_bytes)
                opened.pop_all()  # they are the directory's now
                return directory
        except OSError as exc:
            if exc.errno == errno.ENOSPC:
                raise UsageError(
                    f"{path}: the disk has no room for {nbytes} bytes; give it less "
                    f"with ?size="
                ) from exc
            raise

    def describe(self, space: Space) -> None:
        """Keep what a space stands for, so that errors can name it after a restart.

        Raises:
            OSError: The disk fails.
        """
        if space.digest in self.spaces or len(self.spaces) >= STORE_SPACES_MAX:
            return
        self.spaces[space.digest] = space
        described = [
            _Described(one.group, list(one.spec.to_pairs()))
            for one in self.spaces.values()
        ]
        fresh = self.path / f"{_SPACES}.new"
        fresh.write_bytes(msgspec.json.encode(described))
        fresh.replace(self.path / _SPACES)

    def close(self) -> None:
        """Close the file, and let other processes have the directory.

        Raises:
            OSError: The file system fails; both are closed nevertheless.
        """
        try:
            self.file.close()
        finally:
            os.close(self._lock)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock until it is closed, or the process ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise UsageError(
            f"{path.parent}: process {owner or '?'} has this store open; one process "
            f"at a time can, so give each its own directory"
        ) from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _made(path: Path, slab_bytes: int, file_type: type[File]) -> File:
    """A new file, which has its name only once its first page is written."""
    fresh = path / f"{_BLOCKS}.new"
    file = file_type(fresh, create=True)
    try:
        page = np.frombuffer(make_superblock(slab_bytes), np.uint8)
        file.resize(SUPERBLOCK_BYTES)
        file.write(fragments_of(page), 0)
        file.sync()
        fresh.replace(path / _BLOCKS)
        _sync_directory(path)
    except BaseException:
        file.close()
        raise
    return file


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_spaces(path: Path) -> dict[bytes, Space]:
    """The spaces that are described, as far as that can be read."""
    spaces: dict[bytes, Space] = {}
    with contextlib.suppress(OSError, UsageError, *UNREADABLE):
        if path.stat().st_size > _SPACES_BYTES_MAX:
            return {}
        described = msgspec.json.decode(path.read_bytes(), type=list[_Described])
        for one in described[:STORE_SPACES_MAX]:
            if 1 <= len(one.group) <= NAME_CHARS_MAX:
                space = Space(one.group, KVSpec.from_pairs(one.spec))
                spaces[space.digest] = space
    return spaces
