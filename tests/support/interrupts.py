"""Ctrl-C in a call of an engine, at a moment of a test's choice."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """A function that interrupts this thread's wait for a result, from any thread.

    A signal that comes just before the wait would not end it.
    """
    here = threading.current_thread()
    asked = threading.Event()
    usual = concurrent.futures.Future.result

    def result(
        self: concurrent.futures.Future[Any], timeout: float | None = None
    ) -> Any:
        if threading.current_thread() is not here:
            return usual(self, timeout)
        assert asked.wait(PATIENCE_S)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concurrent.futures.Future, "result", result)
        yield asked.set
