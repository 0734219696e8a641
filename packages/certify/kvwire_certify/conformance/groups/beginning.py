"""How links and lanes open: addresses, joining, and cancellation at every await."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

from kvwire.aio import gather_all
from kvwire.backend import API_VERSION, Availability, Capabilities, Link
from kvwire.errors import BackendUnavailable
from kvwire.limits import BOOTSTRAP_BYTES_MAX
from kvwire.types import Address, MemoryKind
from kvwire_certify.conformance.check import CheckFailed, Group, require
from kvwire_certify.conformance.rig import AnyRig, LaneRig, LinkRig
from kvwire_certify.conformance.sides import LaneSide, LinkSide

address: Group = Group("address")
join: Group = Group("join")
cancel: Group = Group("cancel")

T = TypeVar("T")


# --- address --------------------------------------------------------------------------


@address.links("class", "The class has a scheme, a contract version and capabilities")
async def _(rig: LinkRig) -> None:
    backend = type(rig.near)
    require(backend.scheme == rig.address.scheme, f"its scheme is {backend.scheme!r}")
    require(
        backend.api_version == API_VERSION,
        f"its api_version is {backend.api_version}, not {API_VERSION}",
    )
    kind = type(backend.capabilities)
    require(kind is Capabilities, f"its capabilities are a {kind.__name__}")


@address.both(
    "available",
    "availability() gives a one-line reason why it can run here; its rank is a number",
)
async def _(rig: AnyRig) -> None:
    said = type(rig.near).availability()
    require(isinstance(said, Availability), f"it returned {said!r}")
    require(said.available, f"it reports that it cannot run here: {said.reason}")
    require(len(said.reason.splitlines()) == 1, f"not one line: {said.reason!r}")
    rank: object = type(rig.near).rank()
    require(isinstance(rank, int), f"its rank is {rank!r}, which is not a whole number")


@address.links(
    "bound",
    "A listener's address connects to it, even after conversion to text and back",
)
async def _(rig: LinkRig) -> None:
    address = (await rig.listen()).address
    require(address.scheme == rig.near.scheme, f"the address is {address!r}")
    read = Address.parse(str(address))
    require(read == address, f"{address!r} was read back as {read!r}")
    await rig.connect(read)
    await rig.accept()


@address.links("free", "Two listeners on any free address get two addresses")
async def _(rig: LinkRig) -> None:
    first = await rig.listen()
    second = await rig.listen()
    require(first.address != second.address, f"both are {first.address}")


@address.links(
    "conflict", "Listening on a taken address raises OSError and does no other harm"
)
async def _(rig: LinkRig) -> None:
    taken = (await rig.listen()).address
    with contextlib.suppress(OSError):
        await rig.listen(taken)
        raise CheckFailed(f"listening on {taken} succeeded twice at the same time")
    await rig.connect(taken)
    await rig.accept()


@address.links(
    "again", "An address can be used again while links of its first listener live on"
)
async def _(rig: LinkRig) -> None:
    first = await rig.listen()
    left, right = await rig.pair(first)
    for _ in range(2):
        await rig.unlisten(first)
    second = await rig.listen(first.address)
    require(second.address == first.address, f"it got {second.address}")
    await rig.connect(second.address)
    await rig.accept()
    left.send(70_000)
    right.send(70_000)
    await rig.arrives(right, 1)
    await rig.arrives(left, 1)


@address.links(
    "refused", "Connecting without a listener raises OSError and does no other harm"
)
async def _(rig: LinkRig) -> None:
    gone = await rig.listen()
    await rig.unlisten(gone)
    with contextlib.suppress(OSError):
        await rig.connect(gone.address)
        raise CheckFailed(f"connect to {gone.address} succeeded without a listener")
    left, right = await rig.pair(await rig.listen())
    left.send(10)
    await rig.arrives(right, 1)


@address.links("accept-together", "Sixteen concurrent connects make sixteen links")
async def _(rig: LinkRig) -> None:
    listener = await rig.listen()
    await rig.within(
        gather_all(*(rig.connect(listener.address) for _ in range(16))), "connects"
    )
    for _ in range(16):
        await rig.accept()
    await rig.settle()
    require(not rig.unaccepted, f"{rig.unaccepted} more links were accepted")


@address.links(
    "accept-raises", "An error in accept ends that link, but not the listener"
)
async def _(rig: LinkRig) -> None:
    calls: list[Link] = []

    def accept(link: Link) -> None:
        calls.append(link)
        if len(calls) == 1:
            raise ValueError("planted in accept")

    listener = await rig.listen(accept=accept)
    with rig.expecting_errors():
        # The link may be aborted before the connect that created it returns.
        with contextlib.suppress(OSError):
            await rig.connect(listener.address)
        await rig.until(lambda: len(calls) == 1, "accept is called")
    await rig.connect(listener.address)
    await rig.until(lambda: len(calls) == 2, "accept is called again")


@address.links(
    "remote", "remote_address is the address that a link connected to or came from"
)
async def _(rig: LinkRig) -> None:
    where = (await rig.listen()).address
    remote = (await rig.connect(where)).remote_address
    require(remote in {None, where}, f"it is {remote}, not {where}")
    remote = (await rig.accept()).remote_address
    require(remote is None or isinstance(remote, Address), f"it is {remote!r}")


@address.links("listeners", "A link to either of two listeners reaches that listener")
async def _(rig: LinkRig) -> None:
    seen: dict[str, list[Link]] = {"first": [], "second": []}
    first = await rig.listen(accept=seen["first"].append)
    second = await rig.listen(accept=seen["second"].append)
    for listener in (first, second, second):
        await rig.connect(listener.address)
    await rig.until(
        lambda: len(seen["second"]) == 2, "the second listener has two links"
    )
    await rig.until(lambda: len(seen["first"]) == 1, "the first listener has one link")
    await rig.settle()
    require(len(seen["first"]) == 1, f"the first has {len(seen['first'])}")


@address.links("reversed", "Each backend can listen and connect at the same time")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    links: list[Link] = []
    listening = rig.near.listen(rig.address, links.append)
    listener = await rig.within(listening, "listen")
    connecting = rig.far.connect(listener.address)
    link = await rig.within(connecting, "connect")
    await rig.until(lambda: links, "the near backend accepts a link")
    back = rig.side("back", link)
    forth = rig.side("forth", links[0])
    back.start()
    forth.start()
    forth.send(200_000)
    left.send(100)
    await rig.arrives(back, 1)
    await rig.arrives(right, 1)
    await rig.unlisten(listener)


@address.links("aclose", "A backend without links can be closed, even twice")
async def _(rig: LinkRig) -> None:
    backend = rig.make()
    await rig.within(backend.aclose(), "aclose")
    await rig.within(backend.aclose(), "aclose")


# --- join -----------------------------------------------------------------------------


@join.lanes("idle", "An open lane describes itself, counts nothing and calls nothing")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for side in (left, right):
        lane = side.lane
        name = side.name
        bootstrap = lane.bootstrap
        text = lane.description
        require(isinstance(bootstrap, bytes), f"bootstrap: {type(bootstrap).__name__}")
        require(len(bootstrap) <= BOOTSTRAP_BYTES_MAX, f"of {len(bootstrap)} bytes")
        _require_facts(side)
        await rig.settle()
        require(lane.bootstrap == bootstrap, f"{name}: the bootstrap changed")
        require(text.strip() != "", f"{name}: the description is empty")
        require(text.isprintable(), f"{name}: not a printable line: {text!r}")
        require(lane.queued_bytes == 0, f"{name}: {lane.queued_bytes} queued")
        require(lane.received_bytes == 0, f"{name}: {lane.received_bytes} came")
        require(not side.closed, f"{name} closed by itself")


def _require_facts(side: LaneSide) -> None:
    """Require a lane's properties to have values with which data can be scheduled."""
    lane = side.lane
    name = side.name
    # With a window of 0, no payload would ever be sent.
    for fact, least in (("bytes_min", 1), ("span_bytes", 0), ("window_bytes", 1)):
        value: object = getattr(lane, fact)
        sound = isinstance(value, int) and value >= least
        require(sound, f"{name}: {fact} is {value!r}, not {least} or more")
    intact: object = lane.intact
    require(isinstance(intact, bool), f"{name}: intact is {intact!r}")
    kinds: object = lane.memory_kinds
    sound = isinstance(kinds, frozenset) and bool(kinds)
    sound = sound and all(isinstance(kind, MemoryKind) for kind in lane.memory_kinds)
    require(sound, f"{name}: memory_kinds is {kinds!r}")
    text: object = lane.description
    require(isinstance(text, str), f"{name}: the description is {text!r}")


