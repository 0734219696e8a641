"""Redis and Valkey in the forms they have in the field, for a directory and a tier."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.support import inside
from tests.support.cases import each

pytest.importorskip("redis", reason="redis is not installed: pip install redis")

from redis import Redis
from redis.exceptions import RedisError

from kvwire import ConnectError, UsageError
from kvwire.directory import ChangeKind, open_directory
from kvwire.directory.redis import RedisDirectory
from kvwire.directory.redis_servers import of_server
from kvwire_store import BlockStore
from kvwire_store.tiers.redis import RedisTier
from packages.store.tests.contract import tier_of
from tests.directory.records import record
from tests.directory.redis_forms import (
    KINDS,
    address_of,
    answering,
    behind_tls,
    until_refused,
    until_taken,
    used,
    with_replica,
)
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.certificates import Authority
from tests.support.pairs import until
from tests.support.proxy import Cut, Direction, Ending, Latency, Proxy
from tests.support.servers import (
    Server,
    free_port,
    in_cluster,
    redis_cluster,
    redis_sentinel,
    redis_server,
)
from tests.support.waiting import eventually

# Rights that the pages name.
RIGHTS: Final = {
    "tier": "~kvwire:* +set +get +getrange +strlen +touch +unlink +scan",
    "directory": "~kvwire:* &kvwire:* +set +getrange +unlink +scan +publish +subscribe",
}
WATCHING: Final = (
    "~kvwire:*",
    "&kvwire:*",
    "+getrange",
    "+scan",
    "+subscribe",
    "+ping",
)
CLUSTER_RIGHTS: Final = "+cluster|slots +command"


def url_of(*servers: Server, more: str = "") -> str:
    return f"redis://{','.join(f'127.0.0.1:{one.port}' for one in servers)}{more}"


# --- a server that takes no writes ----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_became_a_replica_is_let_go_of(kind: str) -> None:
    """Its name leads to another one for new connections; old ones stay as they are."""
    with with_replica() as (first, second, one, two):
        async with (
            Proxy(address_of(first)) as name,
            used(kind, f"redis://127.0.0.1:{name.address.port}") as write,
        ):
            assert await write() == ""
            two.replicaof("NO", "ONE")
            two.flushall()
            name.server = address_of(second)
            one.replicaof("127.0.0.1", second.port)
            await until_taken(write)
            assert two.dbsize() > 0


@pytest.mark.parametrize("kind", KINDS)
async def test_the_host_of_a_list_that_takes_writes(kind: str) -> None:
    """The first is a replica; then the primary dies and the replica takes over."""
    with with_replica() as (first, second, _, two):
        async with used(kind, url_of(second, first)) as write:
            assert await write() == ""
            first.kill()
            await until_refused(write, "the server is a read-only replica")
            two.replicaof("NO", "ONE")
            await until_taken(write)


@pytest.mark.parametrize(
    ("text", "about_the_server"),
    [
        *((code, True) for code in ("READONLY", "LOADING", "MASTERDOWN", "MISCONF")),
        *((code, True) for code in ("CLUSTERDOWN", "NOREPLICAS", "BUSY")),
        *((code, True) for code in ("NOAUTH", "DENIED", "ANOTHER")),
        *((code, False) for code in ("OOM", "WRONGTYPE", "NOPERM", "ERR")),
        ("ERR SELECT is not allowed", False),
        *((code, False) for code in ("TRYAGAIN a", "ASK 1 a:1", "MOVED 1 a:1")),
        ("CLUSTERDOWN Hash slot not served", False),
        ("ERR max number of clients reached", True),
    ],
)
def test_what_an_error_is_about(text: str, about_the_server: bool) -> None:
    text = text if " " in text else f"{text} a reason"
    with (
        redis_server() as server,
        Redis("127.0.0.1", server.port) as plain,
        pytest.raises(RedisError) as caught,
    ):
        plain.eval("return redis.error_reply(ARGV[1])", 0, text)
    assert of_server(caught.value) is about_the_server


REFUSALS: Final = {
    "replicas": ("min-replicas-to-write", "1", "0", "NOREPLICAS"),
    "memory": ("maxmemory", "1", "0", "maxmemory"),
    # It cannot save to /proc, and has noticed that by now.
    "disk": ("stop-writes-on-bgsave-error", "yes", "no", "MISCONF"),
}


@pytest.fixture(params=REFUSALS)
def refusing(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Any, str]]:
    """A server, what has it refuse writes or take them, and what it says then."""
    option, refuses, takes, code = REFUSALS[request.param]
    with (
        redis_server("--save", "3600 1000000", "--dir", "/proc") as server,
        Redis("127.0.0.1", server.port) as plain,
    ):

        def refuse(yes: bool) -> None:
            if code == "MISCONF" and yes:
                plain.bgsave()
            plain.config_set(option, refuses if yes else takes)

        yield server, refuse, code


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_takes_no_writes_for_a_while(
    kind: str, refusing: tuple[Server, Any, str]
) -> None:
    server, refuse, code = refusing
    async with used(kind, url_of(server)) as write:
        assert await write() == ""
        refuse(True)
        await until_refused(write, code)
        refuse(False)
        await until_taken(write)
        assert await write() == ""


async def test_a_server_that_refuses_writes_is_read(
    refusing: tuple[Server, Any, str],
) -> None:
    server, refuse, code = refusing
    source, target = Filled(8, seed=1), Filled(8)
    async with BlockStore.open([url_of(server)]) as store:

        async def put(name: str) -> str:
            put = await store.put(chain(8, name), source.cache, range(8))
            return " ".join(map(str, put.missing.reasons))

        async def hits() -> int:
            await inside.tiers(store).memory.empty()
            outcome = await store.get(chain(8, "first"), target.cache, range(8))
            return len(outcome.landed)

        assert await put("first") == ""
        refuse(True)
        await until_refused(partial(put, "refused"), code)
        assert code in store.report[url_of(server)]
        for _ in range(4):
            assert await hits() == 8
        refuse(False)
        await until_taken(partial(put, "taken"))
        assert await hits() == 8
        assert store.report[url_of(server)] == ""


async def test_a_key_on_its_way_is_followed_and_its_server_keeps_the_others() -> None:
    """A slot moves to a new node, which the clients' tables do not have yet."""
    source, target = Filled(16, seed=1), Filled(16)
    with (
        redis_cluster(masters=1) as servers,
        tempfile.TemporaryDirectory() as folder,
        redis_server(*in_cluster(folder)) as added,
        Redis("127.0.0.1", servers[0].port) as old,
        Redis("127.0.0.1", added.port) as new,
    ):
        bus = new.config_get("cluster-port")["cluster-port"]
        old.cluster("meet", "127.0.0.1", added.port, bus)
        ids = [str(one.cluster("myid"), "ascii") for one in (old, new)]
        eventually(lambda: ids[1] in str(old.cluster("nodes")))
        eventually(lambda: ids[0] in str(new.cluster("nodes")))
        eventually(lambda: new.cluster("info")["cluster_state"] == "ok")
        async with BlockStore.open([url_of(servers[0])]) as store:

            async def complete() -> bool:
                await inside.tiers(store).memory.empty()
                outcome = await store.get(chain(16), target.cache, range(16))
                blocks = outcome.landed.ids().tolist()
                assert np.array_equal(source.tokens(blocks), target.tokens(blocks))
                return outcome.complete and store.report[url_of(servers[0])] == ""

            put = await store.put(chain(16), source.cache, range(16))
            assert put.complete
            for key in list(old.scan_iter("kvwire*"))[:3]:
                slot = old.cluster("keyslot", key)
                new.cluster("setslot", slot, "importing", ids[0])
                old.cluster("setslot", slot, "migrating", ids[1])
                old.execute_command("MIGRATE", "127.0.0.1", added.port, key, 0, 2000)
                assert await complete()
                for one in (new, old):
                    one.cluster("setslot", slot, "node", ids[1])
                assert await complete()
            assert new.dbsize() == 3
            new.flushall()
            assert not await complete()
            assert (await store.put(chain(16), source.cache, range(16))).complete
            assert new.dbsize() == 3
            assert await complete()


