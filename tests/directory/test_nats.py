"""A real NATS, one that is not there, and what its bucket does not take."""

from __future__ import annotations

import pytest

from kvwire import ConnectError, UsageError
from kvwire.directory import open_directory
from tests.directory.records import record
from tests.support.servers import free_port, nats_server


async def test_fleets_have_buckets() -> None:
    with nats_server() as server:
        url = f"nats://127.0.0.1:{server.port}?bucket="
        a, b = open_directory(url + "a"), open_directory(url + "b")
        await a.announce(record(1))
        assert await b.members() == ()
        assert await a.members() == (record(1),)
        await a.close()
        assert await b.members() == ()
        await b.close()


async def test_a_key_may_be_an_address() -> None:
    with nats_server() as server:
        directory = open_directory(f"nats://127.0.0.1:{server.port}")
        made = record(1, incarnation="", address="unix:///run/x.y*>")
        await directory.announce(made)
        assert await directory.members() == (made,)
        await directory.close()


async def test_a_lease_that_the_bucket_does_not_keep() -> None:
    pytest.importorskip("nats", reason="nats is not installed: pip install nats-py")
    directory = open_directory("nats://127.0.0.1:1?lease_s=5")
    with pytest.raises(UsageError, match=r"10 s.*5 s: add \?lease_s="):
        await directory.announce(record(1))
    await directory.close()


async def test_a_server_that_is_not_there() -> None:
    pytest.importorskip("nats", reason="nats is not installed: pip install nats-py")
    directory = open_directory(f"nats://user:secret@127.0.0.1:{free_port()}")
    with pytest.raises(ConnectError) as caught:
        await directory.members()
    assert "secret" not in str(caught.value)
    await directory.close()
