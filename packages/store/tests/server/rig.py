"""A store server and clients of it that a test plays by hand."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

import kvwire
from kvwire import Communicator, Connection
from kvwire_store import BlockStore, StoreServer
from kvwire_store.keys import as_keys
from kvwire_store.limits import STORE_INLINE_BYTES
from kvwire_store.namespace import Namespace
from kvwire_store.server import messages
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import until

NAMESPACE = Namespace("kv", SPEC)
# Two of its blocks are more than goes with a request.
APART = Namespace("kv", LARGE)
# So many blocks of it are too large for a request or an answer.
MANY = STORE_INLINE_BYTES // LARGE.block_bytes + 1


class Client:
    def __init__(self, communicator: Communicator, connection: Connection) -> None:
        self.communicator = communicator
        self.connection = connection

    async def say(self, message: messages.ClientMessage | bytes) -> None:
        body = message if isinstance(message, bytes) else messages.encode(message)
        await self.connection.send(messages.TAG, body)

    async def ask(self, request: messages.ClientMessage) -> Any:
        await self.say(request)
        return messages.decode_reply(await self.connection.recv(messages.TAG))

    async def dropped(self) -> bool:
        try:
            await self.connection.recv(messages.TAG)
        except kvwire.ConnectionClosed:
            return True
        return False


@contextlib.asynccontextmanager
async def client(server: StoreServer, *, hello: bool = True) -> AsyncIterator[Client]:
    """Connect to a server, by hand."""
    async with kvwire.open(resume=False) as communicator:
        one = Client(communicator, await communicator.connect(server.address))
        if hello:
            assert isinstance(
                await one.ask(messages.StoreHello(1, 1)), messages.Welcome
            )
        yield one


@contextlib.asynccontextmanager
async def serving(
    *tiers: str, **arguments: Any
) -> AsyncIterator[tuple[BlockStore, StoreServer]]:
    async with (
        BlockStore.open(tiers or ["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0", **arguments) as server,
    ):
        yield store, server


def where(server: StoreServer, options: str = "") -> str:
    return f"kvwire://{server.address.host}:{server.address.port}{options}"


def names(hashes: list[bytes], namespace: Namespace = NAMESPACE) -> messages.Names:
    return messages.Names.of(as_keys(namespace.digest + one for one in hashes))


def moving(
    kind: type[messages.Put | messages.Get],
    hashes: list[bytes],
    of: Namespace = NAMESPACE,
    **changes: Any,
) -> messages.Put | messages.Get:
    fields: dict[str, Any] = {
        "number": 1,
        "namespace": messages.text_of(of),
        "names": names(hashes, of),
        "timeout_ms": 10_000,
    }
    if kind is messages.Put:
        nbytes = len(hashes) * of.image_bytes
        fields["order"] = 0
        fields["images"] = bytes(nbytes) if nbytes <= STORE_INLINE_BYTES else b""
    return kind(**fields | changes)


async def works(server: StoreServer, seed: int = 9) -> bool:
    """Whether an honest client is served, with the bytes that it had put."""
    source, target, hashes = Filled(seed=seed), Filled(), chain(4, f"honest {seed}")
    async with BlockStore.open([where(server)]) as store:
        stored = await store.put(hashes, source.cache, [0, 1, 2, 3])
    async with BlockStore.open([where(server)]) as store:
        got = await store.get(hashes, target.cache, [7, 6, 5, 4])
    same = np.array_equal(source.tokens([0, 1, 2, 3]), target.tokens([7, 6, 5, 4]))
    return stored.complete and got.complete and same


async def nothing_is_taken(store: BlockStore, server: StoreServer) -> None:
    slabs, served = inside.tiers(store).memory.index.slabs, inside.served(server)
    await until(lambda: slabs.used_bytes == 0 and served.lent_bytes == 0)
