"""The soak of a fleet: prefill and decode processes that find each other by directory.

``python -m tests.programs.soak.fleet --directory redis`` starts four of each. Every
decode process asks a process of the role "prefill" for the KV of its requests and
checks every byte by the stamps of :mod:`tests.programs.soak.stamps`; an attempt that
fails is made again, as a proxy would, at most ``ATTEMPTS_MAX`` times. Meanwhile a
process is killed now and then, another one is asked to end and replaced, and a
directory's server is killed and comes back with nothing in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import kvwire
from tests.programs.soak.stamps import NUM_BLOCKS, SPEC
from tests.support.caches import StampedCache
from tests.support.servers import Server, nats_server, redis_server
from tests.support.tree import ROOT

ASK_TAG: Final = 1
MEMBER_LEASE_S: Final = 1.0
# A killed process costs an attempt, and one more for each that had its connection.
ATTEMPTS_MAX: Final = 20
DEADLINE_S: Final = 3.0
STUCK_S: Final = 60.0
_SERVERS: Final[dict[str, Callable[[], Any]]] = {
    "redis": redis_server,
    "nats": nats_server,
}


# --- members --------------------------------------------------------------------------


async def prefill(url: str) -> None:
    """Announce this process, and publish whatever is asked for, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    stamped, blocks = StampedCache(SPEC, NUM_BLOCKS), iter(range(10**9))
    async with kvwire.open(directory=url, name="prefill") as comm:
        await comm.listen("127.0.0.1:0")
        comm.announce(role="prefill", lease_s=MEMBER_LEASE_S)

        async def serve(connection: kvwire.Connection) -> None:
            with contextlib.suppress(kvwire.ConnectionClosed):
                while True:
                    number, id = json.loads(await connection.recv(ASK_TAG))
                    block = next(blocks) % NUM_BLOCKS
                    out = comm.publish(id, stamped.cache, [block], deadline=DEADLINE_S)
                    for layer in range(stamped.cache.groups["kv"].spec.layers):
                        stamped.write(block, number, layers=layer)
                        out.ready(layers=layer)
                    out.finish()

        async def accept() -> None:
            async with asyncio.TaskGroup() as group:
                async for connection in comm.connections():
                    group.create_task(serve(connection))

        accepting = asyncio.create_task(accept())
        await stop.wait()
        await comm.withdraw()
    await accepting


async def decode(url: str) -> None:
    """Get what each line of the input asks for, and say what became of it."""
    stamped = StampedCache(SPEC, NUM_BLOCKS)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with kvwire.open(directory=url, name="decode") as comm:
        peer = comm.peer("role=prefill")
        print("{}", flush=True)  # it is there
        while line := await reader.readline():
            said = await _request(peer, stamped, int(line))
            print(json.dumps(said), flush=True)


async def _request(
    peer: kvwire.Peer, stamped: StampedCache, number: int
) -> dict[str, int]:
    for attempt in range(1, ATTEMPTS_MAX + 1):
        block, id = number % NUM_BLOCKS, f"{number}/{attempt}/{time.time_ns()}"
        asked = peer.send(
            ASK_TAG, json.dumps([number, id]).encode(), deadline=DEADLINE_S
        )
        inc = peer.pull(id, stamped.cache, [block], deadline=DEADLINE_S, lease_s=0.5)
        outcome = await inc
        await inc.drained()
        with contextlib.suppress(kvwire.KVWireError):
            await asked
        await asked.released()
        if outcome.complete:
            return {"attempts": attempt, "wrong": stamped.wrong(block, number)}
    return {"attempts": ATTEMPTS_MAX, "failed": 1}


# --- the fleet ------------------------------------------------------------------------


