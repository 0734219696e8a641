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

Hook = Callable[[str], object]
"""Called in front of each system call, with its name."""


class Scripted(File):
    hook: Hook

    def preadv(self, views: Views, offset: int) -> int:
        type(self).hook("preadv")
        return super().preadv(views, offset)

    def preadv_at_once(self, views: Views, offset: int) -> int:
        raise BlockingIOError

    def pwritev(self, views: Views, offset: int) -> int:
        type(self).hook("pwritev")
        return super().pwritev(views, offset)

    def sync(self) -> None:
        type(self).hook("sync")
        super().sync()

    def allocate(self, offset: int, nbytes: int) -> None:
        type(self).hook("allocate")
        super().allocate(offset, nbytes)


def scripted(hook: Hook) -> type[Scripted]:
    return type("Hooked", (Scripted,), {"hook": staticmethod(hook)})


class Faults:
    """A hook that lets chosen calls fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        """The error of each call that fails."""

    def __call__(self, call: str) -> None:
        """Count the call, and fail it if it is one that fails."""
        self.calls.append(call)
        if code := self.failing.get(call):
            raise OSError(code, os.strerror(code))

    def full(self) -> None:
        self.failing["pwritev"] = errno.ENOSPC

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
