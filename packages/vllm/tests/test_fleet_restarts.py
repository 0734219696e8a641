"""Engines and a proxy as processes: restarts and kills under load, for each directory.

The engines compute nothing; what an answer has to be only depends on its prompt.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from packages.vllm.tests.support.fake_engine import tokens_of
from packages.vllm.tests.support.serving import Process, engines_of, front
from tests.support.servers import Server, free_port, nats_server, redis_server

pytestmark = [
    # Everything but the load is in processes of its own.
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]
SERVERS = {"redis": redis_server, "nats": nats_server}
KINDS = ["file", *(pytest.param(k, marks=pytest.mark.slow) for k in SERVERS)]
# Engines of each role, and requests at least.
SIZE, LEAST = 2, 100
# Many times what an answer takes on a busy machine: who waits for longer is stuck.
STUCK_S = 60.0


@dataclass
class FakeFleet:
    proxy: Process
    engines: list[Process]
    server: Server | None
    client: httpx.AsyncClient
    chance: random.Random = field(default_factory=lambda: random.Random(19))

    async def ask(self, number: int) -> str:
        """What became of one request: right, wrong, broken off, or a status."""
        prompt, count = f"prompt {number}", 1 + number % 20
        body = {"prompt": prompt, "max_tokens": count, "stream": not number % 3}
        async with asyncio.timeout(STUCK_S):
            said = await self.client.post("/v1/completions", json=body)
        if said.status_code != 200:
            return f"{said.status_code}: {said.text}"
        want = tokens_of(prompt, count)
        if not body["stream"]:
            return "right" if said.json() == {"tokens": want} else "wrong"
        events = [part for part in said.text.split("data: ") if part.strip()]
        if "error" in said.text:
            got = [int(event) for event in events[:-2] if event.strip().isdecimal()]
            return "broken off" if got == want[: len(got)] else "wrong"
        whole = [int(event) for event in events[:-1]] == want
        return "right" if whole else "wrong"

    async def up(self) -> set[str]:
        return engines_of((await self.client.get("/metrics")).text, "up")

    async def until(self, condition: Callable[[set[str]], bool]) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(STUCK_S):
            while not condition(await self.up()):
                pass
        return loop.time() - began

    async def all_up(self) -> None:
        await self.until(lambda up: up == {engine.url for engine in self.engines})

    async def load(
        self, work: Callable[[], Awaitable[object]], least: int
    ) -> list[str]:
        """Ask one after another, eight at once, while some work is done."""
        over = asyncio.Event()
        answers: list[str] = []

        async def ask_on() -> None:
            while not over.is_set() or len(answers) < least:
                answers.append(await self.ask(self.chance.randrange(10**6)))

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(ask_on())
            await work()
            over.set()
        return answers


@asynccontextmanager
async def fleet(kind: str, folder: Path) -> AsyncIterator[FakeFleet]:
    """So many engines of each role, and a proxy that finds them."""
    with ExitStack() as stack:
        server = stack.enter_context(SERVERS[kind]()) if kind in SERVERS else None
        url = f"{kind}://127.0.0.1:{server.port}" if server else f"file:{folder}/d"
        engines = []
        for role in ["prefill", "decode"] * SIZE:
            port = free_port()
            command = [sys.executable, "-m", "packages.vllm.tests.support.fake_engine"]
            log = folder / f"{port}.log"
            where = f"http://127.0.0.1:{port}"
            engines.append(Process([*command, str(port), role, url], log, where))
        proxy = front(folder, "--directory", url)
        for process in (*engines, proxy):
            stack.callback(process.kill)
            process.start()
        async with httpx.AsyncClient(base_url=proxy.url, timeout=None) as client:
            found = FakeFleet(proxy, engines, server, client)
            await asyncio.to_thread(proxy.wait)  # healthy, so somebody decodes
            await found.all_up()
            yield found


async def stop(process: Process) -> None:
    assert process.running is not None
    process.running.send_signal(signal.SIGTERM)
    await asyncio.to_thread(process.running.wait, STUCK_S)


def counted(answers: list[str]) -> dict[str, int]:
    return {answer: answers.count(answer) for answer in set(answers)}


def is_up(engine: Process, *, up: bool = True) -> Callable[[set[str]], bool]:
    """Tell of the engines that are up whether this one is among them."""
    return lambda urls: (engine.url in urls) is up


@pytest.mark.parametrize("kind", KINDS)
async def test_engines_restart_one_by_one_and_are_killed(
    kind: str, tmp_path: Path
) -> None:
    """Every request has its answer, but for streams that had begun at a killed one.

    In the middle the directory's server is killed, and comes back with nothing in it.
    """
    async with fleet(kind, tmp_path) as found:

        async def restart_all() -> None:
            for engine in found.engines[:2]:
                asked = {"engine": engine.url, "wait_s": STUCK_S}
                said = await found.client.post("/drain", json=asked)
                assert said.json() == {"engine": engine.url, "running": 0}
                await stop(engine)
                engine.start()
                await found.until(is_up(engine))

        async def kill_some() -> None:
            for turn in range(SIZE):
                engine = found.chance.choice(found.engines)
                engine.kill()
                noticed.append(await found.until(is_up(engine, up=False)))
                if turn == SIZE // 2 and found.server is not None:
                    await asyncio.to_thread(found.server.kill)
                    await asyncio.to_thread(found.server.start)
                engine.start()
                await found.all_up()

        noticed: list[float] = []
        restarted = counted(await found.load(restart_all, LEAST))
        assert restarted == {"right": sum(restarted.values())}
        killed = counted(await found.load(kill_some, LEAST))
        text = (await found.client.get("/metrics")).text
        numbers = [line for line in text.splitlines() if "retries" in line]
        print(restarted, killed, noticed, numbers)
        assert killed.keys() <= {"right", "broken off"}
        assert "kvwire_proxy_retries_refused_total 0.0" in numbers
        assert max(noticed) < 5  # on a busy machine; 1 s is tested in virtual time


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_all_engines_of_a_role_are_gone_for_good(
    role: str, tmp_path: Path
) -> None:
    """Those of the other role answer alone, and no request is refused."""
    async with fleet("file", tmp_path) as found:
        gone = found.engines[0 if role == "prefill" else 1 :: 2]

        async def kill_all() -> None:
            for engine in gone:
                engine.kill()
                await found.until(is_up(engine, up=False))

        killed = counted(await found.load(kill_all, LEAST))
        assert killed.keys() <= {"right", "broken off"}
        later = await found.load(found.up, LEAST)
        assert counted(later) == {"right": len(later)}
        text = (await found.client.get("/metrics")).text
        assert "kvwire_proxy_retries_refused_total 0.0" in text
        assert (await found.client.get("/health")).status_code == 200
