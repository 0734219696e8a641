"""A store server beside clients that lie, stall, die, and are many."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kvwire
import kvwire_store.server.session
from kvwire import UsageError, limits
from kvwire.security.keys import write_key_file
from kvwire_store import BlockStore, StoreServer
from kvwire_store.keys import Keys, as_keys
from kvwire_store.limits import (
    STORE_LENT_SHARE,
    STORE_REQUEST_BYTES_MAX,
    STORE_REQUESTS_MAX,
)
from kvwire_store.namespace import ABSENT, Namespace
from kvwire_store.operations import base
from kvwire_store.server import messages
from kvwire_store.tiers.base import BlockResult
from kvwire_store.tiers.slabs import rounded
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from packages.store.tests.server.rig import (
    APART,
    MANY,
    NAMESPACE,
    client,
    moving,
    names,
    nothing_is_taken,
    serving,
    where,
    works,
)
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import turns, until

# --- lies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        messages.encode(messages.StoreDone(1)),
        messages.encode(messages.Find(1, names(chain(1)))),
    ],
    ids=["nothing", "another protocol", "zeros", "a reply", "no hello"],
)
async def test_who_does_not_begin_with_hello_is_dropped(message: bytes) -> None:
    async with serving() as (_, server), client(server, hello=False) as liar:
        await liar.say(message)
        assert await liar.dropped()
        await until(lambda: not server.clients())
        assert server.dropped == 1
        assert await works(server)


async def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kvwire_store.server.session, "_PATIENCE", timedelta(seconds=0.05)
    )
    async with serving() as (_, server), client(server, hello=False) as silent:
        assert await silent.dropped()
        await until(lambda: not server.clients())
        assert server.dropped == 1


async def test_the_log_names_clients_that_come_and_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the name of their process, which KVWIRE_NAME sets for a tier."""
    caplog.set_level("INFO", "kvwire.store")
    async with serving() as (_, server):
        monkeypatch.setenv("KVWIRE_NAME", "decode-7")
        assert await works(server)
        await until(lambda: not server.clients())
    texts = [record.getMessage() for record in caplog.records]
    came = [text for text in texts if text.endswith("has connected")]
    left = [text for text in texts if "has left: " in text]
    assert len(came) == len(left) == 2
    assert all("client 'decode-7' " in text for text in (*came, *left))
    assert "written" in left[0]


async def test_a_bug_of_ours_costs_one_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeTier):
        def touch(self, keys: Keys) -> None:
            if keys.tolist() == [NAMESPACE.digest + chain(1)[0]]:
                raise RuntimeError("a bug")

    async with (
        store_on(Broken()) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        client(server) as one,
    ):
        await one.say(messages.Touch(names(chain(1))))
        assert await one.dropped()
        await until(lambda: not server.clients())
        assert server.dropped == 1
        assert "RuntimeError: a bug" in caplog.text
        assert await works(server)


RAW_NUMBER = msgspec.Raw(msgspec.msgpack.encode(7))
# Fields that a later version might add, in any number.
RAW_LONG = msgspec.Raw(msgspec.msgpack.encode(["kv", [], "", bytes(100_000)]))


@pytest.mark.parametrize(
    "message",
    [
        b"\x95",
        messages.encode(messages.StoreHello(1, 1)),
        messages.encode(moving(messages.Put, chain(1)))[:-1],
        messages.encode(
            moving(
                messages.Put,
                chain(1),
                namespace=msgspec.Raw(
                    msgspec.msgpack.encode(
                        messages.NamespaceText("kv", (("layers", "0"),))
                    )
                ),
            )
        ),
        messages.encode(moving(messages.Get, chain(1), namespace=RAW_NUMBER)),
        messages.encode(moving(messages.Get, chain(1), namespace=RAW_LONG)),
        bytes(STORE_REQUEST_BYTES_MAX + 1),
    ],
    ids=[
        "cut",
        "hello again",
        "no end",
        "no spec",
        "no namespace",
        "a long namespace",
        "too long",
    ],
)
async def test_who_breaks_a_rule_later_is_dropped(message: bytes) -> None:
    async with serving() as (_, server), client(server) as liar:
        said = asyncio.create_task(liar.say(message))
        assert await liar.dropped()
        await asyncio.wait((said,))
        assert said.exception() is None or isinstance(
            said.exception(), kvwire.ConnectionClosed | kvwire.MessageTooLarge
        )
        await until(lambda: not server.clients())
        assert server.dropped == 1
        assert await works(server)


