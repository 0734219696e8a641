"""Announcing and watching go on while a directory is away, and after it is back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvwire import ClosedOK, ConnectError, UsageError
from kvwire.aio import end_task
from kvwire.directory import ChangeKind
from kvwire.directory.base import Batch
from tests.directory.memory import MemoryDirectory
from tests.directory.records import a_lease_has_ended, record
from tests.support.logs import warned
from tests.support.virtual_time import pass_time, run


async def test_members_that_a_lost_directory_forgot_have_a_lease_to_come_back() -> None:
    here = MemoryDirectory()
    one, another = record(1, lease_s=0.5), record(2, lease_s=0.5)
    await here.write(one.key, one.encode(), 0.5)
    await here.announce(another)
    async with aclosing(here.watch()) as changes:
        joined = {(await anext(changes)).record.name for _ in range(2)}
        assert joined == {"n1", "n2"}
        here.hub.values.clear()
        here.hub.lose()
        pending = asyncio.ensure_future(anext(changes))
        # Longer than a lease: nobody can say who is there.
        await a_lease_has_ended(0.7)
        assert not pending.done()
        here.hub.away = False
        left = await pending
        assert left.kind is ChangeKind.LEFT
        assert left.record == one
        assert here.hub.there == {another.key: another.encode()}
    await here.close()
    assert not here.hub.there


async def test_what_has_ended_is_not_ended_again() -> None:
    """But a directory that could not be left is left by the next close."""
    ends: list[str] = []

    class Failing(MemoryDirectory):
        async def disconnect(self) -> None:
            ends.append("disconnect")
            if len(ends) == 1:
                raise ConnectError("the first time")

    here = Failing()
    with pytest.raises(ConnectError):
        await here.close()
    async with here:
        await here.close()
    assert ends == ["disconnect"] * 2


async def test_announcing_waits_for_a_directory_that_is_away() -> None:
    here = MemoryDirectory()
    here.hub.away = True
    announced = asyncio.ensure_future(here.announce(record(1)))
    await asyncio.sleep(0)
    assert not announced.done()
    here.hub.away = False
    await announced
    assert set(here.hub.there) == {record(1).key}
    await here.close()


async def test_a_server_that_is_silent_is_called_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error of a limit of time has no text."""

    class Silent(MemoryDirectory):
        asked = asyncio.Event()

        async def write(self, key: str, value: bytes, lease_s: float) -> None:
            self.asked.set()
            raise TimeoutError

    here = Silent()
    announced = asyncio.ensure_future(here.announce(record(1)))
    await here.asked.wait()
    await here.close()
    await announced
    (line,) = warned(caplog)
    assert "'it does not answer'; retrying" in line


async def test_a_member_that_nobody_waits_for_is_announced_all_the_same() -> None:
    here = MemoryDirectory()
    here.hub.away = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await here.announce(record(1))
    here.hub.away = False
    await here.hub.written.wait()
    assert set(here.hub.there) == {record(1).key}
    await here.withdraw(record(1).key)
    assert not here.hub.there
    await here.close()


async def test_a_withdrawal_that_cannot_be_said_does_not_fail() -> None:
    here = MemoryDirectory()
    await here.announce(record(1))
    here.hub.away = True
    await here.withdraw(record(1).key)
    await here.close()
    assert set(here.hub.there) == {record(1).key}, "its lease will end it"


async def test_a_record_that_is_replaced_is_not_renewed() -> None:
    here = MemoryDirectory()
    await here.announce(record(1, lease_s=0.5))
    await here.announce(record(1, lease_s=0.5, load=1.0))
    for _ in range(3):
        here.hub.written.clear()
        await here.hub.written.wait()
        assert here.hub.there == {
            record(1).key: record(1, lease_s=0.5, load=1.0).encode()
        }
    await here.close()


async def test_who_is_announced_again_while_it_is_withdrawn_is_there() -> None:
    here, again = MemoryDirectory(), record(1, load=0.5)
    for turns in range(1, 8):
        await here.announce(record(1))
        withdrawing = asyncio.ensure_future(here.withdraw(again.key))
        for _ in range(turns):
            await asyncio.sleep(0)
        await here.announce(again)
        await withdrawing
        assert here.hub.there == {again.key: again.encode()}
    await here.close()
    assert not here.hub.there


