"""The conformance kit of directories: what every one of them must do.

>>> report = await check_directory("redis://localhost:6379?prefix=test")

Each check announces members of a role of its own, so that others may use the directory
meanwhile. What a server's end does to it is for the directory's own tests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, Unpack

from msgspec.structs import replace

from kvwire.directory import Change, ChangeKind, Directory, Record, open_directory
from kvwire.limits import MEMBER_LEASE_S_MIN, RECORD_BYTES_MAX
from kvwire.testing.conformance.check import Check, Group, Report, require
from kvwire.testing.conformance.runner import CheckOptions, run_all

TIMEOUT_S: Final = 15.0
"""How long anything may take: a directory that cannot push is looked at now and then"""
_SHORT_S: Final = MEMBER_LEASE_S_MIN
_MANY: Final = 200


class DirectoryRig:
    """Holds the directories that one check opens, all of one URL."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._opened: list[Directory] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.role: str = secrets.token_hex(8)

    async def open(self) -> None:
        """Note what is under way before the check runs."""
        self._tasks = asyncio.all_tasks()
        self._deadline = asyncio.get_running_loop().time() + self._timeout_s

    async def aclose(self) -> None:
        """Close every directory, and look for tasks that are left."""
        for directory in self._opened:
            await directory.close()
        left = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        require(not left, f"tasks are left: {left}")

    def directory(self) -> Directory:
        """Open the directory once more, as another process would."""
        directory = open_directory(self._url)
        self._opened.append(directory)
        return directory

    def record(self, **fields: Any) -> Record:
        """Make the record of a new member of this check."""
        fields = {"name": "one", "address": "tcp://127.0.0.1:7400", **fields}
        return Record(role=self.role, incarnation=secrets.token_hex(16), **fields)

    def watch(self, directory: Directory, more: str = "") -> aclosing[Any]:
        """Watch the members of this check."""
        return aclosing(directory.watch(f"role={self.role}{more}"))

    async def next(self, changes: AsyncGenerator[Change, None]) -> Change:
        """Wait for the next change."""
        async with asyncio.timeout_at(self._deadline):
            return await anext(changes)

    async def expect(
        self, changes: AsyncGenerator[Change, None], kind: ChangeKind, record: Record
    ) -> None:
        """Fail unless this is the next change."""
        change = await self.next(changes)
        require(
            change == Change(kind, record),
            f"expected that {record.name!r} has {kind}, got {change}",
        )

    async def announce(self, directory: Directory, record: Record) -> None:
        """Announce a record, in time."""
        async with asyncio.timeout_at(self._deadline):
            await directory.announce(record)

    async def members(self, directory: Directory) -> set[str]:
        """Return the keys of the members of this check."""
        async with asyncio.timeout_at(self._deadline):
            found = await directory.members(f"role={self.role}")
        return {record.key for record in found}


# A directory has one kind of checks.
group: Group = Group("directory")
check = group.links


@check("empty", "Nobody is there before anybody was announced")
async def _(rig: DirectoryRig) -> None:
    found = await rig.members(rig.directory())
    require(not found, f"members {found} of a role that nobody has")


@check("announced", "A member is there, with all that it said, for everybody")
async def _(rig: DirectoryRig) -> None:
    record = rig.record(
        model="demo",
        specs={"full": "ab" * 16},
        transports=("tcp", "local"),
        load=0.5,
        labels={"zone": "a", "Ä": "ß/ =,"},
    )
    await rig.announce(rig.directory(), record)
    found = await rig.directory().members(f"role={rig.role}")
    require(found == (record,), f"announced {record}, found {found}")


@check("joined", "Who watches gets who is there, and then who comes")
async def _(rig: DirectoryRig) -> None:
    first, second = rig.record(name="first"), rig.record(name="second")
    directory = rig.directory()
    await rig.announce(directory, first)
    async with rig.watch(rig.directory()) as changes:
        await rig.expect(changes, ChangeKind.JOINED, first)
        await rig.announce(directory, second)
        await rig.expect(changes, ChangeKind.JOINED, second)


@check("changed", "A record that is announced anew takes the old one's place")
async def _(rig: DirectoryRig) -> None:
    old, directory = rig.record(load=0.25), rig.directory()
    new = replace(old, load=0.75)
    await rig.announce(directory, old)
    async with rig.watch(rig.directory()) as changes:
        await rig.expect(changes, ChangeKind.JOINED, old)
        await rig.announce(directory, new)
        await rig.expect(changes, ChangeKind.CHANGED, new)
    found = await rig.directory().members(f"role={rig.role}")
    require(found == (new,), f"after the change there are {found}")


@check("one-name", "Two members of one name are two, told by incarnation")
async def _(rig: DirectoryRig) -> None:
    one, another = rig.record(), rig.record()
    first, second = rig.directory(), rig.directory()
    await rig.announce(first, one)
    await rig.announce(second, another)
    found = await rig.members(rig.directory())
    require(found == {one.key, another.key}, f"found {found}")
    await first.withdraw(one.key)
    found = await rig.members(rig.directory())
    require(found == {another.key}, f"after one was withdrawn there are {found}")


@check("withdrawn", "Who is withdrawn has left; to do so twice does no harm")
async def _(rig: DirectoryRig) -> None:
    record, directory = rig.record(), rig.directory()
    await rig.announce(directory, record)
    async with rig.watch(rig.directory()) as changes:
        await rig.expect(changes, ChangeKind.JOINED, record)
        await directory.withdraw(record.key)
        await directory.withdraw(record.key)
        await rig.expect(changes, ChangeKind.LEFT, record)
    found = await rig.members(rig.directory())
    require(not found, f"there still are {found}")


