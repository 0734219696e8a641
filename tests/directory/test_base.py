"""Announcing and watching go on while a directory is away, and after it is back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvwire import ClosedOK, ConnectError, UsageError
from kvwire.directory import ChangeKind, Directory
from kvwire.directory.base import Batch
from tests.directory.records import a_lease_has_ended, record


class Fake(Directory):
    """A table in memory, which can be away."""

    def __init__(self) -> None:
        super().__init__("fake://user:secret@host:1/path")
        self.away = False
        self.there: dict[str, bytes] = {}
        self.writes = 0
        self.written = asyncio.Event()
        self._followers: set[asyncio.Queue[Batch | None]] = set()

    def lose(self, *, everything: bool = False) -> None:
        """Be away; what was there may be gone as well."""
        self.away = True
        if everything:
            self.there.clear()
        self.tell(None)

    def tell(self, batch: Batch | None) -> None:
        for follower in self._followers:
            follower.put_nowait(batch)

    def reach(self) -> None:
        if self.away:
            raise ConnectError("nobody is there")

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        self.reach()
        self.writes += 1
        self.written.set()
        self.there[key] = value
        self.tell({key: value})

    async def erase(self, key: str) -> None:
        self.reach()
        self.there.pop(key, None)
        self.tell({key: None})

    async def follow(self) -> AsyncGenerator[Batch, None]:
        self.reach()
        queue: asyncio.Queue[Batch | None] = asyncio.Queue()
        self._followers.add(queue)
        try:
            yield dict(self.there)
            while (batch := await queue.get()) is not None:
                yield batch
        finally:
            self._followers.discard(queue)
        raise ConnectError("the server has gone")


async def test_a_directory_is_shown_without_its_password() -> None:
    assert str(Fake()) == "fake://host:1/path"


async def test_members_that_a_lost_directory_forgot_have_a_lease_to_come_back() -> None:
    fake, one, another = Fake(), record(1, lease_s=0.5), record(2, lease_s=0.5)
    await fake.write(one.key, one.encode(), 0.5)
    await fake.announce(another)
    async with aclosing(fake.watch()) as changes:
        joined = {(await anext(changes)).record.name for _ in range(2)}
        assert joined == {"n1", "n2"}
        fake.lose(everything=True)
        pending = asyncio.ensure_future(anext(changes))
        # Longer than a lease: nobody can say who is there.
        await a_lease_has_ended(0.7)
        assert not pending.done()
        fake.away = False
        left = await pending
        assert left.kind is ChangeKind.LEFT
        assert left.record == one
        assert fake.there == {another.key: another.encode()}
    await fake.close()
    assert not fake.there


async def test_announcing_waits_for_a_directory_that_is_away() -> None:
    fake = Fake()
    fake.away = True
    announced = asyncio.ensure_future(fake.announce(record(1)))
    await asyncio.sleep(0)
    assert not announced.done()
    fake.away = False
    await announced
    assert set(fake.there) == {record(1).key}
    await fake.close()


async def test_a_member_that_nobody_waits_for_is_announced_all_the_same() -> None:
    fake = Fake()
    fake.away = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await fake.announce(record(1))
    fake.away = False
    await fake.written.wait()
    assert set(fake.there) == {record(1).key}
    await fake.withdraw(record(1).key)
    assert not fake.there
    await fake.close()


async def test_a_withdrawal_that_cannot_be_said_does_not_fail() -> None:
    fake = Fake()
    await fake.announce(record(1))
    fake.away = True
    await fake.withdraw(record(1).key)
    await fake.close()
    assert set(fake.there) == {record(1).key}, "its lease will end it"


async def test_a_record_that_is_replaced_is_not_renewed() -> None:
    fake = Fake()
    await fake.announce(record(1, lease_s=0.5))
    await fake.announce(record(1, lease_s=0.5, load=1.0))
    for _ in range(3):
        fake.written.clear()
        await fake.written.wait()
        assert fake.there == {record(1).key: record(1, lease_s=0.5, load=1.0).encode()}
    await fake.close()


async def test_an_error_of_a_subclass_is_not_hidden() -> None:
    class ReadOnly(Fake):
        async def write(self, key: str, value: bytes, lease_s: float) -> None:
            raise UsageError("somebody else announces here")

    directory = ReadOnly()
    with pytest.raises(UsageError, match="somebody else"):
        await directory.announce(record(1))
    await directory.close()


async def test_a_closed_directory_announces_nobody() -> None:
    fake = Fake()
    await fake.close()
    with pytest.raises(ClosedOK):
        await fake.announce(record(1))


async def test_what_is_no_record_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = Fake()
    fake.there = {"a": b"{}", "b": b"[]", record(1).key: record(1).encode()}
    assert await fake.members() == (record(1),)
    assert fake.ignored == 2
    assert caplog.text.count("an entry was ignored") == 1
    await fake.close()


async def test_members_of_a_directory_that_is_away() -> None:
    fake = Fake()
    fake.away = True
    with pytest.raises(ConnectError):
        await fake.members("role=decode")
    await fake.close()


async def test_a_library_that_swallows_a_cancellation_does_not_keep_a_close() -> None:
    """One prefill process of a fleet never ended: its renewal had gone on."""

    class Swallows(Fake):
        async def write(self, key: str, value: bytes, lease_s: float) -> None:
            await super().write(key, value, lease_s)
            if self.writes > 1:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    directory = Swallows()
    await directory.announce(record(1, lease_s=0.5))
    while directory.writes < 2:
        directory.written.clear()
        await directory.written.wait()
    await directory.close()
    assert not directory.there
