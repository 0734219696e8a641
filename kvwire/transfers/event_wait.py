"""Waits for a mark's condition: a future, or an event on a device's stream.

A future calls back when it is done. For an event, one of kvwire's own streams waits,
and a thread sleeps until that stream has passed the event; neither the marking thread
nor the device's other streams wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

from kvwire.aio import settler
from kvwire.driver.devices import Devices
from kvwire.errors import BackendUnavailable, UsageError
from kvwire.memory.device.copy_engine import StreamWaiters
from kvwire.memory.device.registry import event_ops

Failure = str
"""How the awaited condition failed; "" if it was met."""


Wait: TypeAlias = "Callable[[Callable[[Failure], None]], None]"
"""Waits for something; its argument is called once, from any thread, at the end."""


class EventWaiter:
    """Waits on behalf of one transfer."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def prepare(self, after: Any) -> Wait:
        """Return a function that waits for a future or event; thread-safe.

        Returns:
            A function that takes a callback, which is called once, from any thread.

        Raises:
            UsageError: The condition is neither a future nor a torch or CuPy event.
            BackendUnavailable: The event's device does not work.
        """
        if hasattr(after, "add_done_callback"):
            return lambda call: after.add_done_callback(
                lambda done: call(_failure(done.result))
            )
        ops = event_ops(after)
        if ops is None:
            raise UsageError(
                f"after={type(after).__name__}: pass a future, a torch.cuda.Event, a "
                f"cupy.cuda.Event, or None"
            )
        return lambda call: self._wait(self._devices.waiters(ops), after, call)

    def _wait(
        self, waiters: StreamWaiters, event: object, call: Callable[[Failure], None]
    ) -> None:
        try:
            # A producer's events fire in order, as those of one stream do.
            waiters.wait(event, lambda error: call(_error_text(error)), source=self)
        except Exception as exc:  # noqa: BLE001 - whatever the device's library raises
            call(_error_text(exc))


async def wait_event(after: Any, devices: Devices) -> None:
    """Wait on a loop for a mark's condition.

    Cancel safety: safe, it only watches.
    """
    over: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
    EventWaiter(devices).prepare(after)(settler(over))
    failure = await over
    if failure:
        raise BackendUnavailable(f"the awaited condition {failure}")


def _failure(result: Callable[[], object]) -> Failure:
    try:
        result()
    except BaseException as exc:  # noqa: BLE001 - whatever it failed with
        return _error_text(exc)
    return ""


def _error_text(error: BaseException | None) -> Failure:
    return "" if error is None else f"failed: {type(error).__name__}: {error}"