class Fleet:
    """Runs members, gives decode processes requests, and does harm."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._members: dict[tuple[str, int], Process] = {}
        self.counts: Counter[str] = Counter()
        self.longest_s: float = 0.0
        self.half_done = asyncio.Event()
        self._over = asyncio.Event()
        self._started: list[Process] = []

    async def run(self, requests: int, each: int, fault_s: float) -> None:
        """Serve so many requests with so many members of each role.

        Cancel safety: members are killed.
        """
        pending = asyncio.Queue[int]()
        for number in range(requests):
            pending.put_nowait(number)
        try:
            for number in range(each):
                await self._start("prefill", number)
            workers = [
                asyncio.create_task(self._worker(number, pending))
                for number in range(each)
            ]
            harm = asyncio.create_task(self._harm(fault_s, each))
            try:
                await asyncio.gather(*workers)
            finally:
                # Not cancelled, which would lose a process that is being started.
                self._over.set()
                await harm
                self._kill_all()
                await asyncio.wait(workers)
        finally:
            self.half_done.set()
            self._kill_all()
            for process in self._started:
                await process.wait()

    def _kill_all(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _start(self, role: str, number: int) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "tests.programs.soak.fleet",
                "--as",
                role,
                self._url,
            ),
            stdin=PIPE,
            stdout=PIPE,
            cwd=ROOT,
        )
        self._members[role, number] = process
        self._started.append(process)
        return process

    async def _worker(self, number: int, pending: asyncio.Queue[int]) -> None:
        """Give requests to one decode process after the other."""
        while not (pending.empty() or self._over.is_set()):
            process = await self._start("decode", number)
            assert process.stdin is not None
            assert process.stdout is not None
            await process.stdout.readline()
            while not (pending.empty() or self._over.is_set()):
                request, began = pending.get_nowait(), time.monotonic()
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(b"%d\n" % request)
                    await process.stdin.drain()
                async with asyncio.timeout(STUCK_S):
                    line = await process.stdout.readline()
                if not line:
                    pending.put_nowait(request)
                    self.counts["requests whose process was killed"] += 1
                    break
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.counts["requests"] += 1
                self.counts.update(json.loads(line))
                if pending.qsize() < self.counts["requests"]:
                    self.half_done.set()
            process.stdin.close()
            await process.communicate()

    async def _harm(self, fault_s: float, each: int) -> None:
        rolling = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fault_s):
                    await self._over.wait()
            if self._over.is_set():
                return
            if self._random.random() < 0.5:
                # A rolling restart: the next one is started, then this one may end.
                old = self._members["prefill", rolling]
                await self._start("prefill", rolling)
                await self._end(old, signal.SIGTERM)
                rolling = (rolling + 1) % each
                self.counts["restarted"] += 1
                continue
            role, number = self._random.choice(sorted(self._members))
            old = self._members[role, number]
            if old.returncode is None:
                await self._end(old, signal.SIGKILL)
                self.counts[f"{role} killed"] += 1
            if role == "prefill":
                await self._start(role, number)

    async def _end(self, process: Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        async with asyncio.timeout(STUCK_S):
            await process.wait()


@contextlib.contextmanager
def directory(kind: str) -> Iterator[tuple[str, Server | None]]:
    if kind == "file":
        with tempfile.TemporaryDirectory() as folder:
            yield f"file:{folder}?interval_s=0.1", None
    else:
        with _SERVERS[kind]() as server:
            yield f"{kind}://127.0.0.1:{server.port}", server


async def soak(
    kind: str, *, requests: int, each: int, fault_s: float, outage_s: float, seed: int
) -> Fleet:
    """Run a fleet; its server is away for a while, if there is one.

    Cancel safety: members are killed.
    """
    with directory(kind) as (url, server):
        fleet = Fleet(url, seed)
        running = asyncio.ensure_future(fleet.run(requests, each, fault_s))
        if server is not None and outage_s:
            await fleet.half_done.wait()
            server.kill()
            await asyncio.sleep(outage_s)
            await asyncio.to_thread(server.start)
            fleet.counts["server killed"] += 1
        await running
        return fleet


def main() -> None:
    """Run as a member, or run the fleet and print what became of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.soak.fleet")
    parser.add_argument("url", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="role", choices=("prefill", "decode"))
    parser.add_argument("--directory", choices=("file", *_SERVERS), default="file")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--each", type=int, default=4, help="members of each role")
    parser.add_argument("--fault-s", type=float, default=5.0)
    parser.add_argument("--outage-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.role:
        asyncio.run({"prefill": prefill, "decode": decode}[chosen.role](chosen.url))
        return
    began = time.monotonic()
    fleet = asyncio.run(
        soak(
            chosen.directory,
            requests=chosen.requests,
            each=chosen.each,
            fault_s=chosen.fault_s,
            outage_s=chosen.outage_s,
            seed=chosen.seed,
        )
    )
    print(f"{chosen.directory}: {time.monotonic() - began:.0f} s, longest request")
    print(f"{fleet.longest_s:.1f} s; {dict(fleet.counts)}")


if __name__ == "__main__":
    main()
