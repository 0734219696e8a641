"""The directory of a disk tier: the index, and the file of images beside it.

Every system call that moves bytes of images has its own method, so that a test can make
any of them fail, or kill the process before it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final, TypeAlias

from kvwire.backend import keep_from_children
from kvwire.errors import UsageError, refused_call, shown
from kvwire.types import in_bytes
from kvwire_store.tiers.disk_index import DiskIndex
from kvwire_store.tiers.slabs import stride_of

_INDEX: Final = "index.sqlite"
_IMAGES: Final = "images"
# A profile of seccomp refuses a call with the first, an older kernel with the second.
_FORBIDDEN: Final = (errno.EPERM, errno.ENOSYS)
_NO_LOCKS: Final = (
    "without a lock two processes could write to one store: allow flock in the "
    "sandbox's profile (seccomp), mount the file system with locks (Lustre: -o flock), "
    "or give another place"
)
_NO_ROOM: Final = (
    "the disk's room could not be allocated: allow fallocate in the sandbox's profile "
    "(seccomp), or give another place"
)


class TierDirectory:
    """The directory of a disk tier, locked against other processes.

    If it cannot be opened, or is discarded, what it has created is removed: an empty
    index keeps its size of slabs, which a smaller tier would be refused for.
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
        self._path = path
        with contextlib.ExitStack() as opened:
            opened.callback(_remove_directories, _absent(path))
            path.mkdir(parents=True, exist_ok=True)
            self.file: File = file_type(path / _IMAGES)
            opened.callback(self.file.close)
            # SQLite's lock ends when this process closes any descriptor of its file;
            # and its first sync makes the names of both files durable.
            if not self.file.lock():
                raise UsageError(
                    f"{path}: {self.file.locked_by()} has this store open; give each "
                    "process its own directory"
                )
            if not self.file.nbytes and not (path / _INDEX).exists():
                opened.callback(_remove_files, path)  # while it is locked
            self.index: DiskIndex = DiskIndex(path / _INDEX, slab_bytes, synced=synced)
            opened.callback(self.index.close, in_order=False)
            slab_bytes = self.index.slab_bytes
            self.slabs: int = nbytes // slab_bytes
            if self.slabs < 1:
                raise UsageError(
                    f"{path}: its slabs have {in_bytes(slab_bytes)}, so size="
                    f"{in_bytes(nbytes)} is too small; use a larger size, or an empty "
                    "directory"
                )
            self.whole: bool = self.index.closed
            self._names = self._named()
            self._resize(self.slabs * slab_bytes)
            # They now belong to this object.
            self._opened: contextlib.ExitStack = opened.pop_all()

    def check(self) -> None:
        """Check that the directory still contains the opened files.

        Raises:
            OSError: The directory was removed or replaced, so blocks written now would
                not be found again.
        """
        try:
            there = self._named() == self._names
        except FileNotFoundError:
            there = False
        if not there:
            raise OSError(
                errno.ESTALE,
                f"{self._path} was removed or replaced while it was open; open the "
                f"store again",
            )

    def _named(self) -> list[tuple[int, int]]:
        """Return the identities of the files that have the two names now."""
        found = ((self._path / name).stat() for name in (_IMAGES, _INDEX))
        return [(one.st_dev, one.st_ino) for one in found]

    def close(self, *, in_order: bool) -> None:
        """Close everything, even if the disk fails; see :class:`DiskIndex`."""
        try:
            self.index.close(in_order=in_order)
        finally:
            self.file.close()

    def discard(self) -> None:
        """Close everything, and remove what this object has created."""
        self._opened.close()

    def _resize(self, nbytes: int) -> None:
        if self.file.nbytes > nbytes:
            # Their rows first: they would be wrong once the file grows again.
            end = self.slabs * stride_of(self.index.slab_bytes)
            self.index.erase([range(end, 2**62)])
        elif self.file.nbytes < nbytes:
            # Another process may have truncated or removed it.
            self.whole = False
        self.file.resize(nbytes)


Views: TypeAlias = list[memoryview]

# The most buffers that Linux accepts in one call.
_VIEWS: Final = 1024


