"""A real server that is killed, restarted empty, or never there."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from kvwire import ConnectError, UsageError
from kvwire.directory import ChangeKind, open_directory
from tests.directory.records import a_lease_has_ended, record
from tests.support.servers import free_port, redis_server


async def test_members_come_back_after_the_server_was_killed() -> None:
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}"
        announcing, watching = open_directory(url), open_directory(url)
        one, two = record(1, lease_s=0.5), record(2, lease_s=0.5)
        await announcing.announce(one)
        async with aclosing(watching.watch()) as changes:
            assert (await anext(changes)).record == one
            pending = asyncio.ensure_future(anext(changes))
            server.kill()
            announced = asyncio.ensure_future(announcing.announce(two))
            # Longer than a lease: who was there has not left for that.
            await a_lease_has_ended(0.7)
            assert not pending.done()
            server.start()
            await announced
            change = await pending
            assert (change.kind, change.record) == (ChangeKind.JOINED, two)
        # The one that the server forgot is announced anew as well.
        async with aclosing(watching.watch()) as changes:
            names = {(await anext(changes)).record.name for _ in range(2)}
            assert names == {"n1", "n2"}
        await announcing.close()
        assert await watching.members() == ()
        await watching.close()


async def test_fleets_have_prefixes() -> None:
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}/3?prefix="
        a, b = open_directory(url + "a"), open_directory(url + "b")
        await a.announce(record(1))
        assert await b.members() == ()
        assert await a.members() == (record(1),)
        await a.close()
        await b.close()


async def test_a_server_that_is_not_there() -> None:
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    directory = open_directory(f"valkey://:secret@127.0.0.1:{free_port()}")
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1") as caught:
        await directory.members()
    assert "secret" not in str(caught.value)
    assert "secret" not in caught.value.address
    await directory.close()


def test_an_url_that_the_library_does_not_take() -> None:
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    with pytest.raises(UsageError, match="redis"):
        open_directory("redis://host:port")
