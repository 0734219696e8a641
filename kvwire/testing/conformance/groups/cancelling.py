"""Coroutines cancelled at every point where they wait: nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from kvwire.backend import Listener
from kvwire.testing.conformance.check import CheckFailed, require
from kvwire.testing.conformance.rig import Group, Rig

links: Group = Group("cancel")

T = TypeVar("T")
# A coroutine that waits more often than this waits for something that never comes.
_SUSPENSIONS_MAX = 100


class CancelAt(Generic[T]):
    """Runs a coroutine and cancels its task when it waits for the n-th time.

    Args:
        coroutine: What to run.
        suspension: Which wait, from 0.

    Attributes:
        reached: Whether it waited that often.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T], suspension: int) -> None:
        self.reached: bool = False
        self._coroutine = coroutine
        self._suspension = suspension

    def __await__(self) -> Generator[Any, Any, T]:
        """Pass every wait through; cancel at the chosen one."""
        steps = self._coroutine.__await__()
        resume: Callable[[Any], Any] = steps.send
        answer: Any = None
        count = 0
        while True:
            try:
                waited_for = resume(answer)
            except StopIteration as done:
                result: T = done.value
                return result
            if count == self._suspension:
                self.reached = True
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            count += 1
            try:
                answer = yield waited_for
                resume = steps.send
            except BaseException as exc:  # noqa: BLE001 - passed on to the coroutine
                resume, answer = steps.throw, exc


async def _run(runner: CancelAt[T]) -> T:
    return await runner


async def _cancelled_at(
    rig: Rig, coroutine: Coroutine[Any, Any, T], suspension: int
) -> tuple[bool, T | None]:
    """Whether the coroutine waited that often, and what it returned if it ended."""
    runner = CancelAt(coroutine, suspension)
    task = asyncio.create_task(_run(runner))
    await rig.until(task.done, f"it ends, cancelled at its wait number {suspension}")
    return runner.reached, None if task.cancelled() else task.result()


async def _cancel_everywhere(rig: Rig) -> None:
    """Cancel a connect at its first wait, another at its second, and so on."""
    listener = await rig.listen()
    for suspension in range(_SUSPENSIONS_MAX):
        connecting = rig.near.connect(listener.address)
        reached, link = await _cancelled_at(rig, connecting, suspension)
        if link is not None:
            link.abort()
        if not reached:
            await rig.settle()
            return
    raise CheckFailed(f"connect waits more than {_SUSPENSIONS_MAX} times")


@links.check("connect", "connect cancelled wherever it waits leaves nothing")
async def _connect(rig: Rig) -> None:
    await _cancel_everywhere(rig)


@links.check("connect-peer", "The other side of a cancelled connect ends by itself")
async def _connect_peer(rig: Rig) -> None:
    await _cancel_everywhere(rig)
    while rig.unaccepted:
        side = rig.side("accepted", await rig.accept())
        side.start()
        await rig.closes(side)


@links.check("connect-then", "After a cancelled connect the next one succeeds")
async def _connect_then(rig: Rig) -> None:
    await _cancel_everywhere(rig)
    while rig.unaccepted:
        (await rig.accept()).abort()
    left, right = await rig.pair()
    left.send(1000)
    await rig.arrives(right, 1)


@links.check("connect-refused", "A connect that will be refused can be cancelled")
async def _connect_refused(rig: Rig) -> None:
    listener = await rig.listen()
    await listener.close()
    try:
        await _cancelled_at(rig, rig.near.connect(listener.address), 0)
    except OSError:
        return  # it was refused before it ever waited


@links.check("listen", "listen cancelled wherever it waits leaves nothing bound")
async def _listen(rig: Rig) -> None:
    first = await rig.listen()
    address = first.address
    await first.close()
    for suspension in range(_SUSPENSIONS_MAX):
        listening = rig.far.listen(address, lambda link: link.abort())
        reached, listener = await _cancelled_at(rig, listening, suspension)
        if listener is not None:
            await listener.close()
        if not reached:
            break
    require(not reached, f"listen waits more than {_SUSPENSIONS_MAX} times")
    again = await rig.listen(address)
    require(again.address == address, f"it got {again.address}")


@links.check("listener-close", "A cancelled Listener.close closes all the same")
async def _listener_close(rig: Rig) -> None:
    for suspension in range(_SUSPENSIONS_MAX):
        listener: Listener = await rig.listen()
        address = listener.address
        reached, _ = await _cancelled_at(rig, _close(listener), suspension)
        await rig.settle()
        again = await rig.listen(address)
        require(again.address == address, f"{address} is still bound")
        if not reached:
            return


async def _close(listener: Listener) -> None:
    await listener.close()
