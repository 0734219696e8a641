"""Coming up: addresses, links, lanes, and coroutines cancelled wherever they wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from kvwire.backend import API_VERSION, Availability, Capabilities, Link, Listener
from kvwire.errors import BackendUnavailable
from kvwire.limits import BOOTSTRAP_BYTES_MAX
from kvwire.testing.conformance.check import CheckFailed, Group, require
from kvwire.testing.conformance.rig import AnyRig, LaneRig, Rig
from kvwire.testing.conformance.sides import LaneSide
from kvwire.types import Address

address: Group = Group("address")
join: Group = Group("join")
cancel: Group = Group("cancel")


# --- address --------------------------------------------------------------------------


async def _refuses(rig: Rig, address: Address) -> None:
    """Nobody listens on ``address``, and the backend says so with an OSError."""
    try:
        link = await rig.within(rig.near.connect(address), "connect is refused")
    except OSError:
        return
    link.abort()
    raise CheckFailed(f"connect to {address} succeeded, where nobody listens")


async def _conflicts(rig: Rig, address: Address) -> None:
    """``address`` is taken, and the backend says so with an OSError."""
    try:
        listener = await rig.within(rig.near.listen(address, _abort), "listen fails")
    except OSError:
        return
    await listener.close()
    raise CheckFailed(f"listen on {address} succeeded twice at once")


def _abort(link: Link) -> None:
    link.abort()


@address.links("class", "The class says its scheme, contract version and capabilities")
async def _(rig: Rig) -> None:
    backend = type(rig.near)
    require(backend.scheme == rig.address.scheme, f"its scheme is {backend.scheme!r}")
    require(
        backend.api_version == API_VERSION,
        f"its api_version is {backend.api_version}, not {API_VERSION}",
    )
    kind = type(backend.capabilities)
    require(kind is Capabilities, f"its capabilities are a {kind.__name__}")


@join.lanes("available", "availability() says in one line why it can be used here")
@address.links("available", "availability() says in one line why it can run here")
async def _(rig: AnyRig) -> None:
    said = type(rig.near).availability()
    require(isinstance(said, Availability), f"it returned {said!r}")
    require(said.available, f"it says it cannot run here: {said.reason}")
    require(len(said.reason.splitlines()) == 1, f"not one line: {said.reason!r}")


@address.links("bound", "A listener's address leads to it, also written and read again")
async def _(rig: Rig) -> None:
    address = (await rig.listen()).address
    require(address.scheme == rig.near.scheme, f"the address is {address!r}")
    read = Address.parse(str(address))
    require(read == address, f"{address!r} was read back as {read!r}")
    await rig.connect(read)
    await rig.accept()


@address.links("free", "Two listeners on any free address get two addresses")
async def _(rig: Rig) -> None:
    first, second = await rig.listen(), await rig.listen()
    require(first.address != second.address, f"both are {first.address}")


@address.links("conflict", "Listening on a taken address is an OSError, and harmless")
async def _(rig: Rig) -> None:
    listener = await rig.listen()
    await _conflicts(rig, listener.address)
    await rig.connect(listener.address)
    await rig.accept()


@address.links("again", "An address can be listened on again after close, also twice")
async def _(rig: Rig) -> None:
    first = await rig.listen()
    for _ in range(2):
        await rig.within(first.close(), "listener.close")
    second = await rig.listen(first.address)
    require(second.address == first.address, f"it got {second.address}")
    await rig.connect(second.address)
    await rig.accept()


@address.links(
    "again-in-use", "An address can be listened on again while old links live"
)
async def _(rig: Rig) -> None:
    listener = await rig.listen()
    left, right = await rig.pair(listener)
    await listener.close()
    await rig.listen(listener.address)
    left.send(100)
    await rig.arrives(right, 1)


@address.links("refused", "Connecting where nobody listens is an OSError, and harmless")
async def _(rig: Rig) -> None:
    gone = await rig.listen()
    await gone.close()
    await _refuses(rig, gone.address)
    left, right = await rig.pair(await rig.listen())
    left.send(10)
    await rig.arrives(right, 1)


@address.links("close-keeps-links", "Closing a listener leaves accepted links alive")
async def _(rig: Rig) -> None:
    listener = await rig.listen()
    left, right = await rig.pair(listener)
    await listener.close()
    left.send(70_000)
    right.send(70_000)
    await rig.arrives(right, 1)
    await rig.arrives(left, 1)


@address.links("accept-together", "Sixteen connects at once are sixteen links")
async def _(rig: Rig) -> None:
    listener = await rig.listen()
    await rig.within(
        asyncio.gather(*(rig.connect(listener.address) for _ in range(16))), "connects"
    )
    for _ in range(16):
        await rig.accept()
    await rig.settle()
    require(not rig.unaccepted, f"{rig.unaccepted} more links came in")


@address.links("accept-raises", "An error in accept costs that link, not the listener")
async def _(rig: Rig) -> None:
    calls: list[Link] = []

    def accept(link: Link) -> None:
        calls.append(link)
        if len(calls) == 1:
            raise ValueError("planted in accept")

    listener = await rig.listen(accept=accept)
    with rig.expecting_errors():
        # The link may be aborted before the connect that made it has returned.
        with contextlib.suppress(OSError):
            await rig.connect(listener.address)
        await rig.until(lambda: len(calls) == 1, "accept is called")
    await rig.connect(listener.address)
    await rig.until(lambda: len(calls) == 2, "accept is called again")


@address.links("remote", "remote_address is where a link connected to, or came from")
async def _(rig: Rig) -> None:
    where = (await rig.listen()).address
    remote = (await rig.connect(where)).remote_address
    require(remote in {None, where}, f"it is {remote}, not {where}")
    remote = (await rig.accept()).remote_address
    require(remote is None or isinstance(remote, Address), f"it is {remote!r}")


@address.links("aclose", "A backend without links can be closed, and twice")
async def _(rig: Rig) -> None:
    backend = rig.make()
    await backend.aclose()
    await backend.aclose()


# --- join -----------------------------------------------------------------------------


@join.lanes("bootstrap", "A bootstrap is short, and the same whenever it is asked")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for side in (left, right):
        bootstrap = side.lane.bootstrap
        require(isinstance(bootstrap, bytes), f"it is a {type(bootstrap).__name__}")
        require(len(bootstrap) <= BOOTSTRAP_BYTES_MAX, f"of {len(bootstrap)} bytes")
        require(side.lane.bootstrap == bootstrap, f"{side.name}: it changed")


@join.lanes("description", "A lane says in one line what moves its bytes")
async def _(rig: LaneRig) -> None:
    for side in await rig.pair():
        text = side.lane.description
        require(text.strip() != "", f"{side.name}: the description is empty")
        require(text.isprintable(), f"{side.name}: no line: {text!r}")


@join.lanes("idle", "A lane that came up counts nothing and calls nothing")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    await rig.settle()
    for side in (left, right):
        lane = side.lane
        require(lane.queued_bytes == 0, f"{side.name}: {lane.queued_bytes} queued")
        require(lane.received_bytes == 0, f"{side.name}: {lane.received_bytes} came")
        require(lane.bytes_min >= 1, f"{side.name}: bytes_min is {lane.bytes_min}")
        require(not side.closed, f"{side.name} closed by itself")


@join.lanes("at-once", "The client may send as soon as its own join has returned")
async def _(rig: LaneRig) -> None:
    left, right = rig.prepare()
    right.holding = True
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    await rig.within(left.join(right.lane.bootstrap), "the client's join")
    left.send(300_000)
    right.send(300_000)
    right.take()
    await rig.arrives(right, 1)
    await rig.arrives(left, 1)


@join.lanes("server-early", "A server that has joined may be told of arrivals")
async def _(rig: LaneRig) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    right.flush()
    await rig.settle()
    await rig.within(left.join(right.lane.bootstrap), "the client's join")
    left.send(300_000)
    await rig.arrives(right, 1)


_WRONG: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "one-byte": lambda bootstrap: bootstrap[:1],
    "half": lambda bootstrap: bootstrap[: len(bootstrap) // 2],
    "too-long": lambda bootstrap: bootstrap + bytes(BOOTSTRAP_BYTES_MAX),
}


@join.lanes("refuses-client", "A server refuses a bootstrap: {}", _WRONG)
async def _(rig: LaneRig, change: Callable[[bytes], bytes]) -> None:
    left, right = rig.prepare()
    await _refused(rig, right, change(left.lane.bootstrap))


@join.lanes("refuses-server", "A client refuses a bootstrap: {}", _WRONG)
async def _(rig: LaneRig, change: Callable[[bytes], bytes]) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    await _refused(rig, left, change(right.lane.bootstrap))


async def _refused(rig: LaneRig, side: LaneSide, bootstrap: bytes) -> None:
    try:
        await rig.within(side.join(bootstrap), "join refuses what it cannot read")
    except BackendUnavailable as exc:
        require(str(exc) != "", "it does not say why")
    else:
        raise CheckFailed(f"{side.name}: join took {bootstrap[:20]!r} for a bootstrap")
    await rig.settle()
    require(not side.closed, "lane_closed was called, although join raised")


@join.lanes("peer-gone", "A client whose server has gone is refused, or is told")
async def _(rig: LaneRig) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    bootstrap = right.lane.bootstrap
    right.abort()
    await rig.closes(right)
    try:
        await rig.within(left.join(bootstrap), "join of a lane that has ended")
    except BackendUnavailable:
        return
    left.send(300_000)
    left.flush()
    require(not right.arrived, "a payload arrived at a lane that was aborted")


@join.lanes("cancelled", "A join that is cancelled leaves nothing and calls nothing")
async def _(rig: LaneRig) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    for turns in range(3):
        task = asyncio.ensure_future(left.join(right.lane.bootstrap))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        require(
            ended is None or isinstance(ended, asyncio.CancelledError),
            f"a cancelled join raised {ended!r}",
        )
        right.abort()
        await rig.settle()
        require(left.begun or not left.closed, "lane_closed after a cancelled join")
        left, right = rig.prepare()
        await rig.within(right.join(left.lane.bootstrap), "the server's join")


# Loop turns after which a join is disturbed: each where a backend may be between two
# steps, then ever more, so that one that waits for its peer comes to its end as well.
_TURNS = (*range(16), *(2**n for n in range(4, 13)))


@join.lanes("aborted", "A join whose lane is aborted raises, or the lane then closes")
async def _(rig: LaneRig) -> None:
    for turns in _TURNS:
        left, right = rig.prepare()
        await rig.within(right.join(left.lane.bootstrap), "the server's join")
        task = asyncio.ensure_future(left.join(right.lane.bootstrap))
        for _ in range(turns):
            await asyncio.sleep(0)
        through = task.done()
        left.abort()
        joined = asyncio.gather(task, return_exceptions=True)
        (ended,) = await rig.within(joined, "join of a lane that was aborted")
        require(
            ended is None or isinstance(ended, BackendUnavailable),
            f"aborted after {turns} turns, join raised {ended!r}",
        )
        if left.begun:
            await rig.closes(left)
        right.abort()
        await rig.closes(right)
        rig.forget(left, right)
        if through:
            return


# --- cancel ---------------------------------------------------------------------------

T = TypeVar("T")
# A coroutine that waits more often than this waits for something that never comes.
_SUSPENSIONS_MAX = 100


class CancelAt(Generic[T]):
    """Runs a coroutine and cancels its task when it waits for the n-th time."""

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


@cancel.links("connect-peer", "The other side of a cancelled connect ends by itself")
async def _(rig: Rig) -> None:
    await _cancel_everywhere(rig)
    while rig.unaccepted:
        side = rig.side("accepted", await rig.accept())
        side.start()
        await rig.closes(side)


@cancel.links("connect-then", "After a cancelled connect the next one succeeds")
async def _(rig: Rig) -> None:
    await _cancel_everywhere(rig)
    while rig.unaccepted:
        (await rig.accept()).abort()
    left, right = await rig.pair()
    left.send(1000)
    await rig.arrives(right, 1)


@cancel.links("connect-refused", "A connect that will be refused can be cancelled")
async def _(rig: Rig) -> None:
    listener = await rig.listen()
    await listener.close()
    try:
        await _cancelled_at(rig, rig.near.connect(listener.address), 0)
    except OSError:
        return  # it was refused before it ever waited


@cancel.links("listen", "listen cancelled wherever it waits leaves nothing bound")
async def _(rig: Rig) -> None:
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


@cancel.links("listener-close", "A cancelled Listener.close closes all the same")
async def _(rig: Rig) -> None:
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
