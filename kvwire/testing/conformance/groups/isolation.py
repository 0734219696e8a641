"""Links do not mix, and what befalls one does not touch another."""

from __future__ import annotations

from kvwire.backend import Link
from kvwire.limits import MIB
from kvwire.testing.conformance.check import Planted, raise_planted, require
from kvwire.testing.conformance.content import CUTS, Memory
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.side import LinkSide

links: Group = Group("isolation")


@links.check("sixteen", "Frames of sixteen links do not mix")
async def _sixteen(rig: Rig) -> None:
    pairs = [await rig.pair() for _ in range(16)]
    for _ in range(4):
        for i, (left, right) in enumerate(pairs):
            _queue_own(left, i)
            _queue_own(right, i + 100)
    await _all_own(rig, pairs, 4)


@links.check("listeners", "Links of two listeners come to the right one")
async def _listeners(rig: Rig) -> None:
    seen: dict[str, list[Link]] = {"first": [], "second": []}
    first = await rig.listen(accept=seen["first"].append)
    second = await rig.listen(accept=seen["second"].append)
    for listener in (first, second, second):
        await rig.connect(listener.address)
    await rig.until(lambda: len(seen["second"]) == 2, "the second listener has two")
    await rig.until(lambda: len(seen["first"]) == 1, "the first listener has one")
    await rig.settle()
    require(len(seen["first"]) == 1, f"the first has {len(seen['first'])}")


def _queue_own(side: LinkSide, owner: int) -> None:
    """Queue a frame that says whose it is."""
    number = owner * 1000 + side.queued
    side.queue(number % 9 * 20_000, CUTS["pages"], number=number)
    side.flush()


async def _all_own(
    rig: Rig, pairs: list[tuple[LinkSide, LinkSide]], count: int
) -> None:
    for i, (left, right) in enumerate(pairs):
        for owner, receiver in ((i, right), (i + 100, left)):
            await rig.arrives(receiver, count)
            expected = [owner * 1000 + n for n in range(count)]
            require(
                receiver.arrived == expected,
                f"link {i} got {receiver.arrived[:5]}, not {expected[:5]}",
            )


_HOOKS = {
    "header": "on_header",
    "body": "on_arrival",
    "sent": "on_sent",
    "writable": "on_writable",
}


@links.each(
    "raises",
    "A handler that raises in {} loses its link, with the error",
    _HOOKS,
)
async def _raises(rig: Rig, hook: str) -> None:
    victim, peer = await rig.pair()
    left, right = await rig.pair()
    setattr(victim, hook, raise_planted)
    with rig.expecting_errors():
        victim.queue_many(32, MIB)
        victim.flush()
        peer.send(1000)
        await rig.closes(victim, peer)
    error = victim.closed[0]
    require(isinstance(error, Planted), f"link_closed was told {error!r}")
    left.send(MIB)
    await rig.arrives(right, 1)


_MISFITS = {"shorter": -1, "longer": 1}


@links.each(
    "misfit", "A destination {} than its payload is not written beyond", _MISFITS
)
async def _misfit(rig: Rig, difference: int) -> None:
    left, right = await rig.pair()
    memory = Memory(100_000 + difference)
    right.land = lambda head: memory
    with rig.expecting_errors():
        left.send(100_000)
        await rig.closes(right, left)
    require(not right.arrived, "body_received came for it")
    require(right.closed[0] is not None, "the end was clean")
    require(memory.gaps_are_whole(), "memory beside the destination was written")


@links.pair("reversed", "Each backend can listen and connect at once")
async def _reversed(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    links: list[Link] = []
    listener = await rig.near.listen(rig.address, links.append)
    link = await rig.far.connect(listener.address)
    await rig.until(lambda: bool(links), "the near backend accepts a link")
    back, forth = rig.side("back", link), rig.side("forth", links[0])
    back.start()
    forth.start()
    back.land = lambda head: Memory(head.length, CUTS["uneven"])
    forth.send(200_000)
    left.send(100)
    await rig.arrives(back, 1)
    await rig.arrives(right, 1)
    await listener.close()