async def test_more_requests_than_allowed_end_the_connection() -> None:
    async with serving() as (_, server), client(server) as liar:
        for number in range(STORE_REQUESTS_MAX + 1):
            # Nobody sends these, so they stay open.
            put = moving(messages.Put, chain(MANY), APART, number=number)
            await liar.say(put)
        assert await liar.dropped()
        assert await works(server)


@pytest.mark.parametrize("count", [1, 2, 16, 17])
async def test_keys_of_another_space_are_refused(count: int) -> None:
    """The spec says one thing and the last key another: neither is believed."""
    space = [NAMESPACE] * (count - 1) + [Namespace("other", SPEC)]
    keys = [of.digest + one for of, one in zip(space, chain(count), strict=True)]
    async with serving() as (store, server), client(server) as liar:
        for kind in (messages.Put, messages.Get):
            lie = messages.Names.of(as_keys(keys))
            done = await liar.ask(moving(kind, chain(count), names=lie))
            assert done.table.tolist() == [BlockResult.REFUSED] * count
            assert "another namespace" in done.reason
        assert not inside.tiers(store).namespaces
        assert await works(server)


async def test_more_bytes_than_a_berth_are_refused() -> None:
    berth = 4 * SPEC.block_bytes
    async with serving(berth_bytes=berth) as (_, server), client(server) as liar:
        for kind in (messages.Put, messages.Get):
            done = await liar.ask(moving(kind, chain(5)))
            assert set(done.table.tolist()) == {BlockResult.REFUSED}
            assert str(berth) in done.reason
        assert await works(server)


async def test_blocks_that_nobody_sends_fail_by_their_deadline() -> None:
    async with serving(berths=1) as (store, server), client(server) as liar:
        done = await liar.ask(moving(messages.Put, chain(MANY), APART, timeout_ms=50))
        assert set(done.table.tolist()) == {BlockResult.FAILED}
        assert "deadline" in done.reason
        # The only berth is free again.
        assert (await liar.ask(moving(messages.Get, chain(2)))).table.tolist() == [1, 1]
        assert not len(inside.tiers(store).memory.index)
        await nothing_is_taken(store, server)


