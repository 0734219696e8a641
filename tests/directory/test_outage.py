"""Real servers that are killed and come back with nothing in them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from kvwire.directory import ChangeKind, open_directory
from tests.directory.records import a_lease_has_ended, record
from tests.support.servers import nats_server, redis_server

SERVERS = {"redis": redis_server, "nats": nats_server}


@pytest.mark.parametrize("kind", SERVERS)
async def test_members_come_back_after_the_server_was_killed(kind: str) -> None:
    with SERVERS[kind]() as server:
        url = f"{kind}://127.0.0.1:{server.port}"
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
