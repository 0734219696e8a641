"""What stands beside a store server: two processes that move the same blocks.

*Transfer* is kvwire without the store: the right cache's blocks into the left one's, or
the other way round. *Sockets* are bare ones, whose blocks lie side by side.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from kvwire.cli.bench.case import Work
from kvwire.cli.bench.fragment_work import LEFT, RIGHT, FragmentWork
from kvwire.cli.bench.sides.fragments_half import FragmentsHalf, Pool
from kvwire.cli.bench.sides.sockets_half import SocketsHalf
from kvwire.cli.bench.store_work import HASH_BYTES, LOOKUPS, MATCH, ONE, StoreWork
from kvwire.store.namespace import DIGEST_BYTES

# What a store server is asked for each hash, and what it answers.
_ASKED_BYTES: Final = DIGEST_BYTES + HASH_BYTES
_ANSWER_BYTES: Final = 1
_SIGNAL: Final = b"!"


class TransferHalf(FragmentsHalf):
    """A put is a push of a set, a get is a pull."""

    work_type = StoreWork

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half."""
        return await super().check_left(_transfer(work))

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        return await super().check_right(_transfer(work))

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Half."""
        transfer, pool = _transfer(work), self._have(work, LEFT)
        if work.verb != ONE:
            return await super().drive(transfer)
        blocks = pool.blocks[: work.count]
        values = [await self._ask(transfer, pool.cache, [block]) for block in blocks]
        return {"values": values}

    async def serve(self, work: Work) -> dict[str, Any]:
        """See Half."""
        transfer, pool = _transfer(work), self._have(work, RIGHT)
        if work.verb != ONE:
            return await super().serve(transfer)
        for block in pool.blocks[: work.count]:
            await self._offer(transfer, pool.cache, [block])
        return {}

    def _have(self, work: Work, side: int) -> Pool:
        return super()._have(_transfer(work), side)


class BlockSocketsHalf(SocketsHalf):
    """Blocks over one connection, and questions of the size of a match."""

    work_type = StoreWork

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Half."""
        if work.verb == ONE:
            return {"values": self._ask(work, memoryview(_SIGNAL), work.count)}
        if work.verb == MATCH:
            question = memoryview(bytes(work.count * _ASKED_BYTES))
            return {"values": self._ask(work, question, LOOKUPS)}
        return await super().drive(work)

    async def serve(self, work: Work) -> dict[str, Any]:
        """See Half."""
        if work.verb == ONE:
            self._answer(work, bytearray(_SIGNAL), work.count)
        elif work.verb == MATCH:
            self._answer(work, bytearray(work.count * _ASKED_BYTES), LOOKUPS)
        else:
            return await super().serve(work)
        return {}

    def _ask(self, work: Work, question: memoryview, times: int) -> list[float]:
        """Ask, and wait for the answer; seconds of each."""
        clock, values, parts = time.perf_counter, [], self._answers(work)
        self._wait()
        for number in range(times):
            began = clock()
            self._socket.sendall(question)
            self._fill_from_socket(parts[number % len(parts)])
            values.append(clock() - began)
        return values

    def _answer(self, work: Work, question: bytearray, times: int) -> None:
        parts = self._answers(work)
        self._socket.sendall(_SIGNAL)
        for number in range(times):
            self._fill_from_socket(memoryview(question))
            self._socket.sendall(parts[number % len(parts)])

    def _answers(self, work: Work) -> list[memoryview]:
        if work.verb == MATCH:
            return [memoryview(bytearray(work.count * _ANSWER_BYTES))]
        return self._memory(work)

    def _send(self, work: Work) -> None:
        for part in self._memory(work):
            self._socket.sendall(part)

    def _receive(self, work: Work) -> None:
        for part in self._memory(work):
            self._fill_from_socket(part)

    def _memory(self, work: Work) -> list[memoryview]:
        """All of a set: one block again and again would stay in the cache."""
        assert isinstance(work, StoreWork)
        return super()._memory(replace(work, in_flight=work.set_blocks))


def _transfer(work: Work) -> FragmentWork:
    if isinstance(work, FragmentWork):
        return work
    assert isinstance(work, StoreWork)
    return work.transfer
