"""Verbs by way of a store server: of its clients, tenants and operator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvwire import BlockStore, StoreServer, UsageError
from kvwire.config import Config
from kvwire.security.keys import write_key_file
from kvwire.store.placement import BlockState, Verb, VerbKind
from kvwire.store.server.client import apply_verb
from kvwire.store.server.messages import VerbDone, Welcome, decode_reply, encode
from kvwire.store.server.served import ServedStore
from tests.store.server.test_server import where
from tests.support.caches import Filled, chain

A, B = chain(4, "a"), chain(4, "b")
CACHE = Filled(seed=1).cache
LOCATE = Verb(VerbKind.LOCATE)


def kinds(placement: object) -> list[str]:
    return [name.split()[-1].partition(":")[0] for name in placement.held]  # type: ignore[attr-defined]


async def test_verbs_are_carried_out_at_the_server(tmp_path: Path) -> None:
    tiers = ["memory:256KiB", f"disk:{tmp_path}?size=1MiB"]
    async with (
        BlockStore.open(tiers) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        BlockStore.open(["memory:256KiB", where(server)]) as client,
    ):
        tier = where(server)
        await client.put(A + B, CACHE, range(8))
        assert (await client.pin(A, CACHE, ttl_s=100)).complete
        for use in (await store.locate(A, CACHE)).held.values():
            assert use.all()
        # The server's own memory lets go, and gets them back by a prefetch.
        assert (await client.unpin(A, CACHE)).complete
        assert (await store.demote(A, CACHE)).complete
        found = await client.locate(A, CACHE)
        assert kinds(found) == ["memory", "memory", "disk"]
        assert [bits.all() for bits in found.held.values()] == [True, False, True]
        assert (await client.prefetch(A, CACHE, tier=tier)).complete
        assert (await store.locate(A, CACHE)).held[tiers[0]].all()
        # What the server lacks comes from the client's memory.
        assert (await client.demote(A, CACHE)).complete
        assert not (await client.locate(A, CACHE)).held["memory:256KiB"].any()
        await store.delete(B, CACHE)
        assert (await client.prefetch(B, CACHE, tier=tier)).complete
        assert (await store.locate(B, CACHE)).complete
        assert (await client.retain(A, CACHE, priority=90, ttl_s=9)).complete
        with pytest.raises(UsageError, match="no node with this name"):
            await client.move(A, CACHE, to=server.communicator.name)
        told = await client.locate(A + chain(1, "c"), CACHE)
        assert told.counts == {"done": 4, "missing": 1}
    async with BlockStore.open(["memory:256KiB", where(server)]) as client:
        told = await client.locate(A, CACHE)
        assert told.deferred.all()
        assert "kvwire://" in told.reasons[0]


async def test_blocks_move_to_another_server(tmp_path: Path) -> None:
    tiers = ["memory:256KiB", f"disk:{tmp_path}?size=1MiB"]
    async with (
        BlockStore.open(tiers) as here,
        BlockStore.open(["memory:256KiB"]) as there,
        StoreServer(there, "127.0.0.1:0") as server,
    ):
        await here.put(A, CACHE, range(4))
        told = await here.move(A, CACHE, to=where(server))
        assert told.refused.all(), "a restart there would lose what the disk has"
        assert "loses its blocks at a restart" in told.reasons[0]
        assert (await here.locate(A, CACHE)).complete
        assert (await here.move(A, CACHE, to=where(server), keep=True)).complete
        assert (await there.locate(A, CACHE)).complete
        assert (await here.locate(A, CACHE)).complete
    async with (
        BlockStore.open(["memory:256KiB"]) as here,
        BlockStore.open(tiers) as there,
        StoreServer(there, "127.0.0.1:0") as server,
    ):
        await here.put(A + B, CACHE, range(8))
        await here.pin(A[:1], CACHE)
        told = await here.move(A + B, CACHE, to=where(server))
        assert told.deferred.tolist() == [True] + [False] * 7
        assert (await there.locate(A + B, CACHE)).complete
        assert (await here.locate(A + B, CACHE)).done.tolist() == [True] + [False] * 7


async def test_a_tenant_acts_for_itself_and_the_operator_for_each(
    tmp_path: Path,
) -> None:
    for who in ("x", "y", "all"):
        write_key_file(tmp_path / who)
    tenants = [f"x?pinned=8KiB&key={tmp_path}/x", f"y?key={tmp_path}/y"]

    def config(who: str) -> Config:
        return Config.load(None, trust="psk", psk_file=str(tmp_path / who))

    async with (
        BlockStore.open(["memory:128KiB"], tenants=tenants) as store,
        StoreServer(store, "127.0.0.1:0", psk_file=str(tmp_path / "all")) as server,
    ):
        address = str(server.address).split("//")[-1]
        await store.put(A, CACHE, range(4), tenant="x")
        assert (await apply_verb(address, config("x"), LOCATE, A)).complete
        assert (await apply_verb(address, config("y"), LOCATE, A)).missing.all()
        told = await apply_verb(address, config("all"), LOCATE, A, "x")
        assert told.complete
        told = await apply_verb(address, config("x"), Verb(VerbKind.PIN, ttl_s=5), A)
        assert told.counts == {"done": 2, "clipped": 2}
        with pytest.raises(UsageError, match=r"it is tenant y, and cannot act for 'x'"):
            await apply_verb(address, config("y"), LOCATE, A, "x")
        with pytest.raises(UsageError, match="the tenants are x, y"):
            await apply_verb(address, config("all"), LOCATE, A, "z")


async def test_a_server_that_is_read_only_refuses_what_changes_it() -> None:
    async with (
        BlockStore.open(["memory:128KiB"]) as store,
        StoreServer(store, "127.0.0.1:0", read_only=True) as server,
        BlockStore.open(["memory:64KiB", where(server)]) as client,
    ):
        await store.put(A, CACHE, range(4))
        told = await client.pin(A, CACHE)
        assert told.refused.all()
        assert told.reasons == (f"{where(server)}: this server is read-only",) or (
            "this server is read-only" in told.reasons[0]
        )
        assert (await client.locate(A, CACHE)).complete


async def test_an_older_server_pins_and_is_asked_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    welcome = ServedStore.welcome

    def older(self: ServedStore, tenant: str, version: int) -> Welcome:
        return msgspec.structs.replace(welcome(self, tenant, version), verbs=False)

    monkeypatch.setattr(ServedStore, "welcome", older)
    async with (
        BlockStore.open(["memory:128KiB"]) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        BlockStore.open(["memory:64KiB", where(server)]) as client,
    ):
        await store.put(A, CACHE, range(4))
        assert (await client.locate(A, CACHE)).complete
        assert (await client.pin(A, CACHE)).complete
        assert (await client.unpin(A, CACHE)).complete
        for told in (
            await client.pin(A, CACHE, ttl_s=9),
            await client.retain(A, CACHE, priority=80),
        ):
            assert told.refused.all()
            assert "is an older server, which cannot" in told.reasons[0]
        address = str(server.address).split("//")[-1]
        with pytest.raises(UsageError, match="server is older and cannot locate"):
            await apply_verb(address, Config(), LOCATE, A)


@pytest.mark.parametrize(
    "reply",
    [
        (5, 1, bytes([5]), bytes(1)),
        (5, 1, bytes(1), bytes([1])),
        (5, 1, bytes(2), bytes(1)),
        (5, 1, bytes(1), bytes(1), (), (("n", bytes(2)),)),
    ],
    ids=["state", "reason", "codes", "held"],
)
def test_an_answer_that_contradicts_itself_is_none(reply: tuple[object, ...]) -> None:
    with pytest.raises(UsageError, match="not a reply"):
        decode_reply(msgspec.msgpack.encode(reply))


def test_an_answer_has_what_it_was_made_of() -> None:
    reply = VerbDone(1, bytes([0, 4]), bytes([0, 1]), ("why",), (("n", bytes([1, 0])),))
    told = decode_reply(encode(reply))
    assert isinstance(told, VerbDone)
    placement = told.placement
    assert placement.states.tolist() == [BlockState.DONE, BlockState.MISSING]
    assert placement.reason(1) == "why"
    assert placement.held["n"].tolist() == [True, False]
    assert VerbDone.of(1, placement) == reply