async def test_blocks_that_were_acknowledged_and_evicted() -> None:
    source, target = Filled(512, LARGE, seed=1), Filled(512, LARGE)
    with redis_server() as server, Redis("127.0.0.1", server.port) as plain:
        plain.config_set("maxmemory-policy", "allkeys-lru")
        plain.config_set("maxmemory", plain.info("memory")["used_memory"] + (16 << 20))
        async with BlockStore.open([url_of(server)]) as store:
            put = await store.put(chain(512), source.cache, range(512))
            assert put.complete, put.missing.reasons
            await inside.tiers(store).memory.empty()
            outcome = await store.get(chain(512), target.cache, range(512))
            landed = outcome.landed.ids().tolist()
            assert 0 < len(landed) < 512
            evicted = f"it was evicted from {url_of(server)} before it was read"
            known = {"it is not in the store", evicted}
            assert set(outcome.missing.reasons) <= known
            assert np.array_equal(source.tokens(landed), target.tokens(landed))


# --- connections ----------------------------------------------------------------------


async def test_a_restart_costs_no_put_for_each_connection() -> None:
    source = Filled(seed=1)
    with redis_server() as server:
        async with BlockStore.open([url_of(server)]) as store:

            async def put(name: str) -> bool:
                return (
                    await store.put(chain(4, name), source.cache, range(4))
                ).complete

            assert all(await asyncio.gather(*(put(f"a{n}") for n in range(8))))
            server.kill()
            server.start()
            assert [await put(f"b{n}") for n in range(4)] == [True] * 4
            assert all(await asyncio.gather(*(put(f"c{n}") for n in range(8))))