@check("closed", "Closing a directory withdraws what was announced there")
async def _(rig: DirectoryRig) -> None:
    record, directory = rig.record(), rig.directory()
    await rig.announce(directory, record)
    async with rig.watch(rig.directory()) as changes:
        await rig.expect(changes, ChangeKind.JOINED, record)
        await directory.close()
        await rig.expect(changes, ChangeKind.LEFT, record)


@check("lease", "Who is not heard of within its lease has left; others have not")
async def _(rig: DirectoryRig) -> None:
    dead = rig.record(name="dead", lease_s=3 * _SHORT_S)
    living = rig.record(name="living", lease_s=_SHORT_S)
    directory = rig.directory()
    await rig.announce(directory, living)
    async with rig.watch(rig.directory()) as changes:
        await rig.expect(changes, ChangeKind.JOINED, living)
        # As a process does that is killed after its first word.
        await directory.write(dead.key, dead.encode(), dead.lease_s)
        await rig.expect(changes, ChangeKind.JOINED, dead)
        await rig.expect(changes, ChangeKind.LEFT, dead)
    found = await rig.members(rig.directory())
    require(living.key in found, "a member was lost that was renewed")


@check("selected", "A selector sees who is meant, and who is not any more left")
async def _(rig: DirectoryRig) -> None:
    directory = rig.directory()
    mine, other = rig.record(labels={"zone": "a"}), rig.record(labels={"zone": "b"})
    moved = replace(mine, labels={"zone": "b"})
    async with rig.watch(rig.directory(), ",zone=a") as changes:
        await rig.announce(directory, other)
        await rig.announce(directory, mine)
        await rig.expect(changes, ChangeKind.JOINED, mine)
        await rig.announce(directory, moved)
        await rig.expect(changes, ChangeKind.LEFT, mine)


@check("many", f"{_MANY} members are seen, each once, by two watchers")
async def _(rig: DirectoryRig) -> None:
    records = [rig.record(name=f"n{i}") for i in range(_MANY)]
    directory = rig.directory()
    for record in records[: _MANY // 2]:
        await directory.write(record.key, record.encode(), record.lease_s)
    async with (
        rig.watch(rig.directory()) as one,
        rig.watch(rig.directory()) as another,
    ):
        seen = [await rig.next(one), await rig.next(another)]
        for record in records[_MANY // 2 :]:
            await directory.write(record.key, record.encode(), record.lease_s)
        for changes in (one, another):
            seen += [await rig.next(changes) for _ in range(_MANY - 1)]
    names = sorted(change.record.name for change in seen)
    require(
        names == sorted(2 * [record.name for record in records]),
        f"{len(names)} changes of {len(set(names))} members; {_MANY} are there",
    )
    for record in records:
        await directory.erase(record.key)


_BAD: Final[dict[str, bytes]] = {
    "empty": b"{}",
    "no-json": b"\x00\xff not json",
    "a-list": b"[1, 2]",
    "deep": b"[" * (RECORD_BYTES_MAX - 1),
    "no-name": b'{"address": "127.0.0.1:1"}',
    "no-port": b'{"name": "x", "address": "127.0.0.1"}',
    "control-characters": b'{"name": "\\u001b[2J", "address": "127.0.0.1:1"}',
    "another-key": b'{"name": "x", "address": "127.0.0.1:1", "incarnation": "'
    + b"0" * 32
    + b'"}',
    "huge-load": b'{"name": "x", "address": "127.0.0.1:1", "load": 1e999}',
    "endless-lease": b'{"name": "x", "address": "127.0.0.1:1", "lease_s": 1e9}',
    "too-long": b'{"name": "x", "address": "127.0.0.1:1", "more": "'
    + b"x" * RECORD_BYTES_MAX
    + b'"}',
}


@check("bad", "What is no record is counted, and harms no other: {}", _BAD)
async def _(rig: DirectoryRig, value: bytes) -> None:
    directory, watched = rig.directory(), rig.directory()
    record, key = rig.record(), secrets.token_hex(16)
    try:
        async with rig.watch(watched) as changes:
            await directory.write(key, value, record.lease_s)
            await rig.announce(directory, record)
            await rig.expect(changes, ChangeKind.JOINED, record)
        require(watched.ignored > 0, "nothing was counted")
        found = await rig.members(rig.directory())
        require(found == {record.key}, f"found {found}")
    finally:
        await directory.erase(key)


DIRECTORY_CHECKS: tuple[Check, ...] = tuple(group.of_links)
"""Every check of directories, in the order they run."""


async def check_directory(
    url: str, *, timeout_s: float = TIMEOUT_S, **options: Unpack[CheckOptions]
) -> Report:
    """Hold a directory against the contract of :mod:`kvwire.directory.base`.

    Args:
        url: Names the directory; what others have announced there is left alone.
        timeout_s: How long each check may take.
        **options: See :class:`~kvwire.testing.conformance.runner.CheckOptions`.

    Raises:
        UsageError: There is no such directory, or a check is not known.
        CheckFailed: A check failed.

    Cancel safety: safe, records of the check under way may stay for their lease.
    """
    return await run_all(
        url.partition(":")[0],
        DIRECTORY_CHECKS,
        lambda: DirectoryRig(url, timeout_s),
        kind=" of directories",
        **options,
    )
