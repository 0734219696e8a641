"""What every directory promises, as tests of a role in one: see test_contract.py.

Each announces members of a role of its own, so that others may use the directory
meanwhile. What a server's end does to it is for the directory's own tests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import pytest
from msgspec.structs import replace

from kvwire.directory import Change, ChangeKind, Directory, Record, open_directory
from kvwire.directory.limits import RECORD_BYTES_MAX
from kvwire.directory.record import MEMBER_LEASE_S_MIN
from tests.support.scopes import in_scope

# How long anything may take: a directory that cannot push is looked at now and then.
TIMEOUT_S: Final = 60.0
_SHORT_S: Final = MEMBER_LEASE_S_MIN
_MANY: Final = 200


class Members:
    """Those of one role, in directories of one URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.role = secrets.token_hex(8)
        self.opened: list[Directory] = []

    def directory(self) -> Directory:
        """Open the directory once more, as another process would."""
        self.opened.append(open_directory(self._url))
        return self.opened[-1]

    def record(self, **fields: Any) -> Record:
        """Make the record of a new member."""
        fields = {"name": "one", "address": "tcp://127.0.0.1:7400", **fields}
        return Record(role=self.role, incarnation=secrets.token_hex(16), **fields)

    def watch(self, directory: Directory, more: str = "") -> aclosing[Any]:
        """Watch the members."""
        return aclosing(directory.watch(f"role={self.role}{more}"))

    async def found(self) -> tuple[Record, ...]:
        """Look who is there, as somebody else."""
        return await self.directory().members(f"role={self.role}")

    async def require(self, *records: Record) -> None:
        """Fail unless these are there, each once, and no others."""
        found = sorted(await self.found(), key=lambda one: one.key)
        assert found == sorted(records, key=lambda one: one.key)


Promise = Callable[..., Awaitable[None]]
PROMISES: list[Any] = []
"""Each promise, as a parameter of a test."""


async def check(url: str, promise: Promise) -> None:
    """Hold the directory of a URL to a promise; no task is left at the end."""
    tasks = asyncio.all_tasks()
    members = Members(url)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await promise(members)
    finally:
        for directory in members.opened:
            await directory.close()
    assert asyncio.all_tasks() - {asyncio.current_task()} <= tasks


def promised(name: str) -> Callable[[Promise], Promise]:
    """Add the decorated coroutine to the promises."""

    def add(promise: Promise) -> Promise:
        PROMISES.append(pytest.param(promise, id=name))
        return promise

    return add


async def expect(
    changes: AsyncGenerator[Change, None], kind: ChangeKind, record: Record
) -> None:
    """Fail unless this is the next change."""
    assert await anext(changes) == Change(kind, record)


@promised("empty")
async def _(members: Members) -> None:
    await members.require()


@promised("announced")
async def _(members: Members) -> None:
    """With all that it said, and for everybody."""
    record = members.record(
        model="demo",
        specs={"full": "ab" * 16},
        transports=("tcp", "local"),
        load=0.5,
        labels={"zone": "a", "Ä": "ß/ =,"},
    )
    await members.directory().announce(record)
    await members.require(record)


@promised("joined")
async def _(members: Members) -> None:
    """Who watches gets who is there, and then who comes."""
    first, second = members.record(name="first"), members.record(name="second")
    directory = members.directory()
    await directory.announce(first)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, first)
        await directory.announce(second)
        await expect(changes, ChangeKind.JOINED, second)


@promised("changed")
async def _(members: Members) -> None:
    """A record that is announced anew takes the old one's place."""
    old, directory = members.record(load=0.25), members.directory()
    new = replace(old, load=0.75)
    await directory.announce(old)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, old)
        await directory.announce(new)
        await expect(changes, ChangeKind.CHANGED, new)
    await members.require(new)


