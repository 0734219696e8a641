"""One round of the model: a store lives, fails, ends and begins again, by a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from errno import EIO
from functools import partial
from pathlib import Path

from kvwire.errors import UsageError
from kvwire_certify.oracle import Wrong
from kvwire_store.placement import VerbKind
from packages.store.tests.model.faults import ERRORS, POINTS, Plan, copied
from packages.store.tests.model.kinds import Block
from packages.store.tests.model.life import TTL_S, Life, Room, Shadow

ROOMS = {
    # Slots are written over all the time, and slabs change their size.
    "tight": Room("128KiB", "size=512KiB&slab=64KiB", (0, 1, 2, 3), 120, 24, 12),
    # A kind that has no slab takes that of another one.
    "tiny": Room("64KiB", "size=136KiB&slab=64KiB", (0, 2), 40, 9, 8),
    # Nothing is ever evicted.
    "roomy": Room(
        "256KiB", "size=8MiB&slab=256KiB", (0, 1, 2, 3), 200, 60, 8, evicts=False
    ),
    # Of one size and three tenants, one with a quota and one whose blocks grow too old.
    "shared": Room(
        "128KiB",
        "size=512KiB&slab=64KiB",
        (0, 4, 8),
        80,
        12,
        16,
        tenants=("a?disk=128KiB", f"b?ttl={TTL_S}"),
    ),
    # Slabs with as many slots as a slab can have.
    "wide": Room("4MiB", "size=14MiB&slab=4500KiB", (0,), 2600, 300, 16, evicts=False),
}
EVENTS = ("kill", "power", "error", "short", "unreadable", "damage")
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
    """

    def __init__(
        self,
        seed: int,
        directory: Path,
        *,
        events: tuple[str, ...] = EVENTS,
        room: str = "",
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._base = directory
        self._events = events
        self.room = room or self._draw.choice(sorted(ROOMS))
        room_of = ROOMS[self.room]
        if self._draw.random() < 0.5:
            room_of = replace(room_of, disk=f"{room_of.disk}&sync=put")
        self.life = Life(directory / "0", room_of, Shadow())
        # A disk that has failed to sync once is not believed any more.
        self._flushes = True
        self._ends = 0
        # What a killed process has left, and what has to be found in it.
        self._left: Life | None = None

    def use(self, disk: str) -> None:
        """Have another disk, as in its address; it is not open yet."""
        self.life.room = replace(self.life.room, disk=disk)

    async def run(self) -> None:
        try:
            await self.life.open()
            await self.life.get_all()
            for _ in range(self._draw.randint(1, 6)):
                for _ in range(self._draw.randint(1, self.life.room.puts)):
                    await self._step()
                await self._restart()
            await self.life.close()
            await self.life.open()
            await self.life.get_all()
        finally:
            POINTS.disarm()
            await self.life.close()
            POINTS.forget()

    async def _step(self) -> None:
        draw = self._draw.random()
        if self.life.room.tenants and self._draw.random() < 0.3:
            await self._with_event(self._manage)
        elif draw < 0.5:
            await self._with_event(self._put)
        elif draw < 0.65:
            await self._with_event(self._verb)
        elif draw < 0.9:
            await self._get()
        elif draw < 0.95 and "damage" in self._events:
            await self._damage()
        else:
            await self._with_event(self._flush)

    async def _look_around(self) -> None:
        """Get everything, or put again what may be there and may be whole, or neither.

        Whoever gets a block that is damaged makes that known; a put must notice itself.
        """
        draw, shadow = self._draw.random(), self.life.shadow
        if draw < 0.4:
            await self.life.get_all()
        elif draw < 0.8:
            doubtful = self.life.present(shadow.tried - shadow.sure - shadow.rotten)
            for kind in self.life.room.kinds:
                blocks = sorted(one for one in doubtful if one.kind == kind)
                if blocks:
                    await self._put(blocks[: self.life.room.batch])

    async def _put(self, some: list[Block] | None = None) -> None:
        blocks = some or self._blocks()
        lacking = await self.life.put(blocks)
        self.counts["puts"] += 1
        if lacking and not POINTS.disarm():
            raise Wrong("failed", f"{len(lacking)} blocks refused, and nothing failed")
        if lacking and await self.life.put(blocks):
            raise Wrong("failed", "nothing fails any more, and blocks are refused")

    async def _get(self) -> None:
        if "unreadable" in self._events and self._draw.random() < 0.2:
            POINTS.arm(Plan(reads=True, code=EIO, calls=self._draw.choice((1, 10**6))))
            await self.life.get(blocks := self._blocks(), failing=True)
            self.counts["unreadable"] += bool(POINTS.disarm())
            await self.life.get(blocks)
        else:
            await self.life.get(self._blocks())

    async def _flush(self) -> None:
        try:
            await self.life.flush()
        except OSError:
            if not POINTS.disarm() and self._flushes:
                raise
            self._flushes = False

    async def _manage(self) -> None:
        """Delete, pin or unpin some blocks, or let them grow too old."""
        what = self._draw.choice(("deleted", "verbs", "verbs", "verbs", "aged"))
        self.counts[what] += 1
        if what == "aged":
            self.life.age()
        elif what == "deleted":
            with suppress(OSError):
                await self.life.delete(self._blocks())
        else:
            await self._verb()

    async def _verb(self) -> None:
        """Prefetch, pin or unpin some blocks."""
        verb = self._draw.choice(list(VerbKind))
        self.counts[verb.name.lower()] += 1
        await self.life.apply(verb, self._blocks(), self._draw.choice((0, TTL_S // 2)))

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
        await self._look_around()

    async def _open(self) -> None:
        self._flushes = True
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
        events = [one for one in self._events if one not in ("damage", "unreadable")]
        happens = bool(events) and self._draw.random() < 0.4
        event = self._draw.choice(events) if happens else ""
        plan = Plan(at=self._draw.randrange(_CALLS), torn=self._draw.random() < 0.5)
        if event in ("kill", "power"):
            plan = replace(plan, end=partial(self.ended, power=event == "power"))
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
            await self.go_on()

    def ended(self, *, power: bool) -> None:
        """This process ends here; another one goes on with what it leaves."""
        life, then = self.life, self.life.shadow
        flushed = life.present(then.flushed)
        sure = flushed if power else life.present(then.sure)
        # What is not synced may be as it was before.
        lasts = not power or "sync=put" in life.room.disk
        shadow = Shadow(
            *(set(sure), flushed, set(then.tried), set(then.rotten)),
            *(set(some) if lasts else set() for some in (then.deleted, then.pinned)),
        )
        self._ends += 1
        self._left = Life(self._base / str(self._ends), life.room, shadow)
        self._left.inherited = life.present(then.tried)
        if power:
            POINTS.cut(life.directory, self._left.directory, self._draw)
        else:
            copied(life.directory, self._left.directory)

    async def go_on(self) -> None:
        """Live on where another process was killed; look at everything, or put."""
        assert self._left is not None
        await self.life.close()
        self.life, self._left = self._left, None
        self._flushes = True
        await self.life.open()
        await self._look_around()
