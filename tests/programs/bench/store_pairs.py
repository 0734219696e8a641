"""What stands beside a store server: two processes that move the same blocks.

*Transfer* is kvwire without the store: the right cache's blocks into the left one's, or
the other way round. *Sockets* are bare ones, whose blocks lie side by side.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from kvwire_certify.bench import sides
from kvwire_certify.bench.bare import receive_into
from kvwire_certify.bench.line import HOST, Line, Seconds, each_timed, turns
from kvwire_certify.bench.work import Work
from kvwire_store.namespace import DIGEST_BYTES
from tests.programs.bench.store import (
    HASH_BYTES,
    LOOKUPS,
    ONE,
    transfer_of,
)

# What a store server is asked for each hash, and what it answers.
_ASKED_BYTES: Final = DIGEST_BYTES + HASH_BYTES
_BYTE: Final = b"!"


class _Transfers:
    """A line whose works are transfers: of a set, or of one block after the other."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.send = line.send

    async def receive(self) -> Any:
        asked = await self._line.receive()
        if isinstance(asked, dict):
            given = Work(**asked["work"])
            work = transfer_of(given)
            if given.verb == ONE:
                work = replace(work, nbytes=given.nbytes, blocks=1, count=given.count)
            asked["work"] = {
                name: getattr(work, name) for name in work.__dataclass_fields__
            }
        return asked


async def transfer_left(line: Line, options: dict[str, Any]) -> None:
    await sides.left(_Transfers(line), options)


async def transfer_right(line: Line, options: dict[str, Any]) -> None:
    await sides.right(_Transfers(line), options)


async def sockets_left(line: Line, options: dict[str, Any]) -> None:
    with socket.create_connection((HOST, options["address"])) as sock:
        await line.send({"facts": {}})
        await _exchange(line, sock, is_left=True)


async def sockets_right(line: Line, _: dict[str, Any]) -> None:
    with socket.create_server((HOST, 0)) as listener:
        await line.send({"address": listener.getsockname()[1], "facts": {}})
        with closing(listener.accept()[0]) as sock:
            await _exchange(line, sock, is_left=False)


async def _exchange(line: Line, sock: socket.socket, *, is_left: bool) -> None:
    """Do each round: ask for blocks, or for matches; send a set, and get a byte."""
    rooms: dict[tuple[int, int], list[memoryview]] = {}
    async for turn in turns(line):
        work = turn.work
        key = work.nbytes, work.blocks
        if key not in rooms:
            rooms[key] = [memoryview(bytearray(key[0])) for _ in range(key[1])]
        began_s = time.process_time()
        if not is_left:
            await line.send({"offer": ""})
        seconds = await _moved(sock, work, rooms[key], is_left=is_left)
        if not is_left:
            await line.receive()
        cpu_s = time.process_time() - began_s
        await line.send({"seconds": seconds, "cpu_s": cpu_s, "digest": ""})


async def _moved(
    sock: socket.socket, work: Work, parts: list[memoryview], *, is_left: bool
) -> Seconds:
    byte = memoryview(bytearray(_BYTE))
    match work.verb:
        case "match" | "match of one":
            question = [memoryview(bytearray(work.count * _ASKED_BYTES))]
            times, answer = LOOKUPS, [memoryview(bytearray(work.count))]
        case "get of one":
            times, question, answer = work.count, [byte], parts[:1]
        case "get":
            # All of a set: one block again and again would stay in the cache.
            times, question, answer = 1, [byte], parts
        case _:
            times, question, answer = 1, parts, [byte]

    async def ask(_: int) -> None:
        _send(sock, question)
        _receive(sock, answer)

    if is_left:
        return await each_timed(times, ask)
    for _ in range(times):
        _receive(sock, question)
        _send(sock, answer)
    return ()


def _send(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    for part in parts:
        sock.sendall(part)


def _receive(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    for part in parts:
        receive_into(sock, part)
