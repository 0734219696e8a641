"""Random acts on the stores of a place, and a comparison of each report with the truth.

An act alone is checked completely: nothing else runs, so what its placement says of
each block is compared with the indexes of all tiers. Of acts at the same time, and of
those that are cancelled, only what holds at any time is checked: no wrong byte, and no
acknowledged block that is missing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvwire import BlockState, BlockStore, Placement, UsageError
from kvwire.aio import gather_all
from kvwire.kv.blocks import Bits
from kvwire.store.keys import Keys, as_keys
from kvwire.store.namespace import Namespace
from kvwire.store.placement import all_placed
from kvwire.store.tiers.sharded import placed, seed_of
from kvwire.testing.faults import injected
from tests.programs.model.faults import ERRORS, POINTS, Plan
from tests.programs.verbs.place import NODES, Place, bad_network, late_threads
from tests.support import inside, virtual_time
from tests.support.caches import STORED, Filled, chain
from tests.support.virtual_time import pass_time

_CHAINS: Final = [chain(12, f"{number}") for number in range(8)]
_SOURCES: Final = [Filled(seed=number) for number in range(8)]
_DIGEST: Final = Namespace("kv", STORED).digest

ACTS: Final = 50
"""Acts alone of one seed."""
VERBS: Final = ("locate", "prefetch", "demote", "pin", "unpin", "retain", "move")
# What a pin without an end is compared with, which is never.
_LONG_S: Final = 3600.0 * 24
# Of gets over a bad network, and how long to wait until a link is dialled again.
_TRIES: Final = 20
_AGAIN_S: Final = 5.0


class Wrong(AssertionError):
    """What was reported is not what is there."""


@dataclass(frozen=True, slots=True)
class Act:
    """One verb on one store.

    Attributes:
        verb: Its name.
        store: The store.
        number: Of the chain.
        count: Of the chain's first blocks.
        options: Of the call.
    """

    verb: str
    store: BlockStore
    number: int
    count: int
    options: dict[str, Any]

    @property
    def hashes(self) -> Sequence[bytes]:
        return _CHAINS[self.number][: self.count]

    @property
    def keys(self) -> Keys:
        return as_keys(map(_DIGEST.__add__, self.hashes))

    def __str__(self) -> str:
        return f"{self.verb} of {self.count} blocks of {self.number}, {self.options}"

    async def carry_out(self) -> Placement:
        """Call the store; a move to a node that is away is refused as a whole."""
        cache = _SOURCES[self.number].cache
        call = getattr(self.store, self.verb)
        try:
            told: Placement = await call(self.hashes, cache, **self.options)
        except UsageError as exc:
            if self.verb != "move" or self.options["to"] not in NODES:
                raise
            return all_placed(self.count, BlockState.REFUSED, str(exc))
        return told


class Acts:
    """The acts of one seed.

    Attributes:
        counts: How many acts of each kind there were, and what became of their blocks.
    """

    def __init__(self, seed: int, place: Place) -> None:
        self.counts: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._place = place
        # Blocks that the first store acknowledged, so that it has them from now on.
        self._known: set[bytes] = set()

    async def begin(self) -> None:
        """Put most blocks, once all stores are open."""
        for number in range(len(_CHAINS) - 2):
            await self._put(self._place.clients[number % 3], number, _CHAINS[number])

    # --- acts -------------------------------------------------------------------------

    async def several(self) -> None:
        """Put, get and carry out verbs at once; cancel some; let things fail."""
        acts = [self._any() for _ in range(self._draw.randint(2, 8))]
        given_up = [self._give_up() for _ in range(self._draw.randrange(3))]
        await gather_all(*acts, *given_up, self._fail(restarts=True))
        POINTS.disarm()

    async def alone(self) -> None:
        """Carry out a verb, and compare what it reports with what is there."""
        await self._place.quiet()
        act = self._act()
        before = Truth.of(self._place, act)
        down = self._draw.choice([*NODES, *[""] * 6])
        if down and self._place.nodes[down].store is not act.store:
            self.counts["failures: down"] += 1
            await self._place.nodes[down].close()
        failing = asyncio.ensure_future(self._fail())
        links = self._place.links(act.store)
        told = await act.carry_out()
        exact = None not in links and links == self._place.links(act.store)
        linked = self._place.linked(act.store)
        POINTS.disarm()
        await asyncio.wait((failing,))
        failing.result()
        if down and not self._place.nodes[down].is_open:
            await self._place.nodes[down].open()
        await self._place.quiet()
        self.counts[act.verb] += 1
        self.counts.update({f"{act.verb} {k}": v for k, v in told.counts.items()})
        self._check(act, told, before, linked, exact=exact)

    async def end(self) -> None:
        """Get all blocks that must be on a disk; a bad network may need some tries."""
        POINTS.disarm()
        await self._place.quiet()
        for name in NODES:
            await self._place.restart(name)
        store = self._place.one
        await inside.tiers(store).memory.empty()
        for number, hashes in enumerate(_CHAINS):
            asked = [one for one in hashes if one in self._known]
            for _ in range(_TRIES):
                if not asked:
                    break
                asked = await self._get(store, number, asked)
                await pass_time(bool(asked) * _AGAIN_S)
            if asked:
                raise Wrong(f"{len(asked)} acknowledged blocks are lost")

    async def _any(self) -> None:
        """Put, get or carry out a verb, beside others."""
        if self._draw.random() < 0.5:
            await self._act().carry_out()
            return
        number = self._draw.randrange(len(_CHAINS))
        hashes = _CHAINS[number][: self._draw.randint(1, 12)]
        if self._draw.random() < 0.5:
            await self._get(self._draw.choice(self._place.stores), number, hashes)
            return
        await self._put(self._draw.choice(self._place.clients), number, hashes)

    async def _put(
        self, store: BlockStore, number: int, hashes: Sequence[bytes]
    ) -> None:
        cache = _SOURCES[number].cache
        outcome = await store.put(hashes, cache, range(len(hashes)))
        landed = {hashes[at] for at in outcome.landed.ids().tolist()}
        # The second one may lose blocks that no server takes, and those of the third
        # one are looked for elsewhere while a server is away.
        if store is self._place.one:
            self._known |= landed

    async def _give_up(self) -> None:
        """Cancel a verb after some time; no block may be lost by it."""
        doing = asyncio.ensure_future(self._act().carry_out())
        await pass_time(self._draw.random() * 0.02)
        doing.cancel()
        await asyncio.wait((doing,))

    async def _get(
        self, store: BlockStore, number: int, hashes: Sequence[bytes]
    ) -> list[bytes]:
        """Get blocks, and compare their bytes; return those that are missing."""
        target = Filled()
        outcome = await store.get(hashes, target.cache, range(len(hashes)))
        landed = outcome.landed.ids().tolist()
        source = [_CHAINS[number].index(hashes[at]) for at in landed]
        if not np.array_equal(target.tokens(landed), _SOURCES[number].tokens(source)):
            raise Wrong("wrong bytes")
        return [one for at, one in enumerate(hashes) if at not in landed]

    async def _fail(self, *, restarts: bool = False) -> None:
        """Let something fail, or nothing."""
        what = self._draw.choice(("", "", "cut", "disk", "restart"))
        await pass_time(self._draw.random() * 0.01)
        if what == "cut":
            self._place.cut(self._draw)
        elif what == "disk":
            calls = self._draw.choice((1, 3, 10**6))
            code = self._draw.choice(ERRORS)
            reads = self._draw.random() < 0.3
            POINTS.arm(
                Plan(at=self._draw.randrange(4), calls=calls, code=code, reads=reads)
            )
        elif what == "restart" and restarts:
            await self._place.restart(self._draw.choice(NODES))
        else:
            return
        self.counts[f"failures: {what}"] += 1

    def _act(self) -> Act:
        """Draw a verb, a store and some blocks."""
        draw = self._draw
        place = self._place
        verb = draw.choice(VERBS)
        store = place.many if verb == "move" else draw.choice(place.stores)
        options: dict[str, Any] = {}
        match verb:
            case "pin":
                options["ttl_s"] = draw.choice((None, 0.5, _LONG_S))
            case "retain":
                options["ttl_s"] = draw.choice((None, 0.5, _LONG_S))
                options["priority"] = draw.choice((0, 50, 80))
            case "prefetch":
                below = store in place.clients and draw.random() < 0.5
                tier = inside.tiers(store).below[0].name if below else "memory"
                options["tier"] = tier
            case "move":
                options["to"] = draw.choice((*NODES, "many"))
                options["keep"] = draw.random() < 0.5
        number = draw.randrange(len(_CHAINS))
        return Act(verb, store, number, draw.randint(1, 12), options)

    # --- the truth --------------------------------------------------------------------

    def _check(
        self,
        act: Act,
        told: Placement,
        before: Truth,
        linked: Sequence[str],
        *,
        exact: bool,
    ) -> None:
        """Compare a placement with what is there, now that nothing else happens."""
        after = Truth.of(self._place, act, linked)
        claims = self._claims(act, after)
        if (wrong := told.done & ~claims).any():
            raise Wrong(f"{act}: done, and not so: {np.flatnonzero(wrong)}; {told}")
        for at in np.flatnonzero(~told.done).tolist():
            if not told.reason(at):
                raise Wrong(f"{act}: block {at} is not done, and there is no reason")
        there = before.found & after.found
        if (lost := told.missing & there).any():
            raise Wrong(f"{act}: missing, and there: {np.flatnonzero(lost)}; {told}")
        if act.verb == "locate":
            mine, *others = told.held.values()
            below = np.logical_or.reduce([np.zeros(act.count, np.bool_), *others])
            if (mine != after.memory).any() or (below & ~after.below).any():
                raise Wrong(f"{act}: located elsewhere than it is; {told}")
            if exact and (below != after.below).any():
                raise Wrong(f"{act}: not located where it is; {told}")

    def _claims(self, act: Act, truth: Truth) -> Bits:
        """Return of which blocks a verb may report that they are done."""
        match act.verb:
            case "locate":
                return truth.memory | truth.below
            case "prefetch":
                own = act.options["tier"] == "memory"
                return truth.memory if own else truth.served
            case "demote":
                return truth.durable & ~truth.memory
            case "pin":
                if act.options["ttl_s"] == 0.5:
                    return truth.memory | truth.below
                return truth.kept
            case "unpin":
                return ~truth.kept
            case "retain":
                return truth.memory | truth.below
        to = act.options["to"]
        return self._place.nodes[to].has(act.keys) if to in NODES else truth.sought


@dataclass(frozen=True, slots=True)
class Truth:
    """Where the blocks of an act are, for the store that it is for.

    Attributes:
        memory: Which are in its own memory.
        below: Which are below it.
        sought: Which of them are where a get looks.
        served: Which are in the memory of a server below it.
        durable: Which are on a disk below it.
        kept: Which are pinned anywhere.
    """

    memory: Bits
    below: Bits
    sought: Bits
    served: Bits
    durable: Bits
    kept: Bits

    @property
    def found(self) -> Bits:
        """Which a get finds."""
        return self.memory | self.sought

    @classmethod
    def of(cls, place: Place, act: Act, linked: Sequence[str] = NODES) -> Truth:
        """Look at all indexes; a get looks at servers that are linked."""
        keys = act.keys
        own = inside.tiers(act.store).memory.index
        nodes = [node for node in place.nodes.values() if node.store is act.store]
        servers = place.below(act.store)
        indexes = [own, *(one for node in servers for one in node.indexes())]
        indexes += [node.indexes()[1] for node in nodes]
        here = [index.find(keys) >= 0 for index in indexes]
        below = _union(keys, here[1:])
        sought = below
        if act.store is place.many and linked:
            has = np.stack([place.nodes[name].has(keys) for name in linked])
            where = placed(keys, [seed_of(name) for name in linked])
            sought = has[where, np.arange(keys.size)]
        return cls(
            memory=here[0],
            below=below,
            sought=sought,
            served=_union(keys, [one.indexes()[0].find(keys) >= 0 for one in servers]),
            durable=_union(
                keys, [one.indexes()[1].find(keys) >= 0 for one in (*servers, *nodes)]
            ),
            kept=_union(keys, [index.kept(keys) for index in indexes]),
        )


def _union(keys: Keys, rows: Sequence[Bits]) -> Bits:
    union = np.zeros(keys.size, np.bool_)
    for row in rows:
        union |= row
    return union


async def play(seed: int, folder: Path, acts: int) -> Counter[str]:
    """Let things happen, with some acts alone; return what was counted."""
    draw = random.Random(seed)
    with injected(bad_network(draw)), late_threads(draw):
        place = Place(folder)
        these = Acts(seed, place)
        try:
            await place.open()
            await these.begin()
            for _ in range(acts):
                if draw.random() < 0.3:
                    await these.several()
                await these.alone()
            await these.end()
        finally:
            await place.close()
            POINTS.forget()
        return these.counts


def run(seed: int, folder: Path, acts: int) -> Counter[str]:
    """Play one seed in virtual time."""
    return virtual_time.run(play(seed, folder, acts))