class File:
    """An open file, read and written from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)

    def __del__(self) -> None:
        # The store was dropped, for example with its loop, and would stay locked.
        if getattr(self, "_fd", -1) >= 0:
            self.close()  # first: a warning may be an error
            warnings.warn(
                f"the store in {self.path.parent} was never closed: use `async with`",
                ResourceWarning,
                stacklevel=2,
            )

    @property
    def nbytes(self) -> int:
        """Return its length."""
        return os.fstat(self._fd).st_size

    def read(
        self, into: Sequence[memoryview], offset: int, *, at_once: bool = False
    ) -> None:
        """Fill memory with the bytes from ``offset`` on.

        Raises:
            BlockingIOError: ``at_once`` is set, and the kernel would have to read the
                disk.
        """
        _move(self.preadv_at_once if at_once else self.preadv, into, offset)

    def write(self, source: Sequence[memoryview], offset: int) -> None:
        """Write memory to the bytes from ``offset`` on."""
        _move(self.pwritev, source, offset)

    def resize(self, nbytes: int) -> None:
        """Set the length, and allocate disk space for all of it, or for none."""
        have = self.nbytes
        if nbytes < have:
            os.ftruncate(self._fd, nbytes)
        elif nbytes > have:
            try:
                self.allocate(have, nbytes - have)
            except OSError:
                # Some file systems leave what they had, and so no room for an index.
                os.ftruncate(self._fd, have)
                raise

    def lock(self) -> bool:
        """Lock it until it is closed; return False if another process has locked it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise refused_call(exc, "flock", _NO_LOCKS) from None
        keep_from_children(self)
        return True

    def locked_by(self) -> str:
        """Return the process that holds the lock, as far as this host knows."""
        found = os.fstat(self._fd)
        major = os.major(found.st_dev)
        minor = os.minor(found.st_dev)
        where = f"{major:02x}:{minor:02x}:{found.st_ino}"
        with contextlib.suppress(OSError, ValueError):
            for line in Path("/proc/locks").read_text().splitlines():
                fields = line.split()
                if "FLOCK" in fields and "->" not in fields and where in fields:
                    return _process(int(fields[fields.index(where) - 1]))
        return "another process"

    def fileno(self) -> int:
        """Return its descriptor; -1 once it is closed."""
        return self._fd

    def close(self) -> None:
        """Close it; no thread may be using it."""
        number = self._fd
        self._fd = -1
        if number >= 0:
            os.close(number)

    # --- the system calls -------------------------------------------------------------

    def preadv(self, views: Views, offset: int) -> int:
        """Read into memory; return the number of bytes, 0 at the end of the file."""
        return os.preadv(self._fd, views, offset)

    def preadv_at_once(self, views: Views, offset: int) -> int:
        """Read the bytes that the kernel has in memory, without waiting for a disk."""
        if not hasattr(os, "RWF_NOWAIT"):
            raise BlockingIOError
        return os.preadv(self._fd, views, offset, os.RWF_NOWAIT)

    def pwritev(self, views: Views, offset: int) -> int:
        """Write memory; return the number of bytes."""
        return os.pwritev(self._fd, views, offset)

    def sync(self) -> None:
        """Wait until the written bytes survive a power cut."""
        os.fsync(self._fd)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Allocate disk space for a part of the file, which grows to hold it."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, offset, nbytes)
            except OSError as exc:
                if exc.errno in _FORBIDDEN:
                    raise refused_call(exc, "fallocate", _NO_ROOM) from None
                raise
        else:
            os.ftruncate(self._fd, offset + nbytes)


def _absent(path: Path) -> list[Path]:
    """Return the directories that are still to be created, the lowest first."""
    return list(takewhile(lambda each: not each.exists(), (path, *path.parents)))


def _remove_directories(paths: list[Path]) -> None:
    with contextlib.suppress(OSError):  # another process may have files there
        for path in paths:
            path.rmdir()


def _remove_files(directory: Path) -> None:
    with contextlib.suppress(OSError):  # the disk fails, and its error is raised
        for path in (*directory.glob(f"{_INDEX}*"), directory / _IMAGES):
            path.unlink()


def _process(number: int) -> str:
    if number == os.getpid():
        return "this process"
    name = ""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{number}/comm").read_text().strip()
    return f"process {number} ({shown(name)})" if name else "another process"


def _move(
    call: Callable[[Views, int], int], views: Sequence[memoryview], offset: int
) -> None:
    """Repeat a system call until all bytes are moved: one call may move only a part."""
    first = 0
    begun = 0
    while first < len(views):
        some = list(views[first : first + _VIEWS])
        some[0] = some[0][begun:]
        moved = call(some, offset)
        if not moved:
            raise OSError(errno.EIO, "the file became shorter")
        offset += moved
        begun += moved
        while first < len(views) and begun >= views[first].nbytes:
            begun -= views[first].nbytes
            first += 1