async def test_a_put_comes_into_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy at the server; one that comes too late gives its slots back."""
    copies: list[Any] = []
    monkeypatch.setattr(base, "copy", lambda *ends: copies.append(ends))
    async with serving("memory:4MiB") as (store, server), client(server) as one:
        async with client(server) as other:
            late = chain(MANY)
            await one.say(moving(messages.Put, late, APART, timeout_ms=600_000))
            await until(lambda: inside.served(server).lent_bytes > 0)
            images = [bytes([n]) * LARGE.block_bytes for n in range(MANY)]
            sent = other.connection.send(messages.payload_tag(1), b"".join(images))
            done = await other.ask(moving(messages.Put, late, APART))
            assert done.table.tolist() == [BlockResult.LANDED] * MANY
            await sent
            # The same again, which the server has by now.
            await one.connection.send(messages.payload_tag(1), b"".join(images))
            done = messages.decode_reply(await one.connection.recv(messages.TAG))
            assert isinstance(done, messages.StoreDone)
            assert done.table.tolist() == [BlockResult.LANDED] * MANY
            got = await other.ask(moving(messages.Get, late, APART, number=2))
            assert got.table.tolist() == [0] * MANY
            assert not got.images
            assert await other.connection.recv(messages.payload_tag(2)) == b"".join(
                images
            )
        assert not copies
        used_bytes = inside.tiers(store).memory.index.slabs.used_bytes
        assert used_bytes == MANY * rounded(LARGE.block_bytes)
        await until(lambda: inside.served(server).lent_bytes == 0)


async def test_who_dies_in_a_put_takes_no_slots_along() -> None:
    async with serving("memory:4MiB") as (store, server):
        async with client(server) as one:
            await one.say(moving(messages.Put, chain(MANY), APART, timeout_ms=600_000))
            await until(lambda: inside.served(server).lent_bytes > 0)
            one.connection.abort("it dies")
        await nothing_is_taken(store, server)
        assert await works(server)


@pytest.mark.parametrize("nbytes", [0, 1, MANY * LARGE.block_bytes - 1, 10**6])
async def test_a_put_of_other_bytes_than_it_says_stores_nothing(nbytes: int) -> None:
    async with serving() as (store, server), client(server) as liar:
        sent = liar.connection.send(messages.payload_tag(1), bytes(nbytes))
        done = await liar.ask(moving(messages.Put, chain(MANY), APART, timeout_ms=300))
        assert set(done.table.tolist()) == {BlockResult.FAILED}
        assert "bytes" in done.reason
        assert not len(inside.tiers(store).memory.index)
        await nothing_is_taken(store, server)
        sent.cancel()
        assert await works(server)


@pytest.mark.parametrize(
    ("count", "nbytes"),
    [(1, 0), (1, LARGE.block_bytes - 1), (MANY, 1), (MANY, LARGE.block_bytes)],
)
async def test_who_sends_other_bytes_with_a_put_is_dropped(
    count: int, nbytes: int
) -> None:
    async with serving() as (store, server), client(server) as liar:
        await liar.say(moving(messages.Put, chain(count), APART, images=bytes(nbytes)))
        assert await liar.dropped()
        await nothing_is_taken(store, server)
        assert await works(server)


async def test_small_blocks_go_with_the_request_and_come_with_the_answer() -> None:
    """Of those that are there, without holding a berth or a slot for the client."""
    images = np.arange(2 * SPEC.block_bytes).astype(np.uint8).tobytes()
    async with serving(berths=1) as (store, server), client(server) as one:
        put = await one.ask(moving(messages.Put, chain(2), images=images))
        assert put.table.tolist() == [BlockResult.LANDED] * 2
        got = await one.ask(moving(messages.Get, chain(2)[::-1]))
        assert got.table.tolist() == [BlockResult.LANDED] * 2
        assert got.images == images[SPEC.block_bytes :] + images[: SPEC.block_bytes]
        part = await one.ask(moving(messages.Get, chain(3)))
        assert part.table.tolist() == [0, 0, BlockResult.MISSING]
        assert part.images == images
        await inside.tiers(store).memory.empty()
        assert not len(inside.tiers(store).memory.index)
        (row,) = server.clients()
        assert row.read_bytes == 2 * row.written_bytes == 2 * len(images)


async def test_small_puts_evict_older_blocks_of_a_full_server() -> None:
    """At once, without a task; and those that are there already are not put again."""
    async with serving("memory:64KiB") as (store, server), client(server) as one:
        room = 64 * limits.KIB // rounded(SPEC.block_bytes)
        for number in range(room + 4):
            put = moving(messages.Put, [b"%08d" % number], number=number)
            assert (await one.ask(put)).table.tolist() == [BlockResult.LANDED]
            assert not server.clients()[0].requests
        memory = inside.tiers(store).memory
        assert len(memory.index) == room
        assert memory.index.evicted == 4
        assert store.counters.puts == store.counters.stored_blocks == room + 4
        hashes = [b"%08d" % number for number in (room, room + 9, room, room + 8)]
        again = await one.ask(moving(messages.Put, hashes, number=1))
        assert again.table.tolist() == [BlockResult.LANDED] * 4
        assert len(memory.index) == room
        assert store.counters.stored_blocks == room + 6
        assert not memory.index.pinned


async def test_the_head_of_a_small_put_stays_if_there_is_not_room_for_all() -> None:
    """Each block counts as stored; none was there before."""
    async with serving("memory:64KiB") as (store, server), client(server) as one:
        room = 64 * limits.KIB // rounded(SPEC.block_bytes)
        hashes = [b"%08d" % number for number in range(room + 8)]
        put = await one.ask(moving(messages.Put, hashes))
        assert put.table.tolist() == [BlockResult.LANDED] * (room + 8)
        got = await one.ask(moving(messages.Get, hashes[:room], number=2))
        assert got.table.tolist() == [BlockResult.LANDED] * room
        assert store.counters.stored_blocks == room + 8
        assert not store.counters.present_blocks


async def test_a_small_put_that_finds_no_room_waits_for_it() -> None:
    """And for nothing else: other requests of its client are answered meanwhile."""
    async with serving("memory:256KiB") as (store, server), client(server) as one:
        memory = inside.tiers(store).memory
        slots = memory.index.take(SPEC.block_bytes, 1000)
        await one.say(moving(messages.Put, chain(2)))
        found = await one.ask(messages.Find(2, names(chain(2))))
        assert found.table.tolist() == [ABSENT] * 2
        assert server.clients()[0].requests == 1
        memory.give_back(slots)
        done = messages.decode_reply(await one.connection.recv(messages.TAG))
        assert isinstance(done, messages.StoreDone)
        assert done.table.tolist() == [BlockResult.LANDED] * 2
        assert len(memory.index) == 2
        assert not memory.index.pinned
        await until(lambda: not server.clients()[0].requests)


async def test_a_client_of_later_versions_is_met_or_learns_which_one_is_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says so to its user; the server's log has both ranges."""
    async with serving() as (_, server):
        async with client(server, hello=False) as minor:
            welcome = await minor.ask(messages.StoreHello(1, 2))
            assert isinstance(welcome, messages.Welcome)
            assert welcome.version == 1
            assert await minor.ask(messages.Flush(7)) == messages.StoreDone(7, b"")
        async with client(server, hello=False) as major:
            welcome = await major.ask(messages.StoreHello(2, 3))
            assert isinstance(welcome, messages.Welcome)
            assert welcome.version == 1
            assert await major.dropped()
        assert "client speaks protocol versions 2 to 3, this side 1 to 1" in caplog.text
        assert await works(server)