@promised("one-name")
async def _(members: Members) -> None:
    """Two members of one name are two, told by incarnation."""
    one, another = members.record(), members.record()
    first, second = members.directory(), members.directory()
    await first.announce(one)
    await second.announce(another)
    await members.require(one, another)
    await first.withdraw(one.key)
    await members.require(another)


@promised("withdrawn")
async def _(members: Members) -> None:
    """To do so twice does no harm."""
    record, directory = members.record(), members.directory()
    await directory.announce(record)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, record)
        await directory.withdraw(record.key)
        await directory.withdraw(record.key)
        await expect(changes, ChangeKind.LEFT, record)
    await members.require()


@promised("closed")
async def _(members: Members) -> None:
    """Closing a directory withdraws what was announced there."""
    record, directory = members.record(), members.directory()
    await directory.announce(record)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, record)
        await directory.close()
        await expect(changes, ChangeKind.LEFT, record)


@promised("lease")
async def _(members: Members) -> None:
    """Who is not heard of within its lease has left; others have not."""
    dead = members.record(name="dead", lease_s=3 * _SHORT_S)
    living = members.record(name="living", lease_s=_SHORT_S)
    directory = members.directory()
    await directory.announce(living)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, living)
        # As a process does that is killed after its first word.
        await directory.write(dead.key, dead.encode(), dead.lease_s)
        await expect(changes, ChangeKind.JOINED, dead)
        await expect(changes, ChangeKind.LEFT, dead)
    assert living in await members.found()


@promised("selected")
async def _(members: Members) -> None:
    """A selector sees who is meant, and who is not any more left."""
    directory = members.directory()
    mine = members.record(labels={"zone": "a"})
    other = members.record(labels={"zone": "b"})
    moved = replace(mine, labels={"zone": "b"})
    async with members.watch(members.directory(), ",zone=a") as changes:
        await directory.announce(other)
        await directory.announce(mine)
        await expect(changes, ChangeKind.JOINED, mine)
        await directory.announce(moved)
        await expect(changes, ChangeKind.LEFT, mine)


@promised("cancelled-close")
async def _(members: Members) -> None:
    """A member whose close is cancelled at its first step leaves all the same."""
    record, directory = members.record(), members.directory()
    await directory.announce(record)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, record)
        closing = asyncio.create_task(directory.close())
        await asyncio.sleep(0)
        closing.cancel()
        await expect(changes, ChangeKind.LEFT, record)


@promised("cancelled-list")
async def _(members: Members) -> None:
    """No task of a list is left by a scope that cancels it, at any moment."""
    directory, turns = members.directory(), 0
    while await in_scope(turns, directory.members):
        turns += 1 + turns // 8
    assert turns > 1


@promised("many")
async def _(members: Members) -> None:
    """Each is seen once, by two watchers."""
    records = [members.record(name=f"n{i}") for i in range(_MANY)]
    directory = members.directory()
    for record in records[: _MANY // 2]:
        await directory.write(record.key, record.encode(), record.lease_s)
    async with (
        members.watch(members.directory()) as one,
        members.watch(members.directory()) as another,
    ):
        seen = [await anext(one), await anext(another)]
        for record in records[_MANY // 2 :]:
            await directory.write(record.key, record.encode(), record.lease_s)
        for changes in (one, another):
            seen += [await anext(changes) for _ in range(_MANY - 1)]
    names = sorted(change.record.name for change in seen)
    assert names == sorted(2 * [record.name for record in records])
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


async def _no_record(members: Members, value: bytes) -> None:
    """It is counted, and harms no other."""
    directory, watched = members.directory(), members.directory()
    record, key = members.record(), secrets.token_hex(16)
    try:
        async with members.watch(watched) as changes:
            await directory.write(key, value, record.lease_s)
            await directory.announce(record)
            await expect(changes, ChangeKind.JOINED, record)
        assert watched.ignored > 0
        await members.require(record)
    finally:
        await directory.erase(key)


for _name, _value in _BAD.items():
    promised(f"bad-{_name}")(partial(_no_record, value=_value))
