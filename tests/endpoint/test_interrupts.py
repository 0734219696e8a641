"""Ctrl-C at each line that the main thread runs in an engine: it arrives, and leaves
nothing behind.

A trace function raises where the interpreter would. It is planted in the lines of
kvwire, one after the other, until a call is through before its turn comes.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

import kvwire
from kvwire.endpoint import engine as engine_module
from kvwire.endpoint import io_thread
from kvwire_certify.conformance.rig import open_descriptors

# Where the interrupt comes before anybody has looked at the coroutine.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
LINES_OF = (io_thread.__file__, engine_module.__file__)


def interrupted(line: int, call: Callable[[], object]) -> bool:
    """Call it, with Ctrl-C at its nth line; whether it came to that."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in LINES_OF:
            return None
        if event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def each_line(call: Callable[[], object]) -> Iterator[int]:
    line = 1
    while interrupted(line, call):
        yield line
        line += 1


def engines() -> list[str]:
    return [one.name for one in threading.enumerate() if "kvwire" in one.name]


def nobody_is_left() -> bool:
    for one in threading.enumerate():
        if "kvwire" in one.name:
            one.join(10)
    return not engines()


@pytest.fixture
def engine() -> Iterator[kvwire.Engine]:
    with kvwire.Engine(name="e") as made:
        yield made


def test_while_an_engine_is_made() -> None:
    kvwire.Engine().close()
    before = open_descriptors()
    made: list[kvwire.Engine] = []
    line = 0
    for line in each_line(lambda: made.append(kvwire.Engine())):
        assert nobody_is_left(), f"after line {line}"
    for engine in made:
        engine.close()
    assert len(made) == 1
    assert line > 30
    assert open_descriptors() == before


def test_while_its_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Thread.start`` waits for the thread, which then is there."""
    start = threading.Thread.start

    def interrupted_start(self: threading.Thread) -> None:
        start(self)
        if self.name == "kvwire-engine":
            raise KeyboardInterrupt

    before = open_descriptors()
    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            kvwire.Engine()
    assert nobody_is_left()
    assert open_descriptors() == before


def test_while_it_calls(engine: kvwire.Engine) -> None:
    """The call has ended then, if it ever began, and the engine is well."""
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            ends.append("through")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    started = sum(1 for _ in each_line(lambda: engine.run(work())))
    assert started > 15
    assert set(ends) <= {"through", "cancelled"}
    assert engine.run(io_thread.called(lambda: 3)) == 3


def test_while_it_closes() -> None:
    line = 0
    over = False
    while not over:
        line += 1
        engine = kvwire.Engine(name="e")
        over = not interrupted(line, engine.close)
        with suppress(kvwire.ClosedOK):
            engine.run(asyncio.sleep(0))
        engine.close()
        assert nobody_is_left(), f"after line {line}"
    assert line > 10
