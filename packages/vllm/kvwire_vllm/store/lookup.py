"""Lookups by vLLM's scheduler at its workers: how much of a prompt is stored?

Scheduler and workers may be separate processes, and the workers own the store. A worker
listens on this host and writes its address to a file that only this user can read. The
scheduler finds the file by the engine's id, and sends its questions as messages. A
question consists of its number, which is the tag of the answer, and hashes; the answer
is a count. A question without hashes may order the workers to delete everything; the
answer is then 1 for success, or 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from kvwire import Communicator, Connection, Engine
from kvwire.aio import gather_all
from kvwire.config import Config
from kvwire.directory.own_folder import own_folder, temporary_folder
from kvwire.errors import KVWireError, UsageError
from kvwire_vllm.peers import Peers

logger: logging.Logger = logging.getLogger("kvwire.vllm")

_QUESTIONS: Final = 1
_NUMBER_BYTES: Final = 8
_HASH_BYTES: Final = 32
_FORGET: Final = b"forget"
# Long enough for a slow disk or an object store; the engine stands still meanwhile.
_FORGET_TIMEOUT_S: Final = 300.0

Match = Callable[[list[bytes]], Awaitable[int]]
"""Returns how many leading blocks of a chain a store has."""

Forget = Callable[[], Awaitable[bool]]
"""Deletes all blocks of a store; returns whether it succeeded."""


def address_file(engine_id: str, rank: int) -> Path:
    """Return the path of a rank's address file, in this user's private directory."""
    folder = temporary_folder()
    own_folder(folder, str(folder))
    return folder / f"{re.sub('[^0-9A-Za-z_.-]', '_', engine_id)}-{rank}.store"


async def answer(communicator: Communicator, match: Match, forget: Forget) -> None:
    """Answer every client that connects, until the communicator is closed.

    Cancel safety: it ends; open questions get no answer.
    """
    with contextlib.suppress(KVWireError):
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(_serve(await communicator.accept(), match, forget))


async def _serve(connection: Connection, match: Match, forget: Forget) -> None:
    with contextlib.suppress(KVWireError):
        while True:
            asked = bytes(await connection.recv(_QUESTIONS))
            if asked[_NUMBER_BYTES:] == _FORGET:
                found = int(await forget())
            else:
                ends = range(_NUMBER_BYTES, len(asked), _HASH_BYTES)
                found = await match([asked[at : at + _HASH_BYTES] for at in ends])
            tag = int.from_bytes(asked[:_NUMBER_BYTES], "little")
            await connection.send(tag, found.to_bytes(4, "little"))


class Lookup:
    """Looks up blocks in the stores of one engine's ranks."""

    def __init__(self, files: Sequence[Path], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tags = itertools.count(_QUESTIONS + 1)
        for file in files:
            if not file.exists():
                raise UsageError(
                    f"{file} does not exist: all ranks of an engine with a store must "
                    "run on its scheduler's host"
                )
        self._addresses = [file.read_text() for file in files]
        self._engine = Engine(Config(name="vllm-scheduler"))
        self._peers = Peers()
        self.begin(())  # connects now, so that the first prompt does not have to

    def begin(self, hashes: Sequence[bytes]) -> Future[int]:
        """Start to look up the leading blocks that every rank has; never fails."""
        return self._ask_all(b"".join(hashes), self._timeout_s)

    def forget(self) -> bool:
        """Delete all ranks' stored blocks; return whether all succeeded.

        It takes as long as the tiers need, 300 s at most.
        """
        return bool(self._ask_all(_FORGET, _FORGET_TIMEOUT_S).result())

    def close(self) -> None:
        """Cancel the open lookups."""
        self._engine.close()

    def _ask_all(self, question: bytes, timeout_s: float) -> Future[int]:
        """Look up in every rank; return the lowest answer, or 0 if one is missing."""

        async def ask() -> int:
            try:
                async with asyncio.timeout(timeout_s):
                    there = self._addresses
                    asked = (self._ask(one, question) for one in there)
                    return min(await gather_all(*asked))
            except (KVWireError, TimeoutError, OSError) as exc:
                logger.warning(
                    "could not look up blocks in the store: %s", str(exc) or repr(exc)
                )
                return 0

        return self._engine.start(ask())

    async def _ask(self, address: str, question: bytes) -> int:
        communicator = self._engine.communicator
        connection = await self._peers.connection(communicator, address)
        tag = next(self._tags)
        await connection.send(
            _QUESTIONS, tag.to_bytes(_NUMBER_BYTES, "little") + question
        )
        try:
            return int.from_bytes(await connection.recv(tag), "little")
        except asyncio.CancelledError:
            connection.discard(tag)
            raise