async def test_slow_clients_pin_a_part_of_memory_and_no_more() -> None:
    """What is beyond it is copied to them: the rest of memory stays usable."""
    hashes, source = chain(64), Filled(64, LARGE, seed=3)
    namespace, share = Namespace("kv", LARGE), 64 // STORE_LENT_SHARE
    async with serving("memory:4MiB") as (store, server), client(server) as idle:
        assert (await store.put(hashes, source.cache, range(64))).complete
        # More than goes at once, and nobody receives it.
        for number, count in enumerate((share - 1, MANY)):
            wanted = moving(
                messages.Get,
                hashes[:count],
                namespace,
                number=number,
                timeout_ms=600_000,
            )
            assert not any((await idle.ask(wanted)).table)
        index = inside.tiers(store).memory.index
        await inside.tiers(store).memory.empty()
        assert len(index) == share - 1
        assert await works(server)


async def test_what_is_damaged_is_told_from_what_is_absent(tmp_path: Path) -> None:
    """Each block has its own result, and what is whole comes nevertheless."""
    source, hashes = Filled(seed=3), chain(3)
    async with serving("memory:64KiB", f"disk:{tmp_path}?size=1MiB") as (store, server):
        await store.put([hashes[0], hashes[2]], source.cache, [0, 2])
        await inside.tiers(store).memory.empty()
        _damage(tmp_path / "images", source.tensors[0][2].tobytes())
        async with client(server) as one:
            done = await one.ask(moving(messages.Get, hashes))
            results = [BlockResult.LANDED, BlockResult.MISSING, BlockResult.FAILED]
            assert done.table.tolist() == results
            assert "damaged" in done.reason


