"""What stands beside a store server: two processes that move the same blocks.

*Transfer* is kvwire without the store: the right cache's blocks into the left one's, or
the other way round. *Sockets* are bare ones, whose blocks lie side by side.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from kvwire.cli.bench.bare import SocketsSide
from kvwire.cli.bench.fragments import FragmentsSide
from kvwire.cli.bench.pair import Work
from kvwire.cli.bench.store_side import HASH_BYTES, LOOKUPS, MATCH, ONE, StoreWork
from kvwire.store.namespace import DIGEST_BYTES

# What a store server is asked for each hash, and what it answers.
_ASKED_BYTES: Final = DIGEST_BYTES + HASH_BYTES
_ANSWER_BYTES: Final = 1


class TransferSide(FragmentsSide):
    """A put is a push of a set, a get is a pull; works are those of a store."""

    work_type = StoreWork

    async def prepare(self, work: Any) -> None:
        await super().prepare(work.transfer)

    async def use(self, work: Any, given: None) -> None:
        await super().use(work.transfer, given)

    async def digest(self, work: Any) -> str:
        # One by one, not all of them travel.
        return "" if work.verb == ONE else await super().digest(work.transfer)

    async def drive(self, work: Any) -> dict[str, Any]:
        if work.verb != ONE:
            return await super().drive(work.transfer)
        blocks = self.pool.blocks[: work.count]
        return {"values": [await self.ask(work.transfer, [one]) for one in blocks]}

    async def serve(self, work: Any) -> dict[str, Any]:
        if work.verb != ONE:
            return await super().serve(work.transfer)
        for block in self.pool.blocks[: work.count]:
            await self.offer(work.transfer, [block])
        return {}


class BlockSocketsSide(SocketsSide):
    """Blocks over one connection, and questions of the size of a match."""

    work_type = StoreWork

    async def drive(self, work: Work) -> dict[str, Any]:
        if work.verb == ONE:
            return {"values": self._ask(work, memoryview(b"!"), work.count)}
        if work.verb == MATCH:
            question = memoryview(bytes(work.count * _ASKED_BYTES))
            return {"values": self._ask(work, question, LOOKUPS)}
        return await super().drive(work)

    async def serve(self, work: Work) -> dict[str, Any]:
        if work.verb == ONE:
            self._answer(work, bytearray(b"!"), work.count)
        elif work.verb == MATCH:
            self._answer(work, bytearray(work.count * _ASKED_BYTES), LOOKUPS)
        else:
            return await super().serve(work)
        return {}

    async def digest(self, work: Work) -> str:
        return "" if work.verb == MATCH else await super().digest(work)

    def _ask(self, work: Work, question: memoryview, times: int) -> list[float]:
        """Ask, and wait for the answer; seconds of each."""
        clock, values, parts = time.perf_counter, [], self._answers(work)
        self.wait()
        for number in range(times):
            began = clock()
            self.socket.sendall(question)
            self.receive_into(parts[number % len(parts)])
            values.append(clock() - began)
        return values

    def _answer(self, work: Work, question: bytearray, times: int) -> None:
        parts = self._answers(work)
        self.socket.sendall(b"!")
        for number in range(times):
            self.receive_into(memoryview(question))
            self.socket.sendall(parts[number % len(parts)])

    def _answers(self, work: Work) -> list[memoryview]:
        if work.verb == MATCH:
            return [memoryview(bytearray(work.count * _ANSWER_BYTES))]
        return self.parts(work)

    def send(self, work: Work) -> None:
        """All of a set: one block again and again would stay in the cache."""
        for part in self.parts(work):
            self.socket.sendall(part)

    def receive(self, work: Work) -> None:
        for part in self.parts(work):
            self.receive_into(part)

    def parts(self, work: Work) -> list[memoryview]:
        assert isinstance(work, StoreWork)
        return super().parts(replace(work, in_flight=work.set_blocks))
