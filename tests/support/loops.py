"""Runs every async test on both event loops, and names the callbacks that blocked one.

``@pytest.mark.asyncio(loop_factories=["asyncio"])`` keeps a test to one loop; say why
beside it. Synchronous tests, those of hypothesis included, run once.

A callback that holds the loop too long is listed after the run and fails nothing: on a
busy machine its time is somebody else's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

# A callback above this holds up every other connection of the loop.
SLOW_CALLBACK_S = 0.05
_SLOWEST_SHOWN = 5
_TOOK = re.compile(r"took (\d+\.\d+) seconds")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _strict(make: LoopFactory) -> LoopFactory:
    def loop() -> asyncio.AbstractEventLoop:
        made = make()
        made.slow_callback_duration = SLOW_CALLBACK_S
        return made

    return loop


_LOOPS = {
    "asyncio": _strict(asyncio.SelectorEventLoop),
    "uvloop": _strict(uvloop.new_event_loop),
}


def pytest_asyncio_loop_factories() -> Mapping[str, LoopFactory]:
    """Hook of pytest-asyncio: the loops that every async test runs on."""
    return _LOOPS


class _SlowCallbacks(logging.Handler):
    """Collects what asyncio's debug mode says about callbacks that took long."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.test = ""
        self.found: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if took := _TOOK.search(record.getMessage()):
            self.found.append((float(took[1]), self.test))


_slow = _SlowCallbacks()


@pytest.fixture(autouse=True)
def _slow_callbacks(request: pytest.FixtureRequest) -> Iterator[None]:
    logger = logging.getLogger("asyncio")
    _slow.test = request.node.nodeid
    logger.addHandler(_slow)
    yield
    logger.removeHandler(_slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Hook of pytest: what to say after the run."""
    if not _slow.found:
        return
    terminalreporter.section(f"callbacks over {SLOW_CALLBACK_S * 1e3:.0f} ms")
    for seconds, test in sorted(_slow.found, reverse=True)[:_SLOWEST_SHOWN]:
        terminalreporter.line(f"{seconds * 1e3:6.0f} ms  {test}")
