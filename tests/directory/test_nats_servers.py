"""NATS in the forms of the field: buckets of others, clusters, TLS, users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvwire import ConnectError, UsageError
from kvwire.directory import ChangeKind, Directory, open_directory
from kvwire.directory.nats import NatsDirectory
from tests.directory.records import record
from tests.support.certificates import Authority
from tests.support.pairs import until
from tests.support.servers import nats_cluster, nats_server

nats: Any = pytest.importorskip("nats", reason="nats is not installed")


@asynccontextmanager
async def stream_of(port: int) -> AsyncIterator[Any]:
    """Use JetStream as an operator does."""
    client = await nats.connect(f"nats://127.0.0.1:{port}")
    try:
        yield client.jetstream()
    finally:
        await client.close()


@asynccontextmanager
async def opened(*urls: str) -> AsyncIterator[list[Directory]]:
    directories = [open_directory(url) for url in urls]
    try:
        yield directories
    finally:
        for directory in directories:
            await directory.close()


@pytest.mark.parametrize(
    "made",
    [
        {"ttl": 30.0, "storage": nats.js.api.StorageType.FILE},
        {"ttl": 600.0},
        {"ttl": None},
        {"ttl": 30.0, "history": 5},
        {"ttl": 30.0, "max_value_size": 4096, "max_bytes": 1 << 20},
    ],
)
async def test_a_bucket_that_operators_have_made_is_used(made: dict[str, Any]) -> None:
    with nats_server() as server:
        async with stream_of(server.port) as stream:
            await stream.create_key_value(bucket="kvwire", **made)
        url = f"nats://127.0.0.1:{server.port}"
        async with opened(url, f"{url}?lease_s=60") as (one, another):
            await one.announce(record(1))
            await another.announce(record(2))
            assert len(await another.members()) == 2


async def test_a_bucket_that_keeps_entries_too_short_a_time_is_refused() -> None:
    with nats_server() as server:
        url = f"nats://127.0.0.1:{server.port}"
        async with opened(f"{url}?lease_s=5") as (directory,):
            with pytest.raises(UsageError, match=r"lease of 10 s.* 5 s .*'kvwire'"):
                await directory.announce(record(1, lease_s=10))


async def test_the_dead_are_not_listed_where_a_bucket_keeps_them() -> None:
    with nats_server() as server:
        async with stream_of(server.port) as stream:
            await stream.create_key_value(bucket="kvwire")
        url = f"nats://127.0.0.1:{server.port}"
        async with opened(url, url) as (one, watching):
            dead = record(2, lease_s=0.5)
            await one.announce(record(1, lease_s=0.5))
            await one.write(dead.key, dead.encode(), dead.lease_s)
            async with aclosing(watching.watch()) as changes:
                joined = {(await anext(changes)).record.name for _ in range(2)}
                assert joined == {"n1", "n2"}
                left = await anext(changes)
                assert (left.kind, left.record) == (ChangeKind.LEFT, dead)
            assert await watching.members() == (record(1, lease_s=0.5),)


async def _lose_stream(stream: Any) -> None:
    await stream.delete_stream("KV_kvwire")


async def _lose_consumers(stream: Any) -> None:
    for consumer in await stream.consumers_info("KV_kvwire"):
        await stream.delete_consumer("KV_kvwire", consumer.name)


@pytest.mark.parametrize("lose", [_lose_stream, _lose_consumers])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_watch_that_the_server_has_lost_is_begun_anew(
    lose: Callable[[Any], Awaitable[None]],
    others: int,
) -> None:
    """The connection lives on, and nothing arrives on it any more."""
    with nats_server() as server:
        url = f"nats://127.0.0.1:{server.port}"
        async with opened(url, url) as (announcing, watching):
            assert isinstance(watching, NatsDirectory)
            watching.silence_s = 0.3
            there = record(9, lease_s=2)
            if others:
                await announcing.announce(there)
            async with aclosing(watching.watch()) as changes:
                pending = asyncio.ensure_future(anext(changes))
                if others:
                    assert (await pending).record == there
                    pending = asyncio.ensure_future(anext(changes))
                async with stream_of(server.port) as stream:
                    await _consumers_are_there(stream)
                    await lose(stream)
                await announcing.announce(record(1))
                joined = await pending
                assert (joined.kind, joined.record) == (ChangeKind.JOINED, record(1))


async def _consumers_are_there(stream: Any) -> None:
    async def there() -> bool:
        try:
            return bool(await stream.consumers_info("KV_kvwire"))
        except nats.js.errors.NotFoundError:
            return False

    while not await there():  # each answer of the server is a turn
        pass


async def test_a_cluster_goes_on_without_one_of_its_servers() -> None:
    with nats_cluster() as servers:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        url = f"nats://{hosts}?replicas=3"
        async with opened(url, url) as (announcing, watching):
            async with asyncio.timeout(60):
                await announcing.announce(record(1, lease_s=30))
            async with aclosing(watching.watch()) as changes:
                assert (await anext(changes)).record.name == "n1"
                servers[0].kill()
                pending = asyncio.ensure_future(anext(changes))
                async with asyncio.timeout(60):
                    await announcing.announce(record(2, lease_s=30))
                    joined = await pending
                assert (joined.kind, joined.record.name) == (ChangeKind.JOINED, "n2")


async def test_each_server_that_is_not_there_is_named() -> None:
    async with opened("nats://user:secret@127.0.0.1:1,127.0.0.1:2") as (directory,):
        with pytest.raises(
            ConnectError, match=r"0\.1:1: .*; 127\.0\.0\.1:2: "
        ) as caught:
            await directory.members()
        assert "secret" not in str(caught.value)


async def test_a_server_without_jetstream_says_what_it_lacks() -> None:
    with nats_server(jetstream=False) as server:
        async with opened(f"nats://127.0.0.1:{server.port}") as (directory,):
            with pytest.raises(ConnectError, match="JetStream is missing"):
                await directory.members()


async def test_a_password(tmp_path: Path) -> None:
    with nats_server("--user", "me", "--pass", "se/cret") as server:
        where = f"127.0.0.1:{server.port}"
        async with opened(
            f"nats://me:se%2Fcret@{where}", f"nats://me:wrong@{where}"
        ) as (right, wrong):
            await right.announce(record(1))
            assert await right.members() == (record(1),)
            with pytest.raises(ConnectError, match=r"(?i)authorization"):
                await wrong.members()


async def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ca_file = str(authority.root.cert_file)
    mine, client = authority.issue("localhost"), authority.issue("client")
    options = {
        "--tlsverify": "",
        "--tlscert": str(mine.cert_file),
        "--tlskey": str(mine.key_file),
        "--tlscacert": ca_file,
    }
    with nats_server(
        *(part for pair in options.items() for part in pair if part)
    ) as server:
        files = f"tls_ca_file={ca_file}&tls_cert_file={client.cert_file}"
        url = f"tls://localhost:{server.port}?{files}&tls_key_file={client.key_file}"
        async with opened(url) as (directory,):
            await directory.announce(record(1))
            assert await directory.members() == (record(1),)
        other = url.replace("localhost", "127.0.0.1")
        async with opened(other) as (directory,):
            with pytest.raises(ConnectError, match="certificate"):
                await directory.members()
    with pytest.raises(UsageError, match="no environment variable KV_NO_SUCH"):
        open_directory("tls://localhost?tls_ca_file=$KV_NO_SUCH/ca.pem")
    with pytest.raises(UsageError, match="tls_ca_file, tls_cert_file or tls_key_file"):
        open_directory("tls://localhost?tls_ca_file=/none")


async def test_a_user_with_the_rights_that_the_page_names(tmp_path: Path) -> None:
    file = tmp_path / "nats.conf"
    file.write_text(
        """
        authorization { users = [
          { user: operator, password: o }
          { user: kv, password: k, permissions: {
              publish: [
                "$KV.kvwire.>", "$JS.API.STREAM.INFO.KV_kvwire",
                "$JS.API.CONSUMER.*.KV_kvwire.>", "$JS.API.CONSUMER.CREATE.KV_kvwire"
              ]
              subscribe: ["_INBOX.>"]
          } }
        ] }
        """
    )
    with nats_server("-c", str(file)) as server:
        made = await nats.connect(f"nats://operator:o@127.0.0.1:{server.port}")
        await made.jetstream().create_key_value(bucket="kvwire", ttl=60.0)
        await made.close()
        url = f"nats://kv:k@127.0.0.1:{server.port}"
        async with opened(url, url) as (announcing, watching):
            await announcing.announce(record(1))
            async with aclosing(watching.watch()) as changes:
                assert (await anext(changes)).record == record(1)
                await announcing.announce(record(2))
                assert (await anext(changes)).record == record(2)


async def test_a_bucket_that_is_full_takes_a_member_when_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with nats_server() as server:
        async with stream_of(server.port) as stream:
            bucket = await stream.create_key_value(bucket="kvwire", max_bytes=4096)
            await bucket.put("other", bytes(3900))
            url = f"nats://127.0.0.1:{server.port}"
            async with opened(url, url) as (announcing, watching):
                announced = asyncio.ensure_future(announcing.announce(record(1)))
                await until(lambda: "maximum bytes exceeded" in caplog.text)
                assert not announced.done()
                assert await watching.members() == ()
                await bucket.purge("other")
                await announced
                assert await watching.members() == (record(1),)


@pytest.mark.parametrize("url", ["nats:", "nats://", "nats:host:4222", "nats://a,,b"])
def test_a_url_without_a_host_says_what_to_write(url: str) -> None:
    with pytest.raises(UsageError, match="write nats://HOST:PORT,HOST:PORT"):
        open_directory(url)
