"""Calls of Python, system calls and frames of operations of ``kvwire bench ops``."""

from __future__ import annotations

import asyncio
from typing import Any

from kvwire_certify.bench.line import Seconds, Turn
from kvwire_certify.bench.sides import Left, Right, opened
from kvwire_certify.bench.work import Work
from packages.certify.tests.bench.counting import Counts, Tally, counting


async def count(work: Work, transport: str, memory: str = "") -> Counts:
    """Count what one operation consists of, with caches in this kind of memory."""
    async with opened("left") as here, opened("right") as there:
        where = await there.listen("tcp://127.0.0.1:0")
        options = {"transport": transport, "memory": memory, "address": str(where)}
        connection = await here.connect(where, transport=transport)
        left = Counted(here, connection, options)
        right = Right(there, await there.accept(), options)
        for _ in range(2):  # the first one warms up
            seconds = await _round(left, right, work)
        left.memory.close()
        right.memory.close()
    return left.tally.of_each(len(seconds))


async def _round(left: Left, right: Right, work: Work) -> Seconds:
    asked, answers = asyncio.Queue[Any](), asyncio.Queue[Any]()

    class Here:
        send, receive = staticmethod(answers.put), staticmethod(asked.get)

    answering = asyncio.ensure_future(right.round(Turn(work), Here()))
    offered = await answers.get()
    found = await left.round(Turn(work, offer=offered["offer"]))
    asked.put_nowait("over")
    await answering
    seconds: Seconds = found["seconds"]
    return seconds


class Counted(Left):
    """A left side whose last round is counted, with what the right one does in it."""

    tally: Tally

    async def move(self, work: Work, reach: Any) -> Seconds:
        with counting() as self.tally:
            return await super().move(work, reach)