def _damage(path: Path, part: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[raw.index(part)] ^= 1
    path.write_bytes(raw)


# --- several at once ----------------------------------------------------------------


async def test_small_blocks_that_come_while_a_get_waits_are_in_its_answer() -> None:
    """How they come is told by what was asked, and not by where the server has them."""
    images = np.arange(2 * SPEC.block_bytes).astype(np.uint8).tobytes()
    async with (
        serving("memory:4MiB", berths=1) as (_, server),
        client(server) as one,
        client(server) as other,
    ):
        await one.say(moving(messages.Put, chain(MANY), APART, number=1))
        await until(lambda: inside.served(server).lent_bytes > 0)
        await one.say(moving(messages.Get, chain(2), number=2))
        await until(lambda: any(row.requests == 2 for row in server.clients()))
        await other.ask(moving(messages.Put, chain(2), images=images))
        sent = bytes(MANY * LARGE.block_bytes)
        await one.connection.send(messages.payload_tag(1), sent)
        await one.connection.recv(messages.TAG)
        done = messages.decode_reply(await one.connection.recv(messages.TAG))
        assert isinstance(done, messages.StoreDone)
        assert done.number == 2
        assert done.images == images


async def test_a_get_that_is_answered_is_open_no_more() -> None:
    """While its blocks are on their way the client may ask as much as ever."""
    async with serving("memory:4MiB") as (store, server):
        await store.put(chain(MANY), Filled(MANY, LARGE, seed=1).cache, range(MANY))
        async with client(server) as one:
            await one.ask(moving(messages.Get, chain(MANY), APART, number=1))
            asked = range(2, STORE_REQUESTS_MAX + 2)
            for number in asked:
                await one.say(messages.Find(number, names(chain(1))))
            for _ in asked:
                await one.connection.recv(messages.TAG)
            images = await one.connection.recv(messages.payload_tag(1))
            assert len(images) == MANY * LARGE.block_bytes
        assert not server.dropped


async def test_a_store_that_is_closed_first_closes_its_server() -> None:
    """What clients still ask for would be looked for in memory that is given back."""
    async with serving() as (store, server), client(server) as one:
        await store.put(chain(2), Filled(seed=1).cache, [0, 1])
        await store.close()
        await server.closed()
        with pytest.raises(kvwire.ConnectionClosed):
            await one.ask(moving(messages.Get, chain(2)))
        with pytest.raises(UsageError, match="the store is closed"):
            await StoreServer(store, "127.0.0.1:0").__aenter__()


async def test_kinds_of_blocks_that_nobody_has_are_not_remembered() -> None:
    """By neither side: a client may ask for any number of them."""
    other = Filled(spec=LARGE)
    async with (
        serving() as (store, server),
        BlockStore.open([where(server)]) as near,
    ):
        await near.put(chain(2), Filled(seed=1).cache, [0, 1])
        outcome = await near.get(chain(2, "other"), other.cache, [0, 1])
        assert not outcome.landed.ids().size
        assert await near.match(chain(2)) == 2
        assert (
            len(inside.tiers(near).namespaces)
            == len(inside.tiers(store).namespaces)
            == 1
        )


# --- stalls ---------------------------------------------------------------------------


async def test_a_client_that_never_fetches_holds_only_its_own_berths() -> None:
    async with serving(berths=1) as (store, server), client(server) as idle:
        source, hashes = Filled(8, LARGE, seed=3), chain(MANY)
        await store.put(hashes, source.cache, range(MANY))
        answer = await idle.ask(moving(messages.Get, hashes, APART, timeout_ms=300))
        assert answer.table.tolist() == [0] * MANY
        # It does not expect what is pushed. Others are served meanwhile.
        assert await works(server)
        # By the deadline its berth is free again, and what was pinned for it.
        await until(lambda: inside.served(server).lent_bytes == 0)
        await inside.tiers(store).memory.empty()
        assert not len(inside.tiers(store).memory.index)
        again = await idle.ask(moving(messages.Get, hashes, APART, number=2))
        assert again.number == 2
        assert again.table.tolist() == [BlockResult.MISSING] * MANY


# --- trust ----------------------------------------------------------------------------


async def test_read_only() -> None:
    async with serving() as (store, _):
        source, hashes = Filled(seed=1), chain(2)
        await store.put(hashes, source.cache, [0, 1])
        async with StoreServer(store, "127.0.0.1:0", read_only=True) as server:
            async with client(server) as liar:
                done = await liar.ask(moving(messages.Put, chain(1)))
                assert done.table.tolist() == [BlockResult.REFUSED]
                assert "read-only" in done.reason
                for request in (
                    messages.Delete(2, names(hashes)),
                    messages.Delete(3, None, NAMESPACE.digest),
                    messages.Delete(4, None),
                ):
                    done = await liar.ask(request)
                    assert done.number == request.number
                    assert "read-only" in done.reason
                # Nothing was put here, so all of it is safe.
                assert not (await liar.ask(messages.Flush(6))).reason
            tier, target = where(server), Filled()
            async with BlockStore.open([tier]) as other:
                assert "read-only" in other.report[tier]
                put = await other.put(chain(1, "new"), source.cache, [3])
                assert "read-only" in put.missing["kv", 3]
                assert (await other.get(hashes, target.cache, [4, 5])).complete
                pinned = await other.pin(hashes, source.cache)
                assert pinned.refused.all()
                assert "this server is read-only" in pinned.reasons[0]
                fetched = await other.prefetch(hashes, source.cache, tier=tier)
                assert fetched.complete
            assert np.array_equal(source.tokens([0, 1]), target.tokens([4, 5]))
        assert store.stats()["memory:1MiB"].blocks == 2


async def test_only_who_has_the_key_is_served(tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    for path in (key, other):
        write_key_file(path)
    async with serving(psk_file=str(key)) as (_, server):
        tier = where(server, f"?psk_file={key}")
        async with BlockStore.open([tier]) as store:
            put = await store.put(chain(1), Filled(seed=1).cache, [0])
            assert put.complete
        for wrong in (where(server), where(server, f"?psk_file={other}")):
            with pytest.raises(UsageError, match="tier"):
                await BlockStore.open([wrong])
        assert not server.clients()


async def test_without_a_key_it_listens_to_this_host_only() -> None:
    async with BlockStore.open(["memory:64KiB"]) as store:
        with pytest.raises(UsageError, match="keygen"):
            await StoreServer(store, "0.0.0.0:0").__aenter__()


# --- many -----------------------------------------------------------------------------


async def test_a_report_says_who_is_there(tmp_path: Path) -> None:
    tiers = ("memory:64KiB", f"disk:{tmp_path}?size=1MiB")
    async with serving(*tiers) as (_, server), client(server) as one:
        assert await works(server)
        await until(lambda: len(server.clients()) == 1)
        report = inside.served(server).report(5, "")
        assert isinstance(
            messages.decode_reply(messages.encode(report)), messages.NumberedReply
        )
        assert [row.name for row in report.tiers] == list(tiers)
        assert [row.stats.blocks for row in report.tiers] == [4, 4]
        (row,) = report.clients
        assert row.name == one.communicator.name
        welcome = inside.served(server).welcome("", 1)
        assert welcome.durable
        assert [messages.namespace_told(text) for text in welcome.namespaces] == [
            NAMESPACE
        ]


@pytest.mark.parametrize(
    "argument",
    # More than a client believes: it would end the connection.
    [{"berths": 0}, {"berth_bytes": 0}, {"berth_bytes": limits.REQUEST_BYTES_MAX + 1}],
    ids=str,
)
def test_wrong_arguments_are_refused(argument: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(argument))):
        StoreServer(object(), "127.0.0.1:0", **argument)  # type: ignore[arg-type]


# --- begin and end --------------------------------------------------------------------


async def test_a_server_that_was_never_entered_can_be_closed() -> None:
    async with BlockStore.open(["memory:64KiB"]) as store:
        server = StoreServer(store, "127.0.0.1:0")
        await server.close()
        await server.close()
        await server.closed()
        with pytest.raises(UsageError, match="entered only once"):
            await server.__aenter__()


async def test_a_server_that_could_not_listen_can_be_closed() -> None:
    async with serving() as (store, first):
        second = StoreServer(store, first.address)
        with pytest.raises(OSError, match="in use"):
            await second.__aenter__()
        await second.close()
        with pytest.raises(UsageError, match="entered only once"):
            await first.__aenter__()
        assert await works(first)


async def test_a_cancelled_close_of_a_server_is_gone_on_with() -> None:
    """It returns when nothing touches the store any more, and not before."""
    reached, go = asyncio.Event(), asyncio.Event()

    class Slow(FakeTier):
        async def flush(self) -> None:
            reached.set()
            await go.wait()

    async with (
        store_on(Slow()) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        client(server) as one,
    ):
        await one.say(messages.Flush(1))
        await reached.wait()
        closing = asyncio.create_task(server.close())
        assert await one.dropped()
        closing.cancel()
        await asyncio.wait((closing,))
        assert closing.cancelled()
        again = asyncio.create_task(server.close())
        await turns(8)
        assert not again.done()
        assert "1 clients" in repr(server)
        go.set()
        await again
        assert "closed" in repr(server)
        assert server.clients() == ()