# uvloop asks the system in C, where no name can be made up.
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answers", [False, True])
async def test_a_name_whose_first_address_is_of_no_use(
    kind: str, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses, or accepts and never answers."""
    real = socket.getaddrinfo

    def resolve(host: str, *more: Any, **named: Any) -> list[Any]:
        hosts = ["127.0.0.2", "127.0.0.1"] if host == "redis.test" else [host]
        return [one for host in hosts for one in real(host, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with redis_server() as server, contextlib.ExitStack() as stack:
        if answers:
            stack.enter_context(socket.create_server(("127.0.0.2", server.port)))
        more = "?timeout=30" if kind == "tier" else ""
        async with (
            asyncio.timeout(60),
            used(kind, f"redis://redis.test:{server.port}{more}") as write,
        ):
            assert await write() == ""
        server.kill()
        async with used(kind, f"redis://redis.test:{server.port}") as write:
            why = await write()
            named = ("127.0.0.2", "127.0.0.1")
            assert all(address in why for address in named), why


CUTS: Final = [Cut(Direction.TO_CLIENT, 20, ending) for ending in Ending]


@pytest.mark.parametrize(
    ("kind", "toxic"),
    [
        *((kind, cut) for kind in KINDS for cut in CUTS),
        # What comes after the timeout is not taken for a later answer.
        ("tier", Latency(Direction.TO_CLIENT, 2.0)),
    ],
    ids=str,
)
async def test_a_proxy_that_cuts_or_is_slow(kind: str, toxic: Cut | Latency) -> None:
    with redis_server() as server:
        async with Proxy(address_of(server)) as proxy:
            more = "?timeout=0.5" if kind == "tier" else ""
            url = f"redis://127.0.0.1:{proxy.address.port}{more}"
            async with used(kind, url) as write:
                await until_taken(write)
                proxy.toxics = (toxic,)
                await until_refused(write, "127.0.0.1")
                proxy.toxics = ()
                await until_taken(write)
                assert await write() == ""


@pytest.mark.parametrize("kind", KINDS)
async def test_tls_and_a_password(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    authority = Authority(tmp_path)
    ca_file = str(authority.root.cert_file)
    mine, client = authority.issue("localhost"), authority.issue("client")
    files = (
        f"tls_ca_file=~/{authority.root.cert_file.name}"
        f"&tls_cert_file={client.cert_file}"
        f"&tls_key_file={client.key_file}"
    )
    with redis_server("--requirepass", "secret") as server:
        async with behind_tls(server, mine, ca_file) as port:
            at = f"rediss://:secret@localhost:{port}"
            async with used(kind, f"{at}?{files}") as write:
                assert await write() == ""
            # The name that was dialled is what counts, and not its address.
            other = at.replace("localhost", "127.0.0.1")
            async with used(kind, f"{other}?{files}") as write:
                assert "certificate is not valid for '127.0.0.1'" in await write()
            with pytest.raises(
                UsageError, match="tls_ca_file='/none': the file does not"
            ):
                async with used(kind, f"{at}?tls_ca_file=/none") as write:
                    await write()


# --- who may ask ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_user_with_the_rights_that_the_page_names(kind: str) -> None:
    with redis_server() as server, Redis("127.0.0.1", server.port) as plain:
        rights = RIGHTS[kind].split()
        plain.execute_command("ACL", "SETUSER", "kv", "on", ">secret", *rights)
        url = f"redis://kv:secret@127.0.0.1:{server.port}"
        async with used(kind, url) as write:
            assert await write() == ""
        # Without one of them the reason names it.
        plain.execute_command("ACL", "SETUSER", "kv", "-set")
        async with used(kind, url) as write:
            assert "'set' command" in await write()


async def test_a_user_who_may_only_watch() -> None:
    with redis_server() as server, Redis("127.0.0.1", server.port) as plain:
        plain.execute_command("ACL", "SETUSER", "kv", "on", ">secret", *WATCHING)
        announcing = open_directory(url_of(server))
        watching = open_directory(f"redis://kv:secret@127.0.0.1:{server.port}")
        assert isinstance(watching, RedisDirectory)
        watching.silence_s = 0.05
        pings = plain.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"]
        async with aclosing(watching.watch()) as changes:
            pending = asyncio.ensure_future(anext(changes))

            def asked() -> bool:
                stats: dict[str, Any] = plain.info("commandstats")
                return bool(stats.get("cmdstat_ping", {"calls": 0})["calls"] > pings)

            await until(asked)
            await announcing.announce(record(1))
            assert (await pending).record == record(1)
        await announcing.close()
        await watching.close()


@pytest.mark.parametrize("writable", ["yes", "no"])
async def test_a_replica_is_of_no_use_to_those_who_only_watch(writable: str) -> None:
    """Nor one that takes writes, which no other server gets."""
    with with_replica() as (first, second, one, two):
        for client in (one, two):
            client.execute_command("ACL", "SETUSER", "kv", "on", ">secret", *WATCHING)
        two.config_set("replica-read-only", writable)
        hosts = url_of(second, first).removeprefix("redis://")
        directory = open_directory(f"redis://kv:secret@{hosts}")
        assert await directory.members() == ()
        connected = {client: client.info("commandstats") for client in (one, two)}
        assert "cmdstat_subscribe" in connected[one]
        assert "cmdstat_subscribe" not in connected[two]
        await directory.close()


# --- what is refused by name ----------------------------------------------------------


async def test_a_sentinel() -> None:
    with redis_sentinel() as server:
        with pytest.raises(UsageError, match="is a Sentinel: name the servers"):
            await BlockStore.open([url_of(server)])
        directory = open_directory(url_of(server))
        with pytest.raises(ConnectError, match="is a Sentinel: name the servers"):
            await directory.members()
        await directory.close()


@pytest.mark.parametrize(
    ("path", "why"),
    [("/99", "DB index is out of range"), ("/abc", "/abc is not a database number")],
)
async def test_a_database_that_there_is_not(path: str, why: str) -> None:
    with redis_server() as server:
        with pytest.raises(UsageError, match=why):
            await BlockStore.open([url_of(server, more=path)])
        with pytest.raises((UsageError, ConnectError), match=why):
            await open_directory(url_of(server, more=path)).members()


def test_a_list_of_hosts_is_for_kinds_that_have_it() -> None:
    with pytest.raises(UsageError, match="pass one host, not 2"):
        open_directory("dns://a:1,b:2")
    with pytest.raises(UsageError, match="write redis://HOST:PORT"):
        open_directory("redis://a:1,")
    with pytest.raises(UsageError, match="write redis://HOST:PORT"):
        open_directory("redis:")


# --- answers that are none ------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_with_as_many_clients_as_it_takes_is_named(kind: str) -> None:
    with redis_server("--maxclients", "2") as server, contextlib.ExitStack() as held:
        for _ in range(2):
            where = "127.0.0.1", server.port
            client = held.enter_context(socket.create_connection(where))
            client.sendall(b"PING\r\n")
            assert client.recv(5) == b"+PONG"
        async with used(kind, f"redis://127.0.0.1:{server.port}") as write:
            assert "maxclients" in await write()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [True, False])
@each(
    "said",
    {
        "a line of 100 KB": b"+" + b"a" * 100_000 + b"\r\n",
        "bytes": bytes(range(128, 256)) * 600,
        "nested arrays": b"*1\r\n" * 100_000,
        "a length that is no number": b"$abc\r\n",
        "a negative length": b"$-7\r\n",
        "a number that is none": b":1e3\r\n",
        "controls": b"-ERR \x1b[2J\r\n",
        "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "nothing": b"",
    },
)
async def test_answers_that_are_no_resp(said: bytes, first: bool, kind: str) -> None:
    """From the first one on, or once it has shown that it takes writes."""

    def answer(command: bytes) -> bytes:
        if first or command not in (b"CLIENT", b"HELLO", b"PING", b"UNLINK"):
            return said
        return b":0\r\n" if command == b"UNLINK" else b"+PONG\r\n"

    async with answering(answer) as port:
        more = "?timeout=0.3" if kind == "tier" else ""
        if not said and kind == "directory":
            pytest.skip("it has no timeout of its own to wait for: 5 s")
        async with used(kind, f"redis://127.0.0.1:{port}{more}") as write:
            why = await write()
            assert why
            assert why.isprintable()
            assert len(why) < 1000


async def test_values_that_are_too_long_are_not_read_whole() -> None:
    source, huge = Filled(seed=1), 64 << 20
    with redis_server() as server, Redis("127.0.0.1", server.port) as plain:
        async with Proxy(address_of(server)) as proxy:
            url = f"redis://127.0.0.1:{proxy.address.port}"
            async with BlockStore.open([url]) as store:
                assert (await store.put(chain(3), source.cache, range(3))).complete
                first = next(iter(plain.scan_iter("kvwire:*")))
                plain.setrange(first, huge, b"x")
                await inside.tiers(store).memory.empty()
                outcome = await store.get(chain(3), source.cache, range(3))
                assert len(outcome.landed) == 2
                # It is gone, so that it is in the way of no put.
                assert not plain.exists(first)
                assert tier_of(store, RedisTier).stats().damaged_blocks == 1
            directory = open_directory(url)
            await directory.announce(record(1))
            plain.setrange("kvwire:member:other", huge, b"x")
            plain.rpush("kvwire:member:list", "a")
            assert await directory.members() == (record(1),)
            assert directory.ignored == 1
            await directory.close()
        assert proxy.passed[Direction.TO_CLIENT] < huge / 32


# --- watchers -------------------------------------------------------------------------


async def test_a_watcher_whose_server_others_have_left() -> None:
    """It became a replica of nobody it can reach; it answers, and publishes nothing."""
    with with_replica() as (first, second, one, two):
        async with Proxy(address_of(first)) as name:
            watching = open_directory(f"redis://127.0.0.1:{name.address.port}")
            assert isinstance(watching, RedisDirectory)
            watching.silence_s = 0.2
            announcing = open_directory(url_of(second))
            async with aclosing(watching.watch()) as changes:
                pending = asyncio.ensure_future(anext(changes))
                await until(lambda: one.pubsub_numsub("kvwire:members")[0][1])
                two.replicaof("NO", "ONE")
                name.server = address_of(second)
                one.replicaof("127.0.0.1", free_port())
                await announcing.announce(record(1))
                async with asyncio.timeout(60):
                    assert (await pending).record == record(1)
            await announcing.close()
            await watching.close()


# --- clusters -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Server]]:
    with redis_cluster() as servers:
        yield servers


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cluster_and_a_restricted_user(
    kind: str, cluster: list[Server]
) -> None:
    rights = f"{RIGHTS[kind]} {CLUSTER_RIGHTS}".split()
    for server in cluster:
        with Redis("127.0.0.1", server.port) as plain:
            plain.execute_command("ACL", "SETUSER", "kv", "on", ">secret", *rights)
    async with used(kind, f"redis://kv:secret@127.0.0.1:{cluster[0].port}") as write:
        for _ in range(8):
            assert await write() == ""


async def test_members_in_a_cluster(cluster: list[Server]) -> None:
    """Their keys are at all servers, and messages arrive at all."""
    records = [record(number) for number in range(1, 33)]
    announcing = open_directory(url_of(cluster[0]))
    watching = open_directory(url_of(cluster[4]))
    async with aclosing(watching.watch()) as changes:
        for one in records:
            await announcing.announce(one)
            change = await anext(changes)
            assert (change.kind, change.record) == (ChangeKind.JOINED, one)
        assert {one.name for one in await watching.members()} == {
            one.name for one in records
        }
        await announcing.close()
        left = {(await anext(changes)).record.name for _ in records}
        assert left == {one.name for one in records}
    await watching.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_master_of_a_cluster_is_lost(kind: str, number: signal.Signals) -> None:
    """The one that the URL names; its replica takes over."""
    with redis_cluster() as servers:
        async with used(kind, url_of(servers[0])) as write:
            for _ in range(8):
                assert await write() == ""
            servers[0].signal(number)
            for _ in range(8):
                await until_taken(write)


@pytest.mark.slow
@pytest.mark.parametrize("back", [True, False])
async def test_a_watcher_whose_node_is_lost(back: bool) -> None:
    """The one it subscribed at; it is at another one, or at the same again."""
    with redis_cluster() as servers:
        watching, announcing = (
            open_directory(url_of(servers[at], servers[2])) for at in (0, 1)
        )
        async with aclosing(watching.watch()) as changes:
            await announcing.announce(record(1, lease_s=30))
            assert (await anext(changes)).record == record(1, lease_s=30)
            servers[0].kill()
            if back:
                servers[0].start()
            await announcing.announce(record(2, lease_s=30))
            async with asyncio.timeout(60):
                assert (await anext(changes)).record == record(2, lease_s=30)
        await announcing.close()
        await watching.close()


@pytest.mark.slow
async def test_a_node_that_restarts_costs_no_put_for_each_connection() -> None:
    source = Filled(16, seed=1)
    with redis_cluster() as servers:
        async with BlockStore.open([url_of(servers[0])]) as store:

            async def put(name: str) -> set[str]:
                """Return why something is missing."""
                put = await store.put(chain(16, name), source.cache, range(16))
                return set(put.missing.reasons)

            async def put_side_by_side(name: str) -> set[str]:
                puts = (put(f"{name}{n}") for n in range(8))
                return set().union(*await asyncio.gather(*puts))

            assert not await put_side_by_side("a")
            servers[1].kill()
            servers[1].start()
            # All dead connections are met at once, and gone with the first of them.
            assert await put_side_by_side("b")
            names = (f"c{n}" for n in range(1_000_000))
            async with asyncio.timeout(60):
                while await put(next(names)):
                    pass
            assert not await put_side_by_side("d")
