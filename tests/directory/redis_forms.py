"""What a directory and a tier both do on a Redis: the same tests ask both."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, TypeAlias

import pytest

from kvwire import ConnectError
from kvwire.directory import open_directory
from kvwire.types import Address
from kvwire_store import BlockStore
from tests.directory.records import record
from tests.support.caches import Filled, chain
from tests.support.certificates import Issued
from tests.support.servers import Server, redis_server
from tests.support.waiting import PATIENCE_S

KINDS: Final = ("tier", "directory")
# Writes something new; returns why that was not taken, or nothing.
Write: TypeAlias = Callable[[], Awaitable[str]]


@contextlib.asynccontextmanager
async def used(kind: str, url: str) -> AsyncIterator[Write]:
    """Use a Redis as a tier, or as a directory."""
    if kind == "directory":
        directory, member = open_directory(url), record(1)

        async def announce() -> str:
            try:
                await directory.write(member.key, member.encode(), member.lease_s)
            except ConnectError as exc:
                return str(exc)
            return ""

        try:
            yield announce
        finally:
            await directory.close()
        return
    source, names = Filled(seed=1), iter(range(1_000_000))
    async with BlockStore.open([url]) as store:

        async def put() -> str:
            put = await store.put(chain(4, f"{next(names)}"), source.cache, range(4))
            return "; ".join(put.missing.reasons)

        yield put


async def until_taken(write: Write) -> None:
    """Write until that is taken."""
    await _until(write, lambda why: not why, "it is taken")


async def until_refused(write: Write, reason: str) -> None:
    """Write until that is refused for a reason."""
    await _until(write, lambda why: reason in why, f"it is refused for {reason!r}")


async def _until(write: Write, right: Callable[[str], bool], wanted: str) -> None:
    why = ""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if right(why := await write()):
                    return
                await asyncio.sleep(0)
    except TimeoutError:
        pytest.fail(f"until {wanted}: {why!r}")


def address_of(server: Server) -> Address:
    return Address("tcp", "127.0.0.1", server.port)


@contextlib.contextmanager
def with_replica() -> Iterator[tuple[Server, Server, Any, Any]]:
    """A server, its replica, and a client of each."""
    from redis import Redis

    option = ("--repl-diskless-sync-delay", "0")
    with (
        redis_server(*option) as first,
        redis_server(*option) as second,
        Redis("127.0.0.1", first.port) as one,
        Redis("127.0.0.1", second.port) as two,
    ):
        two.replicaof("127.0.0.1", first.port)
        yield first, second, one, two


@contextlib.asynccontextmanager
async def behind_tls(server: Server, mine: Issued, ca_file: str) -> AsyncIterator[int]:
    """Put TLS before a server, which wants a certificate; yield the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca_file)
    context.load_cert_chain(mine.cert_file, mine.key_file)
    context.verify_mode = ssl.CERT_REQUIRED
    # The certificates of tests are as plain as those of many private CAs.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT

    async def passed(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        await _ended(sink)

    async def serve(back: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        there, on = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(passed(back, on), passed(there, out))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as front:
        yield front.sockets[0].getsockname()[1]


async def _ended(writer: asyncio.StreamWriter) -> None:
    """Close, and see how that ended: or the loop complains of a reset some day."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


Answer: TypeAlias = Callable[[bytes], bytes]


@contextlib.asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[int]:
    """Answer each command, by its name, with bytes; yield the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    nbytes = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(nbytes + 2))[:-2])
                writer.write(answer(words[0].upper()))
                await writer.drain()
        await _ended(writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
