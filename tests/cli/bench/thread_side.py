"""The two sides of a benchmark as threads of this process: what they do, in a second.

What a process adds, tests of :mod:`kvwire.cli.bench.pair` show, and those marked slow.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

import uvloop

from kvwire.cli.bench.pair import ANSWER_TIMEOUT_S, Contender, SideProcess
from kvwire.cli.bench.side import Side, answer, make

_LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class ThreadSide(SideProcess):
    """A side on a loop of its own; see SideProcess."""

    def __init__(self, contender: Contender, role: type[Any] | str) -> None:
        assert isinstance(role, type), "a peer is a program of its own"
        # Undone by the fixture; all sides of one test get the same.
        os.environ.update(contender.environment)
        self.role = f"{role.__module__}:{role.__qualname__}"
        self._options = {name: str(v) for name, v in contender.options.items()}
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._asked: asyncio.Queue[bytes] = asyncio.Queue()
        self._stopped = asyncio.Event()
        self._loop = _LOOPS[self._options.get("loop", "asyncio")]()
        self._thread = threading.Thread(target=self._run, name=f"side {self.role}")
        self._thread.start()

    def ask(self, name: str, **arguments: Any) -> None:
        line = json.dumps({"call": name, "arguments": arguments}).encode()
        self._loop.call_soon_threadsafe(self._asked.put_nowait, line)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def line(self) -> bytes:
        return self._answers.get(timeout=ANSWER_TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._obey())

    async def _obey(self) -> None:
        side = make(self.role, self._options)
        obeying = asyncio.create_task(self._answer_all(side))
        await self._stopped.wait()
        # It may wait for somebody who will never come; a process is killed then.
        obeying.cancel()
        await asyncio.wait([obeying])
        await side.close()

    async def _answer_all(self, side: Side[Any]) -> None:
        while True:
            self._answers.put(await answer(side, await self._asked.get()))
