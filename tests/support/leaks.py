"""Fails a test that leaves something behind: a descriptor, a thread, a task, an error.

Two fixtures of every test do it, and their order is the point. ``_nothing_left`` is set
up before the test's event loop exists and torn down after it is closed, so that what
the loop itself holds, its default executor included, is not counted.
``_loop_left_empty`` lives inside the loop and around the test's own async fixtures,
because closing a loop cancels what still runs in it and so hides it.

An exception nobody retrieved is only noticed when its task is collected, and a
descriptor may sit in a reference cycle. So every test ends with a collection. Freezing
what survives one (modules, reports) keeps the next at 0.1 ms instead of 30 and more.
What is frozen and becomes garbage later is looked at again after ``_TESTS_FROZEN``
tests; without that a run of the whole suite grew to 2 GB.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvloop
from pytest_asyncio import is_async_test

from kvwire_certify.conformance.rig import open_descriptors

# Grace for a thread that has been told to end and is on its way out, and for what a
# thread of a fixture, such as a server of other tests too, has open for a moment.
THREAD_EXIT_S = 1.0
_LOOK_AGAIN_S = 0.05

# A look at everything takes a second, so it is less than 1 ms a test.
_TESTS_FROZEN = 1500

_errors: list[str] = []
_tests = itertools.count(1)


def pytest_collection_finish() -> None:
    """Hook of pytest: all tests are imported and none has run."""
    # libuv makes a process-wide signal pipe with its first loop and keeps it.
    uvloop.new_event_loop().close()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    _errors.clear()
    yield
    if next(_tests) % _TESTS_FROZEN == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    # Threads first: one that is on its way out has yet to close what it opened.
    left = [f"thread {thread.name!r}" for thread in _started_since(threads)]
    left += [f"descriptor {fd}: {what}" for fd, what in _opened_since(descriptors)]
    left += _errors
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _watch_loop(request: pytest.FixtureRequest, _nothing_left: None) -> None:
    if is_async_test(request.node):
        request.getfixturevalue("_loop_left_empty")


@pytest.fixture
async def _loop_left_empty() -> AsyncIterator[None]:
    asyncio.get_running_loop().set_exception_handler(_note_error)
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        names = "\n  ".join(sorted(repr(task) for task in left))
        pytest.fail(f"tasks left behind:\n  {names}", pytrace=False)


def _note_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio would only have logged, such as a never retrieved exception."""
    cause, text = context.get("exception"), context.get("message", "in the loop")
    _errors.append(f"{text}: {cause!r}" if cause else text)


def _opened_since(before: dict[int, str]) -> list[tuple[int, str]]:
    if sys.platform != "linux":
        return []
    until = time.monotonic() + THREAD_EXIT_S
    while True:
        opened = sorted(open_descriptors().items() - before.items())
        left = [(fd, what) for fd, what in opened if not _of_a_library(what)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(_LOOK_AGAIN_S)


def _of_a_library(what: str) -> bool:
    """Whether a library has opened it, and keeps it for as long as it likes."""
    if what.startswith("socket:"):
        # A driver of Ray connects to each worker that it has met.
        return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())
    return what.endswith(".ttf")  # matplotlib keeps the fonts that it has used


def _started_since(before: set[threading.Thread]) -> list[threading.Thread]:
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(THREAD_EXIT_S)
    return [thread for thread in started if thread.is_alive()]
