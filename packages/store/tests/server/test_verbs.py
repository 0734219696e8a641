"""Verbs by way of a store server: of its clients, tenants and operator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvwire import UsageError
from kvwire.security.keys import write_key_file
from kvwire_store import BlockStore, StoreServer
from kvwire_store.placement import BlockState
from kvwire_store.server.messages import VerbDone, decode_reply, encode
from packages.store.tests.contract import in_memory, put_before
from packages.store.tests.server.test_server import where
from tests.support import inside
from tests.support.caches import Filled, chain

A, B = chain(4, "a"), chain(4, "b")
CACHE = Filled(seed=1).cache
MEMORY = "memory:256KiB"


async def test_verbs_are_carried_out_at_the_server(tmp_path: Path) -> None:
    tiers = [MEMORY, f"disk:{tmp_path}?size=1MiB"]
    await put_before(*tiers, count=4)
    async with (
        BlockStore.open(tiers) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        BlockStore.open([MEMORY, where(server)]) as client,
    ):
        tier = where(server)
        assert (await client.prefetch(chain(4), CACHE, tier=tier)).complete
        assert in_memory(store, chain(4)) == [True] * 4
        # What the server lacks comes from the client's memory.
        assert (await client.put(A, CACHE, range(4))).complete
        await store.delete(A, CACHE)
        assert (await client.prefetch(A, CACHE, tier=tier)).complete
        assert in_memory(store, A) == [True] * 4
        assert (await client.pin(A, CACHE, ttl_s=100)).complete
        for index in (
            inside.tiers(store).memory.index,
            inside.tiers(store).below[0].index,  # type: ignore[attr-defined]
        ):
            assert index.kept_bytes.sum() == 4 * 4096
        assert (await client.unpin(A, CACHE)).complete
        told = await client.pin(A + chain(1, "c"), CACHE)
        assert told.counts == {"done": 4, "missing": 1}
    async with BlockStore.open([MEMORY, where(server)]) as client:
        told = await client.pin(A, CACHE)
        assert told.deferred.all()
        assert "kvwire://" in told.reasons[0]


async def test_a_tenant_acts_for_itself_and_the_operator_for_each(
    tmp_path: Path,
) -> None:
    for who in ("x", "y", "all"):
        write_key_file(tmp_path / who)
    tenants = [f"x?pinned=8KiB&key={tmp_path}/x", f"y?key={tmp_path}/y"]
    async with (
        BlockStore.open(["memory:128KiB"], tenants=tenants) as store,
        StoreServer(store, "127.0.0.1:0", psk_file=str(tmp_path / "all")) as server,
    ):
        await store.put(A, CACHE, range(4), tenant="x")
        for who, named, counts in (
            ("x", "", {"done": 2, "clipped": 2}),
            ("y", "", {"missing": 4}),
            ("all", "x", {"done": 2, "clipped": 2}),
            ("all", "z", {"refused": 4}),
            ("y", "x", {"refused": 4}),
        ):
            async with BlockStore.open(
                [MEMORY, where(server, f"?psk_file={tmp_path}/{who}")],
                tenants=[named] if named else (),
            ) as client:
                told = await client.pin(A, CACHE, tenant=named)
                assert told.counts == counts, (who, named, told.reasons)
        assert "it is tenant y, and cannot act for 'x'" in told.reasons[0]


async def test_a_server_that_is_read_only_refuses_what_changes_it() -> None:
    async with (
        BlockStore.open(["memory:128KiB"]) as store,
        StoreServer(store, "127.0.0.1:0", read_only=True) as server,
        BlockStore.open(["memory:64KiB", where(server)]) as client,
    ):
        await store.put(A, CACHE, range(4))
        told = await client.pin(A, CACHE)
        assert told.refused.all()
        assert "this server is read-only" in told.reasons[0]
        assert (await client.prefetch(A, CACHE, tier=where(server))).complete


@pytest.mark.parametrize(
    "reply",
    [
        (5, 1, bytes([5]), bytes(1)),
        (5, 1, bytes(1), bytes([1])),
        (5, 1, bytes(2), bytes(1)),
    ],
    ids=["state", "reason", "codes"],
)
def test_an_answer_that_contradicts_itself_is_none(reply: tuple[object, ...]) -> None:
    with pytest.raises(UsageError, match="not a reply"):
        decode_reply(msgspec.msgpack.encode(reply))


def test_an_answer_has_what_it_was_made_of() -> None:
    reply = VerbDone(1, bytes([0, 4]), bytes([0, 1]), ("why",))
    told = decode_reply(encode(reply))
    assert isinstance(told, VerbDone)
    placement = told.placement
    assert placement.states.tolist() == [BlockState.DONE, BlockState.MISSING]
    assert placement.reason(1) == "why"
    assert VerbDone.of(1, placement) == reply
