"""Engines, a store server and an object server, each of which is killed at random.

What an engine was told is kept has to be found by it once all is well again, and what
it gets is never another's and never wrong, whatever happens meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import httpx
import msgspec
import pytest

from kvwire import BlockStore, Config, UsageError
from kvwire.security.keys import write_key_file
from kvwire.store.server.client import ask_report
from kvwire_certify.oracle import Wrong
from tests.programs.model.kinds import Block
from tests.programs.torture.engine import KINDS, NUMBERS, Answer, Order, any_order
from tests.store.server_child import ServerProcess, serving
from tests.support.servers import Server, s3_program, s3_server
from tests.support.tree import ROOT

CLIENTS = 50
TIMEOUT_S = 3
# For one order, and until all is found again: a few timeouts of a tier, and the longest
# pause before a server is dialled again, on a machine that does other things as well.
DELAY_S = 45.0
_SECRETS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "something"}
# Room for all blocks of all owners: what was acknowledged is never evicted.
_DISK = "size=64MiB&slab=256KiB"


class Engine:
    """The parent's side of an engine, and what that engine was told.

    Attributes:
        owner: Whose blocks it puts and gets.
        sure: What it has to find.
        tried: What its owner has put, or tried to, since it was deleted; shared by
            engines of one owner.
        alone: Whether nobody else has blocks of its owner, so that it may delete some.
    """

    def __init__(
        self, owner: int, tiers: list[str], tried: set[Block], *, alone: bool = False
    ) -> None:
        self.owner = owner
        self.alone = alone
        self.tried = tried
        self.sure: set[Block] = set()
        self._tiers = tiers
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *more: str) -> asyncio.subprocess.Process:
        """Start it, or a storm in its place."""
        command = ("-m", "tests.programs.torture.engine", str(self.owner))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, *more, *self._tiers),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | _SECRETS,
        )
        assert process.stdout is not None
        said = await asyncio.wait_for(process.stdout.readline(), 2 * DELAY_S)
        if said != b"open\n":
            await kill(process)
            raise Wrong("crash", f"an engine has not started: {said.decode()}")
        if not more:
            self.process = process
        return process

    async def ask(self, order: Order) -> Answer | None:
        """Have it do something."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if order.verb == "put":
            self.tried.update(order.blocks)
        if order.verb == "delete":
            self.sure.difference_update(order.blocks)
        try:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            await self.process.stdin.drain()
            async with asyncio.timeout(DELAY_S):
                line = await self.process.stdout.readline()
        except ConnectionError:
            return None
        except TimeoutError:
            raise Wrong("hang", f"{order} has taken more than {DELAY_S} s") from None
        if not line.endswith(b"\n"):
            return None
        answer = msgspec.json.decode(line, type=Answer)
        if answer.wrong:
            text = f"owner {self.owner}: {order}: wrong bytes: {answer.wrong}"
            raise Wrong("foreign", text)
        landed = {Block(order.kind, number) for number in answer.landed}
        if order.verb == "delete" and not answer.reasons:
            self.tried.difference_update(order.blocks)
        if order.verb == "put":
            self.sure |= landed
        elif strange := landed - self.tried:
            text = f"owner {self.owner} has not put, or deleted,"
            raise Wrong("stale", f"{text} {sorted(strange)[:5]}")
        return answer


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process of ours, and see it end."""
    if process.returncode is None:
        process.kill()
    await process.communicate()


class World:
    """All processes, and what happens to them.

    Args:
        seed: Of what is drawn. When a kill meets what a process does is not.
        base: An empty directory.
        bucket: A server of objects, if one is installed.
    """

    def __init__(self, seed: int, base: Path, bucket: Server | None) -> None:
        self.counts: Counter[str] = Counter()
        self._worst_s: dict[str, float] = {}
        self._draw = random.Random(seed)
        self._base = base
        self._bucket = bucket
        self._stack = AsyncExitStack()
        self._server: ServerProcess | None = None
        self._port = 0
        # Whether something may be missing until all was found again.
        self._engines: list[Engine] = []
        self._trouble = False
        # Whether the bucket has nothing any more, as soon as all orders are over.
        self._forgetting = False
        self._events: dict[Callable[[], Awaitable[None]], int] = {
            self._kill_engine: 5,
            self._kill_server: 5,
            self._stop_server: 1,
            self._fill_disk: 2,
            self._open_twice: 1,
            self._vanish: 1,
        }

    async def run(self, kills: int) -> None:
        """Go on until so many processes were killed."""
        try:
            await self._begin()
            events = list(self._events)
            weights = list(self._events.values())
            while self.counts["kills"] < kills:
                asked = [asyncio.create_task(self._step(one)) for one in self._engines]
                try:
                    await asyncio.sleep(self._draw.random() * 0.15)
                    await self._draw.choices(events, weights)[0]()
                finally:
                    done = await asyncio.gather(*asked, return_exceptions=True)
                for failed in filter(None, done):
                    raise failed
                if self._forgetting:
                    self._engines[-1].sure.clear()
                    self._forgetting = False
                await self._start_engines()
                if self._draw.random() < 0.4:
                    await self._audit()
                    print(self, flush=True)
            await self._audit()
        finally:
            for engine in self._engines:
                if engine.process is not None:
                    await kill(engine.process)
            await self._stack.aclose()

    def __str__(self) -> str:
        """What has happened so far."""
        what = ", ".join(f"{n} {name}" for name, n in sorted(self.counts.items()))
        worst = ", ".join(f"{name} {s:.1f} s" for name, s in self._worst_s.items())
        return f"{what}; at worst: {worst}"

    async def _begin(self) -> None:
        keys = {name: self._base / f"{name}.key" for name in ("all", "one", "two")}
        for path in keys.values():
            write_key_file(path)
        self._operator = Config(trust="psk", psk_file=str(keys["all"]))
        self._serve = (
            *("--psk-file", str(keys["all"])),
            *("--tenant", f"one?key={keys['one']}"),
            *("--tenant", f"two?key={keys['two']}"),
            *("--tier", "memory:1MiB?slab=64KiB"),
            *("--tier", f"disk:{self._base / 'server'}?{_DISK}"),
        )
        await self._start_server()
        where = f"kvwire://127.0.0.1:{self._port}?timeout={TIMEOUT_S}&psk_file="
        one, two = where + str(keys["one"]), where + str(keys["two"])
        shared: set[Block] = set()
        own = f"disk:{self._base / 'engine'}?{_DISK}"
        coded = f"disk:{self._base / 'coded'}?{_DISK}&codec=zstd-planes&evict=s3fifo"
        self._engines += [
            Engine(1, [one], shared),
            Engine(1, [own, one], shared),
            # The storms are of the same tenant, and put anything.
            Engine(2, [two], {Block(k, n) for k in KINDS for n in range(NUMBERS)}),
            Engine(4, [coded], set(), alone=True),
        ]
        if self._bucket is not None:
            await self._make_bucket()
            url = f"http://127.0.0.1:{self._bucket.port}&region=us-east-1"
            tier = f"object:s3://cache/p?timeout={TIMEOUT_S}&endpoint={url}"
            self._engines.append(Engine(3, [tier], set()))
            self._events[self._kill_bucket] = 2
        await self._start_engines()

    async def _start_engines(self) -> None:
        """Start those that do not run."""
        for engine in self._engines:
            if engine.process is not None and engine.process.returncode is not None:
                await kill(engine.process)
                engine.process = None
            if engine.process is None:
                await engine.start()

    async def _step(self, engine: Engine) -> None:
        """Have an engine do something; what it has to find is there if all is well."""
        order, sure = any_order(self._draw, alone=engine.alone), set(engine.sure)
        fine, began = not self._trouble, time.monotonic()
        answer = await engine.ask(order)
        if answer is None:
            return
        self.counts[order.verb] += 1
        self._took("order", began)
        landed = {Block(order.kind, number) for number in answer.landed}
        lost = sure & set(order.blocks) - landed
        if order.verb == "get" and lost and fine and not self._trouble:
            raise Wrong("lost", f"{sorted(lost)[:5]} are lost: {answer.reasons}")

    async def _audit(self) -> None:
        """End all trouble, and see that everything is found, before long."""
        assert self._server is not None
        self._limit(resource.RLIM_INFINITY)
        if self._server.running:
            self._server.signal(signal.SIGCONT)
        else:
            await self._start_server()
        began = time.monotonic()
        await asyncio.gather(*(self._find(engine) for engine in self._engines))
        self._took("recovery", began)
        self._trouble = False
        self.counts["audits"] += 1

    async def _find(self, engine: Engine) -> None:
        end = time.monotonic() + DELAY_S
        for kind in KINDS:
            for first in range(0, NUMBERS, 40):
                order = Order("get", kind, first, first + 40)
                while True:
                    answer = await engine.ask(order)
                    assert answer is not None, "an engine has ended by itself"
                    landed = {Block(kind, number) for number in answer.landed}
                    lost = engine.sure & set(order.blocks) - landed
                    if not lost:
                        break
                    if time.monotonic() > end:
                        raise Wrong(
                            "lost",
                            f"owner {engine.owner}: {len(lost)} acknowledged blocks "
                            f"were not found in {DELAY_S} s: {sorted(lost)[:5]}: "
                            f"{answer.reasons}",
                        )
                    await asyncio.sleep(0.1)

    # --- what happens -----------------------------------------------------------------

    async def _start_server(self) -> None:
        began = time.monotonic()
        await self._stack.aclose()
        server = serving(*self._serve, port=self._port)
        self._server = await self._stack.enter_async_context(server)
        self._port = self._server.port
        self._took("start of the server", began)

    async def _kill_engine(self, engine: Engine | None = None) -> None:
        victim = (engine or self._draw.choice(self._engines)).process
        assert victim is not None
        # Its step reads what it still says.
        victim.kill()
        await victim.wait()
        self._killed("engine")

    async def _kill_server(self) -> None:
        assert self._server is not None
        self._trouble = True
        if self._server.running:
            self._server.signal(signal.SIGKILL)
            await self._server.wait()
            self._killed("server")
        if self._draw.random() < 0.5:
            await self._start_server()

    async def _kill_bucket(self) -> None:
        """End the object server, which keeps nothing, and who knows its blocks."""
        assert self._bucket is not None
        await asyncio.to_thread(self._bucket.kill)
        self._killed("object server")
        await asyncio.sleep(self._draw.random())
        await self._kill_engine(self._engines[-1])
        self._forgetting = True
        await asyncio.to_thread(self._bucket.start)
        await self._make_bucket()

    async def _make_bucket(self) -> None:
        assert self._bucket is not None
        url = f"http://127.0.0.1:{self._bucket.port}/cache"
        async with httpx.AsyncClient() as client:
            assert (await client.put(url, content=b"")).status_code == 200

    async def _stop_server(self) -> None:
        """Let it stand still for longer than anybody waits for it."""
        assert self._server is not None
        self._trouble = True
        if self._server.running:
            self._server.signal(signal.SIGSTOP)
            self.counts["stops"] += 1

    async def _fill_disk(self) -> None:
        self._trouble = True
        self._limit(self._draw.choice((0, 1 << 16, 1 << 20, 1 << 22)))
        self.counts["full disks"] += 1

    def _limit(self, nbytes: int) -> None:
        """Let no file of the server, or of engines with a disk, grow beyond this."""
        limits = nbytes, resource.RLIM_INFINITY
        assert self._server is not None
        engines = (self._engines[1].process, self._engines[3].process)
        for process in (self._server, *engines):
            if process is not None:
                with suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)

    async def _open_twice(self) -> None:
        assert self._server is not None
        if not self._server.running:
            return
        tier = f"disk:{self._base / 'server'}?{_DISK}"
        with pytest.raises(UsageError, match="has this store open"):
            await BlockStore.open(["memory:64KiB", tier])
        self.counts["opened twice"] += 1

    async def _vanish(self) -> None:
        """Fifty clients are gone at once; the server lets go of all of them."""
        assert self._server is not None
        if self._trouble:
            return
        self._trouble = True
        storm = await self._engines[2].start("storm", str(CLIENTS))
        await asyncio.sleep(self._draw.random())
        storm.kill()
        said, _ = await storm.communicate()
        if said:
            raise Wrong("foreign", f"of {CLIENTS} clients: {said.decode()}")
        self._killed("storm")
        async with asyncio.timeout(DELAY_S):
            where = f"127.0.0.1:{self._port}"
            while True:
                report = await ask_report(where, self._operator)
                # This one asks as well.
                if len(report.clients) <= len(self._engines) + 1:
                    break
                await asyncio.sleep(0.1)

    def _killed(self, what: str) -> None:
        self.counts["kills"] += 1
        self.counts[f"kills of {what}"] += 1

    def _took(self, what: str, began: float) -> None:
        taken = time.monotonic() - began
        self._worst_s[what] = max(self._worst_s.get(what, 0.0), taken)


async def torture(seed: int, base: Path, kills: int) -> str:
    """Kill so many processes; what happened, in words."""
    with ExitStack() as stack:
        bucket = None
        if s3_program() is None:
            print("without an object server: `make test-s3` installs one")
        else:
            bucket = stack.enter_context(s3_server())
        world = World(seed, base, bucket)
        try:
            await world.run(kills)
        except Exception as exc:
            exc.add_note(f"seed {seed}; {world}")
            raise
    return str(world)