@join.lanes("at-once", "The client may send as soon as its own join has returned")
async def _(rig: LaneRig) -> None:
    left, right = await rig.half_joined()
    right.holding = True
    await rig.within(left.join(right.lane.bootstrap), "the client's join")
    left.send(300_000)
    right.send(300_000)
    right.take()
    await rig.arrives(right, 1)
    await rig.arrives(left, 1)


@join.lanes("server-early", "A server that has joined may receive arrivals")
async def _(rig: LaneRig) -> None:
    left, right = await rig.half_joined()
    right.flush()
    await rig.settle()
    await rig.within(left.join(right.lane.bootstrap), "the client's join")
    left.send(300_000)
    await rig.arrives(right, 1)


_WRONG: Final[dict[str, Callable[[bytes], bytes]]] = {
    "empty": lambda _: b"",
    "one-byte": lambda bootstrap: bootstrap[:1],
    "half": lambda bootstrap: bootstrap[: len(bootstrap) // 2],
    "too-long": lambda bootstrap: bootstrap + bytes(BOOTSTRAP_BYTES_MAX),
}


@join.lanes("refuses", "Server and client refuse a bootstrap: {}", _WRONG)
async def _(rig: LaneRig, change: Callable[[bytes], bytes]) -> None:
    left, right = rig.prepare()
    await _refuses(rig, right, change(left.lane.bootstrap))
    left, right = await rig.half_joined()
    await _refuses(rig, left, change(right.lane.bootstrap))


async def _refuses(rig: LaneRig, side: LaneSide, bootstrap: bytes) -> None:
    try:
        await rig.within(
            side.join(bootstrap), "join refuses a bootstrap that it cannot read"
        )
    except BackendUnavailable as exc:
        require(str(exc) != "", "the error gives no reason")
    else:
        raise CheckFailed(
            f"{side.name}: join accepted {bootstrap[:20]!r} as a bootstrap"
        )
    await rig.settle()
    require(not side.closed, "lane_closed was called, although join raised")


@join.lanes(
    "peer-gone", "A client whose server is gone gets an error from join or lane_closed"
)
async def _(rig: LaneRig) -> None:
    left, right = await rig.half_joined()
    bootstrap = right.lane.bootstrap
    right.abort()
    await rig.closes(right)
    with contextlib.suppress(BackendUnavailable):
        await rig.within(left.join(bootstrap), "join of a lane that has ended")
        left.send(300_000)
        require(not right.arrived, "a payload arrived on a lane that was aborted")


# The numbers of loop turns before a coroutine is disturbed: first every number up to
# 15, then powers of two, so that a coroutine that waits for its peer also gets to
# finish.
_TURNS: Final = (*range(16), *(2**n for n in range(4, 13)))


@join.lanes(
    "disturbed",
    "A join that is {} leaves nothing, or a lane that ends",
    {"cancelled": asyncio.CancelledError, "aborted": BackendUnavailable},
)
async def _(rig: LaneRig, error: type[BaseException]) -> None:
    for turns in _TURNS:
        left, right = await rig.half_joined()
        task = asyncio.ensure_future(left.join(right.lane.bootstrap))
        for _ in range(turns):
            await asyncio.sleep(0)
        through = task.done()
        if error is BackendUnavailable:
            left.abort()
        else:
            task.cancel()
        joined = asyncio.gather(task, return_exceptions=True)
        (ended,) = await rig.within(joined, "a join that was disturbed")
        said = f"disturbed after {turns} turns, join raised {ended!r}"
        require(ended is None or isinstance(ended, error), said)
        left.abort()
        right.abort()
        await rig.closes(right, *(side for side in (left,) if side.begun))
        await rig.settle()
        require(left.begun or not left.closed, "lane_closed after join has raised")
        rig.forget(left, right)
        if through:
            return


# --- cancel ---------------------------------------------------------------------------


async def _cancelled(
    rig: LinkRig, begin: Callable[[], Coroutine[Any, Any, T]]
) -> AsyncIterator[T | None]:
    """Cancel a coroutine after its first step, another after its second, and so on.

    Yield each one's result, if it had one all the same; end after a coroutine that
    finished first.
    """
    for turns in _TURNS[1:]:
        task = asyncio.ensure_future(begin())
        for _ in range(turns):
            await asyncio.sleep(0)
        through = task.done()
        task.cancel()
        await rig.until(task.done, f"it ends, cancelled at turn {turns}")
        yield None if task.cancelled() else task.result()
        if through:
            return


@cancel.links("connect", "A connect that is cancelled at any await ends on both sides")
async def _(rig: LinkRig) -> None:
    listener = await rig.listen()
    async for link in _cancelled(rig, lambda: rig.near.connect(listener.address)):
        if link is not None:
            link.abort()
    await rig.settle()
    while rig.unaccepted:
        side = rig.side("accepted", await rig.accept())
        side.start()
        await rig.closes(side)
    left, right = await rig.pair()
    left.send(1000)
    await rig.arrives(right, 1)


@cancel.links("connect-refused", "A connect that will be refused can be cancelled")
async def _(rig: LinkRig) -> None:
    listener = await rig.listen()
    await rig.unlisten(listener)
    with contextlib.suppress(OSError):
        async for link in _cancelled(rig, lambda: rig.near.connect(listener.address)):
            require(link is None, "it succeeded without a listener")


@cancel.links("listen", "A listen that is cancelled at any await leaves nothing bound")
async def _(rig: LinkRig) -> None:
    first = await rig.listen()
    address = first.address
    await rig.unlisten(first)
    async for listener in _cancelled(
        rig, lambda: rig.far.listen(address, lambda link: link.abort())
    ):
        if listener is not None:
            await rig.unlisten(listener)
    again = await rig.listen(address)
    require(again.address == address, f"it got {again.address}")


@cancel.links("listener-close", "A cancelled Listener.close still closes")
async def _(rig: LinkRig) -> None:
    listeners = [await rig.listen()]
    address = listeners[0].address

    async def close_newest() -> None:
        await listeners[-1].close()

    async for _ in _cancelled(rig, close_newest):
        await rig.settle()
        listeners.append(await rig.listen(address))
        require(listeners[-1].address == address, f"it got {listeners[-1].address}")
