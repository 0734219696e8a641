"""Files whose system calls fail, or end the process, when a test says so."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable
from typing import Any

from kvwire.store.address import TierAddress
from kvwire.store.disk import DiskTier
from kvwire.store.file import File
from kvwire.store.store import BlockStore
from kvwire.store.tier import Tier

Hook = Callable[[str, "Scripted", tuple[int, int] | None, int], None]
"""Called in front of each system call, with its name, window and offset."""


class Scripted(File):
    """Asks a hook before each system call."""

    hook: Hook

    def preadv(self, window: tuple[int, int], offset: int) -> int:
        """See File."""
        self._ask("preadv", window, offset)
        return super().preadv(window, offset)

    def pwritev(self, window: tuple[int, int], offset: int) -> int:
        """See File."""
        self._ask("pwritev", window, offset)
        return super().pwritev(window, offset)

    def sync(self) -> None:
        """See File."""
        self._ask("sync", None, 0)
        super().sync()

    def allocate(self, offset: int, nbytes: int) -> None:
        """See File."""
        self._ask("allocate", None, offset)
        super().allocate(offset, nbytes)

    def tear(self, window: tuple[int, int], offset: int) -> int:
        """Write half of the first iovec: what a call leaves that is cut off."""
        address, length = (ctypes.c_uint64 * 2).from_address(window[0])
        half = (ctypes.c_char * max(1, length // 2)).from_address(address)
        return os.pwrite(self._fd, half, offset)

    def _ask(self, call: str, window: tuple[int, int] | None, offset: int) -> None:
        type(self).hook(call, self, window, offset)


def scripted(hook: Hook) -> type[Scripted]:
    """A kind of file with a hook."""
    return type("Hooked", (Scripted,), {"hook": staticmethod(hook)})


class Faults:
    """A hook that lets chosen calls fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        """The error of each call that fails."""

    def __call__(
        self, call: str, file: Scripted, window: tuple[int, int] | None, offset: int
    ) -> None:
        """Count the call, and fail it if it is one that fails."""
        self.calls.append(call)
        if call in self.failing:
            code = self.failing[call]
            raise OSError(code, os.strerror(code))

    def full(self) -> None:
        """From now on there is no room on the disk."""
        self.failing["pwritev"] = errno.ENOSPC

    def broken(self) -> None:
        """From now on nothing can be read or written."""
        self.failing |= dict.fromkeys(("preadv", "pwritev", "sync"), errno.EIO)


class Killer:
    """A hook that ends the process in front of a call, or in the middle of it.

    Args:
        at: Which call, from 0 on.
        torn: Whether half of it is done, if it writes.
        end: How the process is ended.
    """

    def __init__(self, at: int, *, torn: bool, end: Callable[[], None]) -> None:
        self.at = at
        self.count = 0
        self._torn = torn
        self._end = end

    def __call__(
        self, call: str, file: Scripted, window: tuple[int, int] | None, offset: int
    ) -> None:
        """Count the call, and end the process if it is the one."""
        if self.count == self.at and self._torn and call == "pwritev":
            assert window is not None
            file.tear(window, offset)
        if self.count >= self.at:
            self._end()
        self.count += 1


def kill_myself() -> None:
    """What nothing in this process can delay."""
    os.kill(os.getpid(), signal.SIGKILL)


async def disk(path: Any, size: str = "1MiB", hook: Hook | None = None) -> DiskTier:
    """A disk tier of its own."""
    address = TierAddress.parse(f"disk:{path}?size={size}")
    file_type = File if hook is None else scripted(hook)
    return await DiskTier.open(address, file_type=file_type)


def store_on(*below: Tier, memory: str = "memory:128KiB", **how: Any) -> BlockStore:
    """A store with tiers that are open already."""
    return BlockStore(TierAddress.parse(memory), below, how.get("write", "through"))
