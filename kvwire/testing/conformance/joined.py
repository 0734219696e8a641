"""What rigs of links and of lanes have alike: two backends, sides, and a clean end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from kvwire.backend import Backend
from kvwire.testing.conformance.bench import Bench
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.witness import Witness

S = TypeVar("S", bound=Witness)


class JoinedRig(Bench, Generic[S]):
    """Two backends and the sides of what joins them, for one check.

    When it ends it aborts every side and then looks for what is left.

    Args:
        make: Makes a backend.
        timeout_s: How long anything that a backend promises may take.
        alone: No other rig is at work, so that descriptors left are this one's.

    Attributes:
        near: The backend that connects, or has the clients.
        far: The backend that listens, or has the servers.
        sides: Those that have not been forgotten.
    """

    moves: ClassVar[str]
    """What is sent: "frame" or "payload"."""
    ends_both: ClassVar[bool]
    """Whether a side that closes ends the other one as well."""

    def __init__(
        self, make: Callable[[], Backend], timeout_s: float, *, alone: bool = True
    ) -> None:
        super().__init__(timeout_s, alone=alone)
        self.near: Backend = make()
        self.far: Backend = make()
        self.sides: list[S] = []

    @abstractmethod
    async def pair(self) -> tuple[S, S]:
        """Two sides that are joined."""

    @abstractmethod
    async def held_pair(self) -> tuple[S, S]:
        """Two sides of which the right one receives nothing before its ``release``."""

    @abstractmethod
    async def ends(self, side: S) -> None:
        """Wait until nothing of a side is left under way, or it has closed."""

    # --- waiting ----------------------------------------------------------------------

    async def arrives(self, side: S, count: int) -> None:
        """Wait until ``count`` frames or payloads have arrived whole, in all."""
        arrived = side.arrived
        await self.reaches(lambda: len(arrived), count, f"{self.moves}s at {side.name}")

    async def given_back(self, side: S) -> None:
        """Wait until every token has been given back."""
        sent = side.sent
        await self.reaches(
            lambda: len(sent),
            side.lent + len(sent),
            f"calls of {self.moves}_sent for {side.name}",
        )

    async def moved(self, sender: S, receiver: S, count: int) -> None:
        """Wait until ``count`` have arrived in all, and every token is given back."""
        await self.arrives(receiver, count)
        await self.given_back(sender)

    async def closes(self, *sides: S) -> None:
        """Wait until each side has been told that it has closed."""
        for side in sides:
            # Not the side itself, which an error that is kept would keep alive.
            closed, what = side.closed, f"{side.kind}_closed for {side.name}"
            await self.until(closed.__len__, what)

    async def end(self, *sides: S) -> None:
        """Wait until each side has been told of a clean end."""
        await self.closes(*sides)
        for side in sides:
            error = side.closed[0]
            require(error is None, f"{side.name} closed with {error!r} after close")

    async def ends_cleanly(self, closer: S, other: S) -> None:
        """Wait for the clean end of all that ends when one side has closed."""
        await self.end(*((closer, other) if self.ends_both else (closer,)))

    # --- the end ----------------------------------------------------------------------

    def forget(self, *sides: S) -> None:
        """Let go of sides that have ended, so that nothing here keeps them alive."""
        self.sides = [side for side in self.sides if side not in sides]

    @abstractmethod
    def abort_all(self) -> None:
        """Abort everything there is."""

    @abstractmethod
    async def stop_listening(self) -> None:
        """Close every listener."""

    async def aclose(self) -> None:
        """End everything, and look for what is left.

        Raises:
            CheckFailed: Something is, or a promise was broken on the way.

        Cancel safety: not cancel safe; links and lanes may stay open.
        """
        try:
            self.abort_all()
            await self.closes(*(side for side in self.sides if side.begun))
            await self.stop_listening()
            for backend in (self.near, self.far):
                await self.within(backend.aclose(), "aclose")
            await self.settle()
            for side in self.sides:
                times, expected = len(side.closed), int(side.begun)
                said = f"{side.name}: {side.kind}_closed was called {times} times"
                require(times == expected, f"{said}, not {expected}")
            self.forget(*self.sides)
            await self.nothing_left()
        finally:
            self.stop_watching()
