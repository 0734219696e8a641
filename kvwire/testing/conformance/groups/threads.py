"""Two backends in two threads, each on a loop of its own, as engines have them."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

from kvwire.limits import MIB
from kvwire.testing.conformance.check import CheckFailed, require
from kvwire.testing.conformance.content import CUTS, Memory, poison
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.side import KitLanding, LinkSide
from kvwire.types import Address

links: Group = Group("threads")

Far = Callable[[Rig, LinkSide], Awaitable[None]]


class Elsewhere:
    """A thread with a loop, where the other side of a link lives.

    Entered, it gives the side on this thread, started. Left, it waits for the thread.

    Args:
        rig: The near side's.
        far: What the far side does with its link.
    """

    def __init__(self, rig: Rig, far: Far) -> None:
        self._rig = rig
        self._far = far
        self._thread = threading.Thread(target=self._main, name="conformance")
        self._address: Address | None = None
        self._connected = False
        self._error: BaseException | None = None

    async def __aenter__(self) -> LinkSide:
        """Start the thread, and connect to it."""
        self._thread.start()
        await self._rig.until(
            lambda: bool(self._address) or not self._thread.is_alive(), "it listens"
        )
        if self._address is None:
            raise self._error or CheckFailed("the thread ended")
        left = self._rig.side("left", await self._rig.connect(self._address))
        self._connected = True
        left.start()
        return left

    async def __aexit__(self, _: object, error: object, __: object) -> None:
        """Wait until the far side has done what it does."""
        self._thread.join(0 if error is None else self._rig.timeout_s)
        if error is None:
            await self._rig.until(lambda: not self._thread.is_alive(), "the end there")
            if self._error is not None:
                raise self._error

    def _main(self) -> None:
        loop = type(self._rig.loop)()
        try:
            loop.run_until_complete(self._live())
        except BaseException as exc:  # noqa: BLE001 - raised again by the near side
            self._error = exc
        finally:
            loop.close()

    async def _live(self) -> None:
        near = self._rig
        rig = Rig(near.make, near.address, near.timeout_s, alone=False)
        try:
            self._address = (await rig.listen()).address
            right = rig.side("right", await rig.accept())
            # A link that is reset before its connect returns is a failed connect.
            await rig.until(lambda: self._connected, "the near side has connected")
            await self._far(rig, right)
        finally:
            await rig.aclose()


async def _echo_until_closed(rig: Rig, right: LinkSide) -> None:
    def echo(landing: KitLanding) -> None:
        right.queue(landing.head.length, CUTS["pages"], number=landing.head.number)
        right.flush()

    right.land = lambda head: Memory(head.length, CUTS["uneven"])
    right.on_arrival = echo
    right.start()
    await rig.closes(right)


async def _start_and_wait(rig: Rig, right: LinkSide) -> None:
    right.start()
    await rig.closes(right)


async def _abort_in_body(rig: Rig, right: LinkSide) -> None:
    right.on_arrival = lambda landing: right.abort()
    right.start()
    await rig.closes(right)


async def _never_start(rig: Rig, right: LinkSide) -> None:
    await rig.settle()


@links.check("echo", "Frames go to and fro between two threads")
async def _echo(rig: Rig) -> None:
    async with Elsewhere(rig, _echo_until_closed) as left:
        for size in (0, 1, 5000, 300_000, MIB) * 4:
            left.send(size, CUTS["odd-pages"])
        await rig.arrives(left, 20)
        require(left.arrived == list(range(20)), f"they came as {left.arrived}")
        left.close()
        await rig.closes(left)


@links.check("bulk", "Bulk goes both ways between threads, and memory is given back")
async def _bulk(rig: Rig) -> None:
    async with Elsewhere(rig, _echo_until_closed) as left:
        left.on_sent = poison
        left.send_many(16, 2 * MIB)
        await rig.arrives(left, 16)
        await rig.given_back(left)
        left.close()
        await rig.closes(left)


@links.check("abort", "abort while the other thread receives: memory is free at once")
async def _abort(rig: Rig) -> None:
    async with Elsewhere(rig, _start_and_wait) as left:
        sent = left.send_many(8, 4 * MIB)
        await rig.until(lambda: len(left.sent) > 0, "the first frame is sent")
        left.abort()
        await rig.closes(left)
        for token in sent:
            poison(token)


@links.check("aborted", "abort by the other thread while this one sends")
async def _aborted(rig: Rig) -> None:
    async with Elsewhere(rig, _abort_in_body) as left:
        left.send_many(32, MIB)
        await rig.closes(left)


@links.check("unstarted", "The other thread ends and has not started its link")
async def _unstarted(rig: Rig) -> None:
    async with Elsewhere(rig, _never_start) as left:
        await rig.closes(left)
    left.queue(100, token=False)
    left.flush()
