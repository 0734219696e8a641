"""A folder as a directory, for the processes of one machine: one file per member.

A file is written under another name and then renamed, so readers never see an
incomplete file. The end of its lease is stored as its modification time, which lies in
the future. A file with an expired lease is ignored, unless the reader has known it
before: then only the reader's own count of the lease matters, since the wall clock may
have jumped. An expired file is removed once it has not changed for a minute. Files that
are not
read every ``interval_s``, since the system does not report changes.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import quote, unquote

from kvwire.config import local_path
from kvwire.directory.base import Batch, Directory
from kvwire.directory.limits import MEMBERS_MAX, RECORD_BYTES_MAX
from kvwire.directory.own_folder import own_folder, user_folder
from kvwire.directory.record import Record
from kvwire.errors import UsageError

# How often the folder is read: one system call per member.
FILE_INTERVAL_S: Final = 0.5

_ENDING: Final = ".json"


class FileDirectory(Directory):
    """Keeps records in a folder: ``file:/run/fleet``, or this user's for ``file:``."""

    # How long a file stays after its lease has ended, by a monotonic clock: its writer
    # may be alive and renew it.
    over_s: float = 60.0
    options: ClassVar[Mapping[str, str]] = {"interval_s": str(FILE_INTERVAL_S)}

    def __init__(self, url: str) -> None:
        super().__init__(url)
        path = unquote(self.url.path)
        if self.url.netloc not in ("", "localhost") or "\0" in path:
            raise UsageError(
                f"directory {self}: the folder must be on this machine; write "
                '"file:/path"'
            )
        # A folder named explicitly may be shared by several users.
        self._is_default = not path
        self.folder: Path = Path(local_path(path)) if path else user_folder()
        self._check()
        self._interval_s = self.seconds("interval_s")
        # Files with expired leases: when they were changed, and when we noticed.
        self._over: dict[str, tuple[int, float]] = {}

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        with self.failing(UsageError):
            self._check()
            self._write(self._path(key), value, time.time() + lease_s)

    async def erase(self, key: str) -> None:
        with self.failing():
            self._path(key).unlink(missing_ok=True)

    async def follow(self) -> AsyncGenerator[Batch, None]:
        seen: dict[str, int] = {}
        first = True
        while True:
            with self.failing(UsageError):
                self._check()
                now_there = self._look(seen)
            batch: dict[str, bytes | None] = dict.fromkeys(seen.keys() - now_there)
            for key, changed in now_there.items():
                if seen.get(key) != changed:
                    # It may be gone meanwhile, or readable only by another user.
                    with suppress(FileNotFoundError):
                        try:
                            batch[key] = self._read(key)
                        except PermissionError:
                            batch[key] = b""  # not a record; it is counted
            seen = now_there
            if batch or first:
                yield batch
            first = False
            await asyncio.sleep(self._interval_s)

    def _check(self) -> None:
        """Refuse the default folder if another user made it or may enter it.

        Its name is not secret, and every user can create it in ``/tmp``.

        Raises:
            UsageError: Other users can access it.
        """
        if self._is_default:
            own_folder(self.folder, f"the directory's folder {self.folder}")

    def _look(self, known: Mapping[str, int]) -> dict[str, int]:
        """Return when each member file was changed; remove files of expired members."""
        found: dict[str, int] = {}
        over: dict[str, tuple[int, float]] = {}
        now = time.time_ns()
        looked_at = asyncio.get_running_loop().time()
        for entry, changed in self._files():
            key = unquote(entry.name.removesuffix(_ENDING))
            lives = changed >= now or known.get(key) == changed
            room = len(found) < MEMBERS_MAX
            if lives and room and entry.name.endswith(_ENDING):
                found[key] = changed
            if changed >= now or len(over) >= MEMBERS_MAX:
                continue
            before = self._over.get(entry.name, (0, 0.0))
            same = before[0] == changed
            over[entry.name] = before if same else (changed, looked_at)
            expired = same and looked_at - before[1] >= self.over_s
            if expired and self._may_go(entry.name, key):
                Path(entry.path).unlink(missing_ok=True)
        self._over = over  # bounded: MEMBERS_MAX
        return found

    def _files(self) -> Iterator[tuple[os.DirEntry[str], int]]:
        """Yield the folder's files, with the time of each one's last change."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # it may go meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield entry, status.st_mtime_ns

    def _may_go(self, name: str, key: str) -> bool:
        """Return whether kvwire made a file: a record, or a half-written one."""
        return name.startswith(_BESIDE) or self._is_ours(key)

    def _write(self, path: Path, value: bytes, until: float) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, beside = tempfile.mkstemp(prefix=_BESIDE, dir=self.folder)
        try:
            with open(number, "wb") as file:  # noqa: PTH123 - a descriptor
                file.write(value)
            os.utime(beside, (until, until))
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise

    def _read(self, key: str) -> bytes:
        with self._path(key).open("rb") as file:
            return file.read(RECORD_BYTES_MAX + 1)

    def _is_ours(self, key: str) -> bool:
        """Return whether a file holds a record under its own key."""
        with suppress(OSError, UsageError):
            return Record.decode(self._read(key)).key == key
        return False

    def _path(self, key: str) -> Path:
        # The name of a file that is not a record need not be valid text.
        return self.folder / (quote(key, safe="", errors="surrogateescape") + _ENDING)


# The prefix of files that are being written.
_BESIDE: Final = ".kvwire-"
