"""Directories on real servers: shared by fleets, killed, or not there."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final
from urllib.parse import quote

import pytest

from kvwire import ConnectError, UsageError
from kvwire.directory import ChangeKind, open_directory
from tests.directory.records import a_lease_has_ended, record
from tests.support.servers import free_port, nats_server, redis_server

SERVERS: Final = {"redis": redis_server, "nats": nats_server}
# What sets fleets apart that share a server.
FLEETS: Final = {"redis": "/3?prefix=", "nats": "?bucket="}


@pytest.mark.parametrize("kind", SERVERS)
async def test_members_come_back_after_the_server_was_killed(kind: str) -> None:
    """It has nothing in it when it comes back."""
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


@pytest.mark.parametrize("kind", SERVERS)
async def test_fleets_share_a_server(kind: str) -> None:
    with SERVERS[kind]() as server:
        url = f"{kind}://127.0.0.1:{server.port}{FLEETS[kind]}"
        # In Redis, names that are patterns of themselves or of each other.
        names = ("[a]*", "[a]?") if kind == "redis" else ("a", "b")
        a, b = (open_directory(url + quote(name)) for name in names)
        # A key may be an address, of any characters.
        made = record(1, incarnation="", address="unix:///run/x.y*>")
        await a.announce(made)
        assert await b.members() == ()
        assert await a.members() == (made,)
        await a.close()
        assert await b.members() == ()
        await b.close()


@pytest.mark.parametrize("scheme", ["valkey", "nats"])
async def test_a_server_that_is_not_there(scheme: str) -> None:
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    pytest.importorskip("nats", reason="nats is not installed: pip install nats-py")
    directory = open_directory(f"{scheme}://user:secret@127.0.0.1:{free_port()}")
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1") as caught:
        await directory.members()
    assert "secret" not in f"{caught.value} {caught.value.address}"
    await directory.close()


def test_an_url_that_the_library_does_not_take() -> None:
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    with pytest.raises(UsageError, match="redis"):
        open_directory("redis://host:port")
