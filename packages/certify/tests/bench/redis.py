"""Blocks in redis-server, which a cache of KV blocks is often kept in.

A value for each, over one connection, by requests in a row; the server keeps everything
in memory and writes nothing to a disk. This speaks to the server itself: a client
library makes objects of what it reads, and copies them into the caller's memory; here a
value is received where it is wanted, which is as fast as any client can be.
"""

from __future__ import annotations

import shutil
import socket
from typing import Any, Final

from kvwire_certify.bench.bare import receive_into
from kvwire_certify.bench.line import HOST, Line
from kvwire_certify.bench.turns import Missing
from kvwire_certify.bench.work import Work
from kvwire_store.namespace import DIGEST_BYTES
from packages.certify.tests.bench.store import HASH_BYTES, set_bytes
from packages.certify.tests.bench.store_peers import FlatBlocks
from tests.support.servers import Server

PROGRAM: Final = "redis-server"
INSTALL: Final = "apt-get install redis-server, or brew install redis"
_READY: Final = "Ready to accept connections"
_TIMEOUT_S: Final = 60.0
_END: Final = b"\r\n"
_STORED: Final = b"+OK\r\n"
# As long as a key of a store.
_KEY_BYTES: Final = DIGEST_BYTES + HASH_BYTES
_CPU: Final = ("used_cpu_sys", "used_cpu_user")


def missing() -> Missing | None:
    return None if shutil.which(PROGRAM) else Missing(PROGRAM, INSTALL)


async def blocks(line: Line, _: dict[str, Any]) -> None:
    command = [PROGRAM, "--bind", HOST, "--port", "{port}"]
    server = Server([*command, "--save", "", "--appendonly", "no"], _READY)
    try:
        server.start()
        where = HOST, server.port
        with socket.create_connection(where, _TIMEOUT_S) as made:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            redis = RedisBlocks(made)
            facts = {"redis": redis.info("server")["redis_version"]}
            await line.send({"facts": facts})
            await redis.rounds(line)
    finally:
        server.kill()


class RedisBlocks(FlatBlocks):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._socket = sock

    def cpu_s(self) -> float:
        """Add those of the server, as it counts them."""
        info = self.info("cpu")
        return super().cpu_s() + sum(float(info[name]) for name in _CPU)

    async def match(self, work: Work) -> None:
        number = self.flat(work).sets[-1]
        begins = _begins(work)[: work.count]
        keys = [_key(work, number, begin) for begin in begins]
        self._socket.sendall(_request(b"EXISTS", *keys))
        self._expect(b":%d\r\n" % work.count)

    async def put(self, work: Work) -> None:
        flat = self.flat(work)
        number = flat.next_put()
        for begin in _begins(work):
            key = _key(work, number, begin)
            head = _request(b"SET", key, None) + b"$%d\r\n" % work.nbytes
            self._socket.sendall(head)
            self._socket.sendall(flat.have[begin : begin + work.nbytes].data)
            self._socket.sendall(_END)
        for _ in range(work.blocks):
            self._expect(_STORED)

    async def get(self, work: Work) -> None:
        flat = self.flat(work)
        number = flat.next()
        begins = _begins(work)
        asked = [_request(b"GET", _key(work, number, begin)) for begin in begins]
        self._socket.sendall(b"".join(asked))
        for begin in begins:
            self._value(flat.want[begin : begin + work.nbytes].data)

    async def get_one(self, work: Work, at: int) -> None:
        flat = self.flat(work)
        self._socket.sendall(_request(b"GET", _key(work, 0, flat.blocks[at])))
        self._value(flat.block(at)[1].data)

    def info(self, section: str) -> dict[str, str]:
        self._socket.sendall(_request(b"INFO", section.encode()))
        head = bytearray()
        while not head.endswith(_END):
            head += self._read(1)
        text = self._read(int(head[1:]) + len(_END)).decode()
        lines = (line.partition(":") for line in text.splitlines())
        return {name: value for name, _, value in lines}

    def _value(self, into: memoryview) -> None:
        self._expect(b"$%d\r\n" % into.nbytes)
        receive_into(self._socket, into)
        self._expect(_END)

    def _expect(self, wanted: bytes) -> None:
        found = self._read(len(wanted))
        if found != wanted:
            raise RuntimeError(f"redis answers {found!r} instead of {wanted!r}")

    def _read(self, count: int) -> bytes:
        found = bytearray(count)
        receive_into(self._socket, memoryview(found))
        return bytes(found)


def _begins(work: Work) -> range:
    return range(0, set_bytes(work), work.nbytes)


def _key(work: Work, number: int, begin: int) -> bytes:
    return (b"%d/%d/%d" % (work.nbytes, number, begin)).rjust(_KEY_BYTES, b"0")


def _request(*words: bytes | None) -> bytes:
    """A request; a word that is None follows by itself."""
    texts = (b"$%d\r\n%s\r\n" % (len(word), word) for word in words if word is not None)
    return b"*%d\r\n" % len(words) + b"".join(texts)
