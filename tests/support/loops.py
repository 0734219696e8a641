"""Chooses the event loops of async tests.

Each async test runs once on every loop of ``--loops``: on asyncio's own unless the
option says more, on both in ``make test-all``, which also runs all of them once with
eager tasks where there is a Python 3.12. A test that is marked with
``@pytest.mark.asyncio(loop_factories=[...])`` keeps to the loop of its mark; give the
reason beside it. ``virtual`` is only for marks: time jumps, as
:mod:`tests.support.virtual_time` says.
Synchronous tests, those of hypothesis included, run once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import pytest
import uvloop

from tests.support.virtual_time import VirtualTimeLoop

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def eager_loop() -> asyncio.AbstractEventLoop:
    """Make a loop whose tasks take their first step where they are made."""
    factory = getattr(asyncio, "eager_task_factory", None)
    if factory is None:
        raise pytest.UsageError("--loops eager: tasks are eager from Python 3.12 on")
    loop = asyncio.SelectorEventLoop()
    loop.set_task_factory(factory)
    return loop


_LOOPS: Final[dict[str, LoopFactory]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
    "eager": eager_loop,
    "virtual": VirtualTimeLoop,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Hook of pytest: the option that names the loops."""
    parser.addoption(
        "--loops",
        default="asyncio",
        help="event loops of async tests: asyncio, uvloop, eager (asyncio's, with "
        "eager tasks), or several, as asyncio,uvloop",
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