async def test_an_error_of_a_subclass_is_not_hidden() -> None:
    class ReadOnly(MemoryDirectory):
        async def write(self, key: str, value: bytes, lease_s: float) -> None:
            raise UsageError("somebody else announces here")

    directory = ReadOnly()
    with pytest.raises(UsageError, match="somebody else"):
        await directory.announce(record(1))
    await directory.close()


async def test_a_closed_directory_announces_nobody() -> None:
    here = MemoryDirectory()
    await here.close()
    with pytest.raises(ClosedOK):
        await here.announce(record(1))


async def test_what_is_no_record_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = MemoryDirectory()
    for key, raw in (("a", b"{}"), ("b", b"[]"), (record().key, record().encode())):
        await here.write(key, raw, 1.0)
    assert await here.members() == (record(1),)
    assert here.ignored == 2
    assert caplog.text.count("ignored an entry") == 1
    await here.close()


async def test_a_library_that_swallows_a_cancellation_does_not_keep_a_close() -> None:
    """One prefill process of a fleet never ended: its renewal had gone on."""

    class Swallows(MemoryDirectory):
        async def write(self, key: str, value: bytes, lease_s: float) -> None:
            await super().write(key, value, lease_s)
            if self.hub.writes > 1:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    directory = Swallows()
    await directory.announce(record(1, lease_s=0.5))
    while directory.hub.writes < 2:
        directory.hub.written.clear()
        await directory.hub.written.wait()
    await directory.close()
    assert not directory.hub.there


class _Deaf(MemoryDirectory):
    """Receives nothing after its first list: the server has lost the watch."""

    lists = 0

    async def follow(self) -> AsyncGenerator[Batch, None]:
        self.lists += 1
        async with aclosing(super().follow()) as batches:
            yield await anext(batches)
        await asyncio.Event().wait()


async def test_nobody_leaves_because_a_watch_receives_nothing() -> None:
    announcing = MemoryDirectory()
    deaf = _Deaf(announcing.hub)
    living, dead = record(1, lease_s=0.5), record(2, lease_s=0.5)
    await announcing.announce(living)
    await announcing.write(dead.key, dead.encode(), 0.5)
    async with aclosing(deaf.watch()) as changes:
        assert {(await anext(changes)).record.name for _ in range(2)} == {"n1", "n2"}
        left = await anext(changes)
        assert (left.kind, left.record) == (ChangeKind.LEFT, dead)
        pending = asyncio.ensure_future(anext(changes))
        await a_lease_has_ended(0.5)
        assert not pending.done(), "it is in each list"
        # One list for the first leases, one for the next: not one for each look.
        assert 2 <= deaf.lists <= 4
        await end_task(pending)
    await announcing.close()


async def test_a_list_that_never_comes_lets_nobody_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = MemoryDirectory()
    watching = _Deaf(here.hub)
    watching.list_s = 0.1
    await here.write(record(1).key, record(1, lease_s=0.5).encode(), 0.5)
    async with aclosing(watching.watch()) as changes:
        assert (await anext(changes)).kind is ChangeKind.JOINED

        async def nothing(_: object) -> AsyncGenerator[Batch, None]:
            await asyncio.Event().wait()
            yield {}

        with monkeypatch.context() as patched:
            patched.setattr(_Deaf, "follow", nothing)
            pending = asyncio.ensure_future(anext(changes))
            await a_lease_has_ended(0.7)
            assert not pending.done()
            assert "no list arrived within 0.1 s" in watching.reason
        assert (await pending).kind is ChangeKind.LEFT
    assert watching.reason == ""


class _Breaking(MemoryDirectory):
    """Its watches break right after the list."""

    lists = 0

    async def follow(self) -> AsyncGenerator[Batch, None]:
        self.lists += 1
        yield {}
        raise ConnectionError("it is overloaded")


def test_a_server_whose_watches_break_is_asked_less_and_less_often() -> None:
    async def watch() -> int:
        here = _Breaking()
        async with aclosing(here.watch()) as changes:
            pending = asyncio.ensure_future(anext(changes))
            await pass_time(60.0)
            await end_task(pending)
        return here.lists

    # Pauses of a tenth of a second would be 800 lists.
    assert 12 <= run(watch()) <= 40
