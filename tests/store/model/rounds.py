"""One round of the model: a store lives, fails, is killed, restarts; all from a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from kvwire.errors import UsageError
from tests.store.model.faults import ERRORS, POINTS, Plan, copied
from tests.store.model.kinds import Block
from tests.store.model.life import Life, Room, Shadow, Wrong

ROOMS = {
    # Slots are written over all the time, and slabs change their size.
    "tight": Room("128KiB", "size=512KiB&slab=64KiB", (0, 1, 2, 3), 120, 24, 12),
    # A kind that has no slab takes that of another one.
    "tiny": Room("64KiB", "size=136KiB&slab=64KiB", (0, 2), 40, 9, 8),
    # Nothing is ever evicted.
    "roomy": Room(
        "256KiB", "size=8MiB&slab=256KiB", (0, 1, 2, 3), 200, 60, 8, evicts=False
    ),
    # Slabs with as many slots as a slab can have.
    "wide": Room("4MiB", "size=14MiB&slab=4500KiB", (0,), 2600, 300, 16, evicts=False),
}
EVENTS = ("kill", "error", "damage")
# Calls that write, of a put and what goes with it.
_CALLS = 10

Work = Callable[[], Awaitable[object]]


class Round:
    """One round.

    Args:
        seed: Of everything that is drawn.
        directory: An empty one.
        events: What happens beside puts, gets and restarts; of :data:`EVENTS`.
        room: The name of the room; empty to draw one.
        kill: Ends this process, in place of going on with what it would leave.
    """

    def __init__(
        self,
        seed: int,
        directory: Path,
        *,
        events: tuple[str, ...] = EVENTS,
        room: str = "",
        kill: Callable[[Shadow], None] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._base = directory
        self._events = events
        self.room = room or self._draw.choice(sorted(ROOMS))
        self.life = Life(directory / "0", ROOMS[self.room], Shadow())
        self._kill = kill
        # What a killed process has left, and what has to be found in it.
        self._left: Life | None = None

    async def run(self) -> None:
        """Live several lives, and look at everything after each.

        Raises:
            Wrong: The store has broken a promise.
        """
        try:
            await self.life.open()
            for _ in range(self._draw.randint(1, 6)):
                for _ in range(self._draw.randint(1, self.life.room.puts)):
                    await self._step()
                await self._restart()
        finally:
            POINTS.disarm()
            await self.life.close()

    async def _step(self) -> None:
        draw = self._draw.random()
        if draw < 0.6:
            await self._with_event(self._put)
        elif draw < 0.9:
            await self.life.get(self._blocks())
        elif draw < 0.95 and "damage" in self._events:
            await self._damage()
        else:
            await self._with_event(self.life.flush)

    async def _put(self) -> None:
        blocks = self._blocks()
        lacking = await self.life.put(blocks)
        self.counts["puts"] += 1
        if lacking and not POINTS.disarm():
            raise Wrong(f"{len(lacking)} blocks were refused, and nothing has failed")
        if lacking and await self.life.put(blocks):
            raise Wrong("nothing fails any more, and blocks are still refused")

    async def _damage(self) -> None:
        if self.life.shadow.sure:
            block = self._draw.choice(sorted(self.life.shadow.sure))
            self.counts["damaged"] += 1
            self.life.damage(block)
            await self.life.get([block])

    async def _restart(self) -> None:
        self.counts["restarts"] += 1
        await self._with_event(self.life.close)
        await self._with_event(self._open)
        await self.life.get_all()

    async def _open(self) -> None:
        if self.life.is_open:
            return  # it was killed while it was closed
        try:
            await self.life.open()
        except UsageError:
            if not POINTS.disarm():
                raise
            await self.life.open()

    def _blocks(self) -> list[Block]:
        room = self.life.room
        kind = self._draw.choice(room.kinds)
        first = self._draw.randrange(room.numbers)
        last = min(first + self._draw.randint(1, room.batch), room.numbers)
        return [Block(kind, number) for number in range(first, last)]

    # --- events -----------------------------------------------------------------------

    async def _with_event(self, work: Work) -> None:
        """Do something, and let something happen meanwhile."""
        events = [event for event in self._events if event != "damage"]
        event = self._draw.choice(events) if events and self._draw.random() < 0.4 else ""
        plan = Plan(at=self._draw.randrange(_CALLS), torn=self._draw.random() < 0.5)
        if event == "kill":
            plan = replace(plan, end=self._ended)
        elif event == "error":
            code, calls = self._draw.choice(ERRORS), self._draw.choice((1, 3, 10**6))
            plan = replace(plan, code=code, calls=calls)
        elif event:
            plan = replace(plan, short=True, calls=10**6)
        if event:
            POINTS.arm(plan)
        await work()
        self.counts[event] += bool(POINTS.disarm())
        if self._left is not None:
            await self._go_on()

    def _ended(self) -> None:
        """This process ends here; another one goes on with what it leaves."""
        life = self.life
        shadow = Shadow(life.present(life.shadow.sure), set(life.shadow.tried))
        if self._kill is not None:
            self._kill(shadow)
        self._left = Life(self._base / str(self.counts["kill"] + 1), life.room, shadow)
        copied(life.directory, self._left.directory)

    async def _go_on(self) -> None:
        """Live on where another process was killed; look at everything, or put."""
        assert self._left is not None
        await self.life.close()
        self.life, self._left = self._left, None
        await self.life.open()
        if self._draw.random() < 0.5:
            await self.life.get_all()
