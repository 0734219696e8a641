"""Chooses the event loops of async tests, and names the callbacks that blocked one.

Each async test runs once on every loop of ``--loops``: on asyncio's own unless the
option says more, on both in ``make test-all``. A test that is marked with
``@pytest.mark.asyncio(loop_factories=[...])`` keeps to the loop of its mark; give the
reason beside it.
Synchronous tests, those of hypothesis included, run once.

Where asyncio's debug mode is on, as in ``make test-all``, callbacks that hold the loop
too long are listed after the run. They fail nothing: on a busy machine their time is
somebody else's.
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
_PROPERTY = "slow callback, s"
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Hook of pytest: the option that names the loops."""
    parser.addoption(
        "--loops",
        default="asyncio",
        help="event loops of async tests: asyncio, uvloop or asyncio,uvloop",
    )


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    """Hook of pytest-asyncio: the loops that an async test runs on."""
    marker = item.get_closest_marker("asyncio")
    if marker and marker.kwargs.get("loop_factories"):
        return _LOOPS  # the test's own choice is taken from these
    names = config.getoption("--loops").split(",")
    if unknown := set(names) - set(_LOOPS):
        raise pytest.UsageError(f"--loops: {sorted(unknown)} not in {sorted(_LOOPS)}")
    return {name: _LOOPS[name] for name in names}


class _SlowCallbacks(logging.Handler):
    """Notes on a test what asyncio's debug mode says of callbacks that took long."""

    def __init__(self, item: pytest.Item) -> None:
        super().__init__(logging.WARNING)
        self._item = item

    def emit(self, record: logging.LogRecord) -> None:
        if took := _TOOK.search(record.getMessage()):
            # Properties of a test also reach us from the processes of pytest-xdist.
            self._item.user_properties.append((_PROPERTY, float(took[1])))


@pytest.fixture(autouse=True)
def _slow_callbacks(request: pytest.FixtureRequest) -> Iterator[None]:
    handler, logger = _SlowCallbacks(request.node), logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Hook of pytest: what to say after the run."""
    found = [
        (seconds, report.nodeid)
        for report in terminalreporter.getreports("passed")
        for name, seconds in report.user_properties
        if name == _PROPERTY and report.when == "call"
    ]
    if not found:
        return
    terminalreporter.section(f"callbacks over {SLOW_CALLBACK_S * 1e3:.0f} ms")
    for seconds, test in sorted(found, reverse=True)[:_SLOWEST_SHOWN]:
        terminalreporter.line(f"{seconds * 1e3:6.0f} ms  {test}")
