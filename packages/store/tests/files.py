"""Files whose system calls fail, or end the process, when a test says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from kvwire_store.address import TierAddress
from kvwire_store.store import BlockStore
from kvwire_store.tiers.base import Tier
from kvwire_store.tiers.directory import File, Views
from kvwire_store.tiers.disk import DiskTier

Hook = Callable[[str, "Scripted", Views | None, int], None]
"""Called in front of each system call, with its name, memory and offset."""


class Scripted(File):
    hook: Hook

    def preadv(self, views: Views, offset: int) -> int:
        self._ask("preadv", views, offset)
        return super().preadv(views, offset)

    def preadv_at_once(self, views: Views, offset: int) -> int:
        raise BlockingIOError

    def pwritev(self, views: Views, offset: int) -> int:
        self._ask("pwritev", views, offset)
        return super().pwritev(views, offset)

    def sync(self) -> None:
        self._ask("sync", None, 0)
        super().sync()

    def allocate(self, offset: int, nbytes: int) -> None:
        self._ask("allocate", None, offset)
        super().allocate(offset, nbytes)

    def tear(self, views: Views, offset: int) -> int:
        """Write half of the first piece: what a call leaves that is cut off."""
        return os.pwrite(self._fd, views[0][: max(1, views[0].nbytes // 2)], offset)

    def _ask(self, call: str, views: Views | None, offset: int) -> None:
        type(self).hook(call, self, views, offset)


def scripted(hook: Hook) -> type[Scripted]:
    return type("Hooked", (Scripted,), {"hook": staticmethod(hook)})


class Faults:
    """A hook that lets chosen calls fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        """The error of each call that fails."""
        self.tearing: set[str] = set()
        """Those that have done half of it by then."""

    def __call__(
        self, call: str, file: Scripted, views: Views | None, offset: int
    ) -> None:
        """Count the call, and fail it if it is one that fails."""
        self.calls.append(call)
        if call in self.failing:
            code = self.failing[call]
            if call in self.tearing and views is not None:
                file.tear(views, offset)
            raise OSError(code, os.strerror(code))

    def full(self) -> None:
        self.failing["pwritev"] = errno.ENOSPC

    def torn(self, call: str, code: int) -> None:
        """From now on a call does half of what it should, and fails."""
        self.failing[call] = code
        self.tearing.add(call)

    def broken(self) -> None:
        self.failing |= dict.fromkeys(("preadv", "pwritev", "sync"), errno.EIO)


async def disk(
    path: Any,
    size: str = "1MiB",
    hook: Hook | None = None,
    kind: type[DiskTier] = DiskTier,
) -> DiskTier:
    address = TierAddress.parse(f"disk:{path}?size={size}")
    file_type = File if hook is None else scripted(hook)
    return await kind.open(address, file_type=file_type)


def store_on(*below: Tier, memory: str = "memory:128KiB", **how: Any) -> BlockStore:
    return BlockStore(
        TierAddress.parse(memory),
        below,
        how.get("write", "through"),
        how.get("tenants"),
    )
