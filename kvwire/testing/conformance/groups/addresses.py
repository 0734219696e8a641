"""Listening, connecting and addresses."""

from __future__ import annotations

import asyncio
import contextlib

from kvwire.backend import API_VERSION, Availability, Capabilities, Link
from kvwire.testing.conformance.check import CheckFailed, require
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.types import Address

links: Group = Group("address")


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


@links.check("class", "The class says its scheme, contract version and capabilities")
async def _class(rig: Rig) -> None:
    backend = type(rig.near)
    require(backend.scheme == rig.address.scheme, f"its scheme is {backend.scheme!r}")
    require(
        backend.api_version == API_VERSION,
        f"its api_version is {backend.api_version}, not {API_VERSION}",
    )
    kind = type(backend.capabilities)
    require(kind is Capabilities, f"its capabilities are a {kind.__name__}")


@links.check("available", "availability() says in one line why it can run here")
async def _available(rig: Rig) -> None:
    said = type(rig.near).availability()
    require(isinstance(said, Availability), f"it returned {said!r}")
    require(said.available, f"it says it cannot run here: {said.reason}")
    require(len(said.reason.splitlines()) == 1, f"not one line: {said.reason!r}")


@links.check("bound", "A listener's address leads to it, also written and read again")
async def _bound(rig: Rig) -> None:
    address = (await rig.listen()).address
    require(address.scheme == rig.near.scheme, f"the address is {address!r}")
    read = Address.parse(str(address))
    require(read == address, f"{address!r} was read back as {read!r}")
    await rig.connect(read)
    await rig.accept()


@links.check("free", "Two listeners on any free address get two addresses")
async def _free(rig: Rig) -> None:
    first, second = await rig.listen(), await rig.listen()
    require(first.address != second.address, f"both are {first.address}")


@links.check("conflict", "Listening on a taken address is an OSError, and harmless")
async def _conflict(rig: Rig) -> None:
    listener = await rig.listen()
    await _conflicts(rig, listener.address)
    await rig.connect(listener.address)
    await rig.accept()


@links.check("again", "An address can be listened on again after close")
async def _again(rig: Rig) -> None:
    first = await rig.listen()
    await first.close()
    second = await rig.listen(first.address)
    require(second.address == first.address, f"it got {second.address}")
    await rig.connect(second.address)
    await rig.accept()


@links.check("again-in-use", "An address can be listened on again while old links live")
async def _again_in_use(rig: Rig) -> None:
    listener = await rig.listen()
    left, right = await rig.pair(listener)
    await listener.close()
    await rig.listen(listener.address)
    left.send(100)
    await rig.arrives(right, 1)


@links.check("refused", "Connecting where nobody listens is an OSError, and harmless")
async def _refused(rig: Rig) -> None:
    gone = await rig.listen()
    await gone.close()
    await _refuses(rig, gone.address)
    left, right = await rig.pair(await rig.listen())
    left.send(10)
    await rig.arrives(right, 1)


@links.check("close-idle", "A listener that never had a link closes at once, and twice")
async def _close_idle(rig: Rig) -> None:
    listener = await rig.listen()
    for _ in range(2):
        await rig.within(listener.close(), "listener.close")


@links.check("close-keeps-links", "Closing a listener leaves accepted links alive")
async def _close_keeps_links(rig: Rig) -> None:
    listener = await rig.listen()
    left, right = await rig.pair(listener)
    await listener.close()
    left.send(70_000)
    right.send(70_000)
    await rig.arrives(right, 1)
    await rig.arrives(left, 1)


@links.check("accept-once", "accept gets exactly one link for each connect")
async def _accept_once(rig: Rig) -> None:
    listener = await rig.listen()
    for _ in range(10):
        await rig.connect(listener.address)
        await rig.accept()
    await rig.settle()
    require(not rig.unaccepted, f"{rig.unaccepted} more links came in")


@links.check("accept-together", "Sixteen connects at once all succeed")
async def _accept_together(rig: Rig) -> None:
    listener = await rig.listen()
    await rig.within(
        asyncio.gather(*(rig.connect(listener.address) for _ in range(16))), "connects"
    )
    for _ in range(16):
        await rig.accept()


@links.check("accept-unstarted", "A link that came in receives nothing before start")
async def _accept_unstarted(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.send(100)
    await rig.settle()
    right.start()
    await rig.arrives(right, 1)


@links.check("accept-raises", "An error in accept costs that link, not the listener")
async def _accept_raises(rig: Rig) -> None:
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


@links.check("remote", "remote_address is where a link connected to, or came from")
async def _remote(rig: Rig) -> None:
    where = (await rig.listen()).address
    remote = (await rig.connect(where)).remote_address
    require(remote in {None, where}, f"it is {remote}, not {where}")
    remote = (await rig.accept()).remote_address
    require(remote is None or isinstance(remote, Address), f"it is {remote!r}")


@links.check("aclose", "A backend without links can be closed, and twice")
async def _aclose(rig: Rig) -> None:
    backend = rig.make()
    await backend.aclose()
    await backend.aclose()
