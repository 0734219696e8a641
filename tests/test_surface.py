"""What a user's object shows is what the reference documents, no more and no less."""

from __future__ import annotations

import kvwire
from tests.programs.reference import FOLDER
from tests.programs.reference.words import attributes
from tests.support.caches import Memory
from tests.support.pairs import connected


def documented(cls: type) -> set[str]:
    """The members that a page of the API shows: those with a docstring."""
    pages = [page.read_text() for page in (FOLDER / "api").glob("*.md")]
    assert sum(f"::: kvwire.{cls.__name__}\n" in page for page in pages) == 1
    members = (name for base in cls.__mro__ for name in vars(base) if name[0] != "_")
    return {*attributes(cls), *(n for n in members if getattr(cls, n).__doc__)}


def shown(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


async def test_objects_show_what_is_documented() -> None:
    async with (
        connected("inproc") as pair,
        kvwire.BlockStore.open(["memory:1MiB"]) as store,
        kvwire.StoreServer(store, "127.0.0.1:0") as server,
    ):
        region = pair.far.register(bytearray(8))
        request = pair.left.recv(1)
        outgoing = pair.far.publish("x", Memory().cache, [0])
        incoming = pair.left.pull("x", Memory().cache, [1])
        outgoing.ready()
        outgoing.finish()
        put = store.put([b"hash"], Memory().cache, [0])
        peer = pair.near.peer("127.0.0.1:1")
        things: tuple[object, ...] = (pair.near, pair.left, peer, region, request)
        things += (outgoing, incoming, store, put, server)
        for thing in things:
            names = documented(type(thing))
            assert names, thing
            assert shown(thing) == names, thing
        assert (await incoming).complete
        await put
        await region.close()
        request.cancel()


def test_an_engine_shows_what_is_documented() -> None:
    with kvwire.Engine(trust="loopback") as engine:
        assert shown(engine) == documented(kvwire.Engine)
