"""A fleet of a thousand machines in virtual time: who finds whom, and who does what.

``python -m tests.programs.sim.fleet`` takes minutes; ``--nodes 40 --rate 400`` seconds.
The code that decides is the real one: records and leases (``Directory``, ``Members``),
the proxies' tables and policies (``EngineFleet``), and where blocks lie (``placed``).
The directory lies in memory, and machines and the network are of this file: an engine
computes so many requests at once, each for an exponential time, and a straggler takes
four times as long. Half of the nodes prefill and half decode, and each of them keeps
blocks as well.

::

    start        all nodes announce themselves within 2 s
    rolling      a tenth of the nodes leaves, and others come
    killed       a tenth dies without a word
    away         the directory does not answer for 20 s, and nodes die meanwhile
    partition    half of the proxies do not reach the directory for 20 s
    stragglers   a twentieth becomes slow
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import logging
import random
import statistics
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvwire.aio import end_task
from kvwire.directory import Record
from kvwire_store.tiers.sharded import placed, seed_of
from kvwire_vllm import announce
from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.engines import VllmEngine
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.members import AllowedHosts
from tests.directory.memory import Hub, MemoryDirectory
from tests.support import virtual_time

SLOTS: Final = 64
SERVICE_S: Final = {announce.PREFILL: 0.4, announce.DECODE: 2.0}
PHASE_S: Final = 25.0
# Requests come in the first seconds of a phase; each of them costs a millisecond of
# real time with a thousand engines.
LOAD_S: Final = 0.2
AWAY_S: Final = 20.0
# A refused connection is noticed at once, and /health is asked twice a second.
NOTICED_S: Final = 0.5


@dataclass(eq=False)
class Node:
    """A machine: what it says of itself, and what it computes."""

    number: int
    role: str
    directory: MemoryDirectory
    slow: float = 1.0
    dead_since: float | None = None
    ends: list[float] = field(default_factory=list)
    record: Record = field(init=False)
    peers: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        host = f"10.{self.number >> 16}.{self.number >> 8 & 255}.{self.number & 255}"
        self.record = Record(
            name=f"n{self.number}",
            address=f"tcp://{host}:7400",
            incarnation=f"{self.number:032x}",
            role=self.role,
            labels={"http": f"http://{host}:8000", "slots": str(SLOTS)},
        )

    def begin(self, now: float, service_s: float) -> float:
        """Take a request; when it ends."""
        start = now
        if len(self.ends) >= SLOTS:
            start = max(now, heapq.heappop(self.ends))
        end = start + service_s * self.slow
        heapq.heappush(self.ends, end)
        return end


@dataclass
class Proxy:
    """One of several proxies, each with tables of its own."""

    directory: MemoryDirectory
    fleet: EngineFleet
    watching: asyncio.Task[None]


class World:
    """All of it."""

    def __init__(self, proxies: int, rate: int, load_s: float, seed: int) -> None:
        self.chance = random.Random(seed)
        self.hub, self.rate, self.load_s = Hub(), rate, load_s
        self.nodes: dict[str, Node] = {}
        self.numbers = itertools.count(1)
        self.loop = asyncio.get_running_loop()
        allowed = AllowedHosts(["10.0.0.0/8"])
        self.proxies: list[Proxy] = []
        for _ in range(proxies):
            directory = MemoryDirectory(self.hub)
            fleet = EngineFleet(clock=self.loop.time)
            found = Discovery(directory, fleet, allowed)
            found.wake = partial(self._probe, fleet)
            watching = asyncio.create_task(found.watch())
            self.proxies.append(Proxy(directory, fleet, watching))
        self.failed = self.asked = self.refused = 0
        self.samples: list[float] = []

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.dead_since is None]

    def join(self, count: int) -> list[asyncio.Task[None]]:
        tasks = []
        for _ in range(count):
            number = next(self.numbers)
            role = (announce.PREFILL, announce.DECODE)[number % 2]
            node = Node(number, role, MemoryDirectory(self.hub))
            self.nodes[node.record.labels["http"]] = node
            tasks.append(asyncio.create_task(self._announced(node)))
        return tasks

    async def _announced(self, node: Node) -> None:
        await virtual_time.pass_time(self.chance.random() * 2)
        await node.directory.announce(node.record)

    def _probe(self, fleet: EngineFleet) -> None:
        """Tell a proxy who answers, as a prober does."""
        for engine in fleet.engines:
            engine.healthy()
            if self.nodes[engine.url].dead_since is not None:
                engine.lost("nobody listens there")

    def die(self, count: int) -> None:
        """Let nodes die without a word."""
        for node in self.chance.sample(self.alive, count):
            node.dead_since = self.loop.time()
            for keeper in node.directory._announcements.values():
                keeper.cancel()
            node.directory._announcements.clear()
        for proxy in self.proxies:
            self.loop.call_later(NOTICED_S, self._probe, proxy.fleet)

    async def leave(self, nodes: list[Node]) -> None:
        """Let nodes go in order."""
        for node in nodes:
            await node.directory.close()
            node.dead_since = self.loop.time()

    def seen(self, proxy: Proxy) -> bool:
        """Whether a proxy takes exactly those that are alive."""
        takes = {e.url for e in proxy.fleet.engines if e.listed and e.is_up}
        return takes == {node.record.labels["http"] for node in self.alive}

    async def load(self, seconds: float) -> None:
        """Send requests to the proxies by chance, a hundredth of a second's at once."""
        until = self.loop.time() + seconds
        while self.loop.time() < until:
            await virtual_time.pass_time(0.01)
            for _ in range(max(1, self.rate // 100)):
                self.ask(self.chance.choice(self.proxies))
            self._sample()

    def ask(self, proxy: Proxy) -> None:
        """One request to a prefill and a decode engine, with other tries."""
        self.asked += 1
        body = {"prompt": [self.chance.randrange(500)] * 8}
        last: Node | None = None
        for role in (announce.PREFILL, announce.DECODE):
            tried: set[VllmEngine] = set()
            while engine := proxy.fleet.pick(role, body, tried):
                node = self.nodes[engine.url]
                if self.work(proxy, engine, node):
                    break
                tried.add(engine)
            if engine is None:
                self.failed += 1
                return
            if last is not None:
                last.peers.add(node.number)
                node.peers.add(last.number)
            last = node

    def work(self, proxy: Proxy, engine: VllmEngine, node: Node) -> bool:
        """Have an engine compute; False if nobody is there any more."""
        now = self.loop.time()
        if node.dead_since is not None:
            self.refused += 1
            engine.lost("nobody listens there")
            return False
        mean_s = SERVICE_S[node.role]
        end = node.begin(now, self.chance.expovariate(1 / mean_s))
        engine.running += 1

        def done() -> None:
            engine.running -= 1

        self.loop.call_at(end, done)
        return True

    def _sample(self) -> None:
        now = self.loop.time()
        for role in (announce.PREFILL, announce.DECODE):
            loads = []
            for node in self.alive:
                if node.role == role:
                    while node.ends and node.ends[0] <= now:
                        heapq.heappop(node.ends)
                    loads.append(len(node.ends))
            if role == announce.DECODE and loads and sum(loads):
                self.samples.append(max(loads) / statistics.fmean(loads))

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.directory.close()
        for proxy in self.proxies:
            await end_task(proxy.watching)


async def phase(
    world: World, name: str, begin: Callable[[], Coroutine[Any, Any, None]]
) -> dict[str, Any]:
    """Let something happen under load; what became of it."""
    began, asked, failed = world.loop.time(), world.asked, world.failed
    writes, refused = world.hub.writes, world.refused
    world.samples.clear()
    for node in world.nodes.values():
        node.peers.clear()
    load = asyncio.create_task(world.load(world.load_s))
    happening = asyncio.create_task(begin())
    steady: float | None = None
    while world.loop.time() < began + PHASE_S:
        await virtual_time.pass_time(0.25)
        if all(map(world.seen, world.proxies)):
            steady = steady or world.loop.time() - began
        else:
            steady = None
    await asyncio.gather(load, happening)
    return {
        "phase": name,
        "nodes": len(world.alive),
        "requests": world.asked - asked,
        "failed": world.failed - failed,
        "refused": world.refused - refused,
        "steady_s": None if steady is None else round(steady, 2),
        "imbalance": round(statistics.median(world.samples), 2),
        "peers": round(statistics.fmean(len(n.peers) for n in world.alive)),
        "writes_per_s": round((world.hub.writes - writes) / PHASE_S),
    }


def moved(world: World, before: list[Node]) -> dict[str, float]:
    """Which share of blocks has another node now, and how even their shares are."""
    keys = np.frombuffer(random.Random(1).randbytes(16 * 20_000), "S16")
    names = [[n.record.address for n in nodes] for nodes in (before, world.alive)]
    old, new = (
        np.array(them)[placed(keys, [seed_of(name) for name in them])] for them in names
    )
    shares = np.unique(new, return_counts=True)[1]
    gone = len(set(names[0]) - set(names[1])) / len(names[0])
    return {
        "moved": round(float(np.mean(old != new)), 3),
        "of_nodes_that_went": round(gone, 3),
        "fullest": round(float(shares.max() * len(names[1]) / keys.size), 2),
    }


async def simulate(
    nodes: int, proxies: int, rate: int, load_s: float = LOAD_S, seed: int = 19
) -> list[Any]:
    """Run all phases, and print a row of each."""
    world = World(proxies, rate, load_s, seed)
    tenth = max(1, nodes // 10)
    joining: list[asyncio.Task[None]] = []

    async def rolling() -> None:
        leaving = world.chance.sample(world.alive, tenth)
        joining.extend(world.join(tenth))
        await world.leave(leaving)

    async def away() -> None:
        world.hub.lose()
        world.die(max(1, tenth // 10))
        await virtual_time.pass_time(AWAY_S)
        world.hub.away = False

    async def partition() -> None:
        world.hub.lose(*(p.directory for p in world.proxies[: proxies // 2]))
        joining.extend(world.join(tenth))
        await virtual_time.pass_time(AWAY_S)
        world.hub.cut = set()

    async def nothing() -> None:
        pass

    async def killed() -> None:
        world.die(tenth)

    async def stragglers() -> None:
        for node in world.chance.sample(world.alive, max(1, nodes // 20)):
            node.slow = 4.0

    joining.extend(world.join(nodes))
    await virtual_time.pass_time(3)
    rows = []
    for name, begin in (
        ("steady", nothing),
        ("rolling", rolling),
        ("killed", killed),
        ("away", away),
        ("partition", partition),
        ("stragglers", stragglers),
    ):
        before = world.alive
        rows.append(await phase(world, name, begin) | moved(world, before))
        print(
            "  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True
        )
    await asyncio.gather(*joining)
    await world.close()
    return rows


_DRAWN: Final = (
    ("steady_s", "until all proxies know who is there", "seconds", 1),
    ("imbalance", "load of the fullest decode engine", "times the mean", 1),
    ("moved", "blocks that another engine has now", "% of all blocks", 100),
)


def main() -> int:
    """Run it, and keep the rows if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--proxies", type=int, default=10)
    parser.add_argument("--rate", type=int, default=10_000)
    parser.add_argument("--load-s", type=float, default=LOAD_S)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    # A thousand nodes that cannot announce themselves say so.
    logging.disable(logging.WARNING)
    rows = virtual_time.run(
        simulate(
            options.nodes, options.proxies, options.rate, options.load_s, options.seed
        )
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.plot:
        plot(rows, options.plot)
    return 0


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw how long it takes, how uneven it is, and what moves, phase by phase."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axes, (name, title, unit, scale) in zip(
        figure.subplots(1, 3, sharey=True), _DRAWN, strict=True
    ):
        values = [scale * (row[name] or 0) for row in reversed(rows)]
        bars = axes.barh(
            [row["phase"] for row in reversed(rows)], values, color="#3b6ea5"
        )
        axes.bar_label(bars, [f"{value:.4g}" for value in values], padding=3)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(unit)
        axes.set_xlim(0, max(values) * 1.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
