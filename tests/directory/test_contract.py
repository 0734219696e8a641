"""Every directory keeps every promise: one test for each.

Each announces members of a role of its own, so that others may use the directory
meanwhile. What a server's end does to it is for the directory's own tests. One of your
own keeps them too if ``DIRECTORY=mine://host`` names it in the environment.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, Final

import pytest
from msgspec.structs import replace

from kvwire.directory import Change, ChangeKind, Directory, Record, open_directory
from kvwire.directory.limits import RECORD_BYTES_MAX
from kvwire.directory.record import MEMBER_LEASE_S_MIN
from tests.support.cases import each
from tests.support.scopes import in_scope
from tests.support.servers import nats_server, ray_cluster, redis_server

# How long anything may take: a directory that cannot push is looked at now and then.
pytestmark = [
    pytest.mark.timeout(60),
    # Ray's own.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning"),
]
_SHORT_S: Final = MEMBER_LEASE_S_MIN
_MANY: Final = 200


OWN = os.environ.get("DIRECTORY", "")


@pytest.fixture(
    scope="module", params=["file", "redis", "nats", "ray", *([OWN] if OWN else ())]
)
def url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    match request.param:
        case "file":
            yield f"file:{tmp_path_factory.mktemp('fleet')}?interval_s=0.05"
        case "redis":
            with redis_server() as server:
                yield f"redis://127.0.0.1:{server.port}?prefix=kit"
        case "nats":
            with nats_server() as server:
                yield f"nats://127.0.0.1:{server.port}?bucket=kit"
        case "ray":
            with ray_cluster():
                yield "ray:kit"
        case own:
            yield own


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

    async def expect_only(self, *records: Record) -> None:
        """Fail unless these are there, each once, and no others."""
        found = sorted(await self.found(), key=lambda one: one.key)
        assert found == sorted(records, key=lambda one: one.key)


@pytest.fixture
async def members(url: str) -> AsyncIterator[Members]:
    """Of a role of its own; no task is left at the end."""
    tasks = asyncio.all_tasks()
    members = Members(url)
    if url.startswith("ray:"):
        # Its actor is started first, which takes longer than a promise may.
        await members.directory().members()
    yield members
    for directory in members.opened:
        await directory.close()
    assert asyncio.all_tasks() - {asyncio.current_task()} <= tasks


async def expect(
    changes: AsyncGenerator[Change, None], kind: ChangeKind, record: Record
) -> None:
    """Fail unless this is the next change."""
    assert await anext(changes) == Change(kind, record)


async def test_empty(members: Members) -> None:
    await members.expect_only()


async def test_announced(members: Members) -> None:
    """With all that it said, and for everybody."""
    record = members.record(
        model="demo",
        specs={"full": "ab" * 16},
        transports=("tcp", "local"),
        load=0.5,
        labels={"zone": "a", "Ä": "ß/ =,"},
    )
    await members.directory().announce(record)
    await members.expect_only(record)


async def test_joined(members: Members) -> None:
    """Who watches gets who is there, and then who comes."""
    first, second = members.record(name="first"), members.record(name="second")
    directory = members.directory()
    await directory.announce(first)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, first)
        await directory.announce(second)
        await expect(changes, ChangeKind.JOINED, second)


async def test_changed(members: Members) -> None:
    """A record that is announced anew takes the old one's place."""
    old, directory = members.record(load=0.25), members.directory()
    new = replace(old, load=0.75)
    await directory.announce(old)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, old)
        await directory.announce(new)
        await expect(changes, ChangeKind.CHANGED, new)
    await members.expect_only(new)


async def test_one_name(members: Members) -> None:
    """Two members of one name are two, told by incarnation."""
    one, another = members.record(), members.record()
    first, second = members.directory(), members.directory()
    await first.announce(one)
    await second.announce(another)
    await members.expect_only(one, another)
    await first.withdraw(one.key)
    await members.expect_only(another)


async def test_withdrawn(members: Members) -> None:
    """To do so twice does no harm."""
    record, directory = members.record(), members.directory()
    await directory.announce(record)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, record)
        await directory.withdraw(record.key)
        await directory.withdraw(record.key)
        await expect(changes, ChangeKind.LEFT, record)
    await members.expect_only()


async def test_closed(members: Members) -> None:
    """Closing a directory withdraws what was announced there."""
    record, directory = members.record(), members.directory()
    await directory.announce(record)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, record)
        await directory.close()
        await expect(changes, ChangeKind.LEFT, record)


async def test_lease(members: Members) -> None:
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


async def test_selected(members: Members) -> None:
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


async def test_cancelled_close(members: Members) -> None:
    """A member whose close is cancelled at its first step leaves all the same."""
    record, directory = members.record(), members.directory()
    await directory.announce(record)
    async with members.watch(members.directory()) as changes:
        await expect(changes, ChangeKind.JOINED, record)
        closing = asyncio.create_task(directory.close())
        await asyncio.sleep(0)
        closing.cancel()
        await expect(changes, ChangeKind.LEFT, record)


async def test_cancelled_list(members: Members) -> None:
    """No task of a list is left by a scope that cancels it, at any moment."""
    directory, turns = members.directory(), 0
    while await in_scope(turns, directory.members):
        turns += 1 + turns // 8
    assert turns > 1


async def test_many(members: Members) -> None:
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


@each(
    "value",
    {
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
    },
)
async def test_what_is_no_record(members: Members, value: bytes) -> None:
    """It is counted, and harms no other."""
    directory, watched = members.directory(), members.directory()
    record, key = members.record(), secrets.token_hex(16)
    try:
        async with members.watch(watched) as changes:
            await directory.write(key, value, record.lease_s)
            await directory.announce(record)
            await expect(changes, ChangeKind.JOINED, record)
        assert watched.ignored > 0
        await members.expect_only(record)
    finally:
        await directory.erase(key)
