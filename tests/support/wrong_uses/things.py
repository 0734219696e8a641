"""What wrong uses are done to: two connected communicators, caches, keys, strangers."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import kvwire
from kvwire.security.keys import write_key_file
from tests.support.caches import Memory
from tests.support.certificates import Authority
from tests.support.pairs import connected

SPEC = kvwire.KVSpec(layers=2, kv_heads=1, head_dim=4, block_tokens=2, dtype="float32")
ME = "spiffe://kvwire.test/near"


def tensors(*, writable: bool = True) -> list[Any]:
    """Return the tensors of a cache of four blocks."""
    made: list[Any] = Memory(SPEC, 4, 0).tensors
    for tensor in made:
        tensor.flags.writeable = writable
    return made


def grant(t: Things) -> Any:
    """Return a grant of 8 bytes of the other side."""
    return t.b.register(bytearray(8), "readwrite").grant(t.back)


class Things:
    """What a wrong use needs."""

    def __init__(self, pair: Any, folder: Path) -> None:
        self.a, self.b = pair.near, pair.far
        self.conn, self.back = pair.left, pair.right
        self.kv = kvwire.PagedCache(SPEC, tensors())
        self.folder = folder

    def file(self, text: str | bytes, mode: int = 0o600, name: str = "file") -> str:
        path = self.folder / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return str(path)

    def key(self, name: str = "key") -> str:
        path = self.folder / name
        write_key_file(path)
        return str(path)

    def ca(self, name: str = "ca") -> Authority:
        folder = self.folder / name
        folder.mkdir()
        return Authority(folder, name)

    def toml(self, text: str) -> kvwire.Config:
        """Read a configuration from a file."""
        return kvwire.Config.load(self.file(text), environment={})

    async def opened(self, **arguments: Any) -> None:
        async with kvwire.open(**arguments):
            pass

    async def meet(self, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Connect with one configuration to a listener with another."""
        async with kvwire.open(**mine) as near, kvwire.open(**theirs) as far:
            await near.connect(await far.listen("127.0.0.1:0"))

    async def stranger(self, said: bytes, *, ends: bool = False) -> None:
        """Connect to somebody who is not kvwire."""
        over = asyncio.Event()

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            await writer.drain()
            if not ends:
                await over.wait()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        within_s = 5.0 if said or ends else 0.2
        try:
            async with kvwire.open(handshake_timeout_s=within_s) as comm:
                await comm.connect(f"127.0.0.1:{port}")
        finally:
            over.set()
            server.close()
            await server.wait_closed()

    async def from_thread(self, call: Callable[[], object]) -> object:
        """Do it on another thread, which has no loop."""
        found: list[object] = []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as exc:  # noqa: BLE001 - raised below
                found.append(exc)

        thread = threading.Thread(target=run, name="worker")
        thread.start()
        await asyncio.to_thread(thread.join)
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    async def from_fork(self, call: Callable[[], object]) -> None:
        """Do it in a forked process, and raise here what it said there."""
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # beside threads
            child = os.fork()
        if not child:
            try:
                call()
            except kvwire.KVWireError as exc:
                os.write(writer, f"{type(exc).__name__}: {exc}".encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = await asyncio.to_thread(pipe.read)
        await asyncio.to_thread(os.waitpid, child, 0)
        kind, _, words = said.partition(": ")
        if said:
            raise getattr(kvwire, kind)(words)

    async def from_loop(self, call: Callable[[], Any]) -> object:
        """Do it on another loop, of another thread."""

        async def run() -> object:
            return await call()

        return await self.from_thread(lambda: asyncio.run(run()))


NAMES: Final[dict[str, Callable[[Things], Any]]] = {
    "kvwire": lambda t: kvwire,
    "open": lambda t: t.opened,
    "config": lambda t: kvwire.Config(),
    "KVSpec": lambda t: partial(replace, SPEC),
    "nan": lambda t: math.nan,
    "copy": lambda t: copy,
    "address": lambda t: "127.0.0.1:1",
    "buffer": lambda t: bytearray(8),
    "spec": lambda t: SPEC,
    "tensors": lambda t: tensors(),
    "cache": lambda t: t.kv,
    "read_only_cache": lambda t: kvwire.PagedCache(SPEC, tensors(writable=False)),
    "comm": lambda t: t.a,
    "conn": lambda t: t.conn,
    "back": lambda t: t.back,
    "grant": grant,
    "region": lambda t: t.a.register(bytearray(8)),
    "out": lambda t: t.a.publish("x", t.kv, [0]),
    "inc": lambda t: t.a.expect("x", t.kv, [0]),
}
"""What a name of a row stands for, unless kvwire has it."""


@asynccontextmanager
async def things(folder: Path) -> AsyncIterator[Things]:
    """What one row needs, and nothing of it afterwards."""
    async with connected("inproc", handshake_timeout_s=2) as pair:
        yield Things(pair, folder)
        pair.near.abort()
        pair.far.abort()
