"""What stands beside a store server: two processes that move the same blocks.

*Transfer* is kvwire without the store: the right cache's blocks into the left one's, or
the other way round. *Sockets* are bare ones, whose blocks lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from kvwire.cli.bench.bare import SocketsSide, receive_into
from kvwire.cli.bench.operations import OpsSide
from kvwire.cli.bench.side import each_timed
from kvwire.cli.bench.store_side import HASH_BYTES, LOOKUPS, MATCH, ONE, StoreWork
from kvwire.store.namespace import DIGEST_BYTES

# What a store server is asked for each hash, and what it answers.
_ASKED_BYTES: Final = DIGEST_BYTES + HASH_BYTES
_ANSWER_BYTES: Final = 1


class TransferSide(OpsSide):
    """A put is a push of a set, a get is a pull; works are those of a store.

    One by one, the first blocks travel, each by itself.
    """

    work_type = StoreWork

    async def prepare(self, work: Any) -> str:
        return await super().prepare(work.transfer)

    async def use(self, work: Any, given: str) -> None:
        await super().use(work.transfer, given)

    async def digest(self, work: Any) -> str:
        # One by one, not all of them travel.
        return "" if work.verb == ONE else await super().digest(work.transfer)

    async def drive(self, work: Any) -> Sequence[float]:
        seconds: list[float] = []
        for _ in self._each(work):
            seconds += await super().drive(work.transfer)
        return seconds

    async def serve(self, work: Any) -> None:
        for _ in self._each(work):
            await super().serve(work.transfer)

    def _each(self, work: StoreWork) -> Iterator[None]:
        """Have a transfer move all blocks, or several a block each."""
        whole = self.pool.blocks
        each = [[block] for block in whole[: work.count]]
        for self.pool.blocks in each if work.verb == ONE else [whole]:
            yield
        self.pool.blocks = whole


class BlockSocketsSide(SocketsSide[StoreWork]):
    """Blocks over one connection, and questions of the size of a match."""

    work_type = StoreWork

    async def drive(self, work: StoreWork) -> Sequence[float]:
        if work.verb not in (ONE, MATCH):
            return await super().drive(work)
        question, times = self._question(work)
        parts = self._answers(work)

        async def ask(number: int) -> None:
            self.socket.sendall(question)
            receive_into(self.socket, parts[number % len(parts)])

        self.wait()
        return await each_timed(times, ask)

    async def serve(self, work: StoreWork) -> None:
        if work.verb not in (ONE, MATCH):
            await super().serve(work)
            return
        question, times = self._question(work)
        parts = self._answers(work)
        self.socket.sendall(b"!")
        for number in range(times):
            receive_into(self.socket, question)
            self.socket.sendall(parts[number % len(parts)])

    async def digest(self, work: StoreWork) -> str:
        return "" if work.verb == MATCH else await super().digest(work)

    def _question(self, work: StoreWork) -> tuple[memoryview, int]:
        """What is asked, and how often."""
        if work.verb == ONE:
            return memoryview(bytearray(b"!")), work.count
        return memoryview(bytearray(work.count * _ASKED_BYTES)), LOOKUPS

    def _answers(self, work: StoreWork) -> list[memoryview]:
        if work.verb == MATCH:
            return [memoryview(bytearray(work.count * _ANSWER_BYTES))]
        return self.parts(work)

    def send(self, work: StoreWork) -> None:
        """All of a set: one block again and again would stay in the cache."""
        for part in self.parts(work):
            self.socket.sendall(part)

    def receive(self, work: StoreWork) -> None:
        for part in self.parts(work):
            receive_into(self.socket, part)

    def parts(self, work: StoreWork) -> list[memoryview]:
        return super().parts(replace(work, in_flight=work.set_blocks))
