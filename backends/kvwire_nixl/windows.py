"""Windows over NIXL: the owner registers its memory once, and the reader reads blocks.

The description has the form of a payload's descriptor: the window's ranges, NIXL's
descriptions of them, and a proof of the lane's secret. The driver's thread gets a batch
as reads of its bytes, followed by one read of its generations, which is started after
all others have ended.

**Order.** The owner stores a new generation, passes a full fence, and only then writes
to the block. The generations are requested only after NIXL has reported the bytes,
whatever transport moves them: so if one byte was written later, the new generation was
visible before that. Over TCP one thread of the owner reads both, one after the other;
within a host the kernel reads them, for threads that NIXL's locks order.

A read that fails ends the lane, and its future fails once the lane touches no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, final

import numpy as np

from kvwire.backend import Landing
from kvwire.backend.gets import Gets, Looks, WindowRanges
from kvwire.backend.window import BlockRead, WindowMemory, WindowReader
from kvwire.errors import BackendUnavailable, ConnectionLost, MalformedFrame
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire_nixl.driver import NixlDriver, NixlRead
from kvwire_nixl.library import NixlAgent
from kvwire_nixl.ranges import Ranges
from kvwire_nixl.wire import RULE, LaneProofs, NixlPlace

# A batch's bytes are read in parts of this size, several at a time.
PART_BYTES: Final = 4 * MIB


@final
class WindowLanding(Landing):
    """The arrival of a batch's generations, which are read after its blocks."""

    __slots__ = ("batch", "future", "good", "looks", "window")

    def __init__(
        self, window: NixlWindow, batch: BlockRead, good: Bits, looks: Looks
    ) -> None:
        super().__init__(looks.memory.nbytes, looks.memory.data.cast("B"))
        self.window = window
        self.batch = batch
        self.good = good
        self.looks = looks
        self.future: asyncio.Future[Bits] = asyncio.get_running_loop().create_future()

    def arrived(self) -> None:
        """Compare the generations."""
        landed = np.zeros(self.good.size, np.bool_)
        seen = self.looks.memory[self.looks.places]
        landed[self.good] = seen == self.batch.generations[self.good]
        if not self.future.done():
            self.future.set_result(landed)
        self.window.landings.discard(self)

    def fail(self, reason: str) -> None:
        """Fail the read; nothing touches its memory any more."""
        if not self.future.done():
            self.future.set_exception(ConnectionLost(reason))
        self.window.landings.discard(self)


@final
class NixlWindow(WindowReader):
    """Reads one window of the peer."""

    way = "nixl"
    immediate = False

    def __init__(
        self, driver: NixlDriver, ranges: Ranges, memory: WindowRanges
    ) -> None:
        self._driver = driver
        self._ranges = ranges
        self._memory = memory
        self._closed = False
        self.landings: set[WindowLanding] = set()

    def read(self, batch: BlockRead) -> asyncio.Future[Bits]:
        if self._closed:
            raise ConnectionLost("nixl: the lane of this window has ended")
        gets, good = self._memory.gets(batch)
        looks = self._memory.looks(batch.entries[good])
        landing = WindowLanding(self, batch, good, looks)
        self.landings.add(landing)  # bounded: the caller's batches
        look = NixlRead(
            landing, _place(looks.gets), is_direct=False, stage="generations"
        )
        self._driver.read([*self._parts(gets, batch.owner), look])
        return landing.future

    def _parts(self, gets: Gets, owner: object) -> Iterator[NixlRead]:
        """Yield the reads of a batch's bytes."""
        if not len(gets):
            return
        there = Fragments(gets.there, gets.lengths, owner=None, writable=False)
        here = Fragments(gets.here, gets.lengths, owner=owner, writable=True)
        for at in range(0, here.nbytes, PART_BYTES):
            nbytes = min(PART_BYTES, here.nbytes - at)
            source = there.slice(at, nbytes)
            target = here.slice(at, nbytes)
            yield NixlRead(
                Landing(nbytes, target),
                NixlPlace(source.addresses, source.lengths),
                is_direct=bool(self._ranges.covering(target)),
                stage="bytes",
            )

    @property
    def busy(self) -> bool:
        return len(self.landings) > 0

    def close(self) -> None:
        self._closed = True

    def fail(self, error: Exception | None) -> None:
        """End the reader, because its lane has ended and touches no memory."""
        self.close()
        for landing in list(self.landings):
            landing.fail(str(error or "nixl: the lane of this window has ended"))


@final
class Exposed:
    """The windows that a lane exposes to its peer."""

    def __init__(self, agent: NixlAgent, proofs: LaneProofs) -> None:
        self._agent = agent
        self._proofs = proofs
        self._windows: dict[WindowMemory, tuple[bytes, WindowRanges]] = {}

    def expose(self, memory: WindowMemory, word: int, connection: bytes) -> bytes:
        """Register a window's memory; return its description.

        Args:
            memory: The window's memory.
            word: The address of the word that marks this half as alive.
            connection: The data with which the peer's agent reaches this one.

        Raises:
            BackendUnavailable: NIXL refuses the memory, or it consists of too many
                pieces.
        """
        if memory not in self._windows:
            ranges = WindowRanges(memory)
            registered: list[tuple[int, int]] = []
            try:
                for place in ranges.places:
                    self._agent.register(*place)
                    registered.append(place)  # bounded: the window's tensors
                news = tuple(self._agent.describe(*place) for place in registered)
                description = self._proofs.place(
                    _whole(ranges, word, (connection, *news))
                )
            except ConnectionLost as exc:
                self._deregister(registered)
                raise BackendUnavailable(str(exc)) from exc
            if not description:
                self._deregister(registered)
                raise BackendUnavailable(
                    f"nixl: a window in {len(registered)} pieces of memory does not "
                    "fit into a description; allocate its tensors in one piece"
                )
            self._windows[memory] = (description, ranges)
        return self._windows[memory][0]

    def conceal(self, memory: WindowMemory) -> None:
        """Deregister a window's memory."""
        if memory in self._windows:
            _, ranges = self._windows.pop(memory)
            self._deregister(ranges.places)

    def _deregister(self, places: list[tuple[int, int]]) -> None:
        for place in places:
            self._agent.deregister(*place)


def read_description(
    proofs: LaneProofs, description: bytes, memory: WindowMemory
) -> tuple[WindowRanges, NixlPlace]:
    """Read the peer's description of a window.

    Raises:
        MalformedFrame: A correct lane would not make it, or it describes another
            window.
    """
    try:
        ranges = WindowRanges(memory)
    except ValueError as exc:
        raise MalformedFrame(RULE, f"nixl: a window with {exc}") from None
    whole = _whole(ranges, 0, ())
    place = proofs.read_place(description, int(whole.lengths.sum()))
    same = np.array_equal(place.addresses, whole.addresses)
    if not (same and np.array_equal(place.lengths, whole.lengths)):
        raise MalformedFrame(RULE, "nixl: the description belongs to another window")
    return ranges, place


def _whole(ranges: WindowRanges, word: int, news: tuple[bytes, ...]) -> NixlPlace:
    addresses, lengths = np.array(ranges.places, np.uint64).reshape(-1, 2).T
    return NixlPlace(addresses.copy(), lengths.copy(), word, news)


def _place(gets: Gets) -> NixlPlace:
    return NixlPlace(gets.there, gets.lengths)
