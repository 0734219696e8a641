"""Calls and tasks without the caller's context variables.

asyncio keeps a caller's context with each callback, and a callback's context with what
that callback registers. What lasts as long as a link would keep the variables of the
request that happened to dial it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def without_context(call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function without the caller's context variables."""
    return contextvars.Context().run(call, *args, **options)


def lasting_task(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task of a link in a later turn of the running loop."""
    loop = asyncio.get_running_loop()
    return asyncio.Task(coroutine, loop=loop, context=contextvars.Context())
