"""How the proxy ends, as a process: Ctrl-C and SIGTERM, whatever is under way."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvwire_vllm.proxy.command import main
from packages.vllm.tests.support.serving import Front, Started, front
from tests.support.runs import python, ran
from tests.support.waiting import PATIENCE_S

PROXY = "kvwire_vllm.proxy"
DECODE = ("--decode", "http://127.0.0.1:9=127.0.0.1:9", "--port", "0")


@pytest.mark.parametrize("module", [f"{PROXY}.engines", "aiohttp", "aiohttp.web"])
def test_ctrl_c_while_it_starts(module: str) -> None:
    """The signal ends it, as shells expect it, and nothing is said."""
    code = (
        "import os, runpy, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(name, *_):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts)\n"
        f"runpy.run_module({PROXY!r}, run_name='__main__', alter_sys=True)\n"
    )
    done = python("-c", code, *DECODE)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_without_an_output(closed: str) -> None:
    """It comes as far as its port, which has somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = ran(
            *("sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", PROXY),
            *(*DECODE, "--port", port),
        )
    assert done.returncode == 3, done.stderr
    assert ("Address already in use" in done.stderr) is ("2>" not in closed)


@dataclass
class SlowEngine:
    """Begins an answer, or says nothing, as its prompt says."""

    asked: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    serving: set[asyncio.Task[Any]] = field(default_factory=set)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self.serving:
                task.cancel()
            await asyncio.gather(*self.serving)

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        with suppress(ConnectionError, asyncio.CancelledError):
            await self.serve(reader, writer)
        await closed(writer)

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        _, _, length = head.lower().partition(b"content-length: ")
        body = await reader.readexactly(int(length.split(b"\r\n")[0]))
        kind = json.loads(body)["prompt"]
        self.asked.put_nowait(kind)
        if kind != "silence":
            said = "content-type: text/event-stream"
            if kind != "events":
                said = f"content-type: application/json\r\ncontent-length: {10**12}"
            writer.write(f"HTTP/1.1 200 OK\r\n{said}\r\n\r\ndata: 1\n\n".encode())
        while kind == "much":
            writer.write(b" " * 100_000)
            await writer.drain()
        await asyncio.Event().wait()


@dataclass
class Clients:
    url: str
    stack: AsyncExitStack

    async def ask(self, path: str, lacks: int = 0, **body: Any) -> asyncio.StreamReader:
        """Send a request, perhaps without its last bytes."""
        at = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        self.stack.push_async_callback(closed, writer)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: "
        writer.write(f"{head}{len(content) + lacks}\r\n\r\n".encode() + content)
        return reader

    async def generate(self, prompt: str) -> asyncio.StreamReader:
        return await self.ask("/v1/completions", prompt=prompt)


@dataclass
class Stopping:
    engine: SlowEngine
    url: str
    proxy: Front
    process: Started
    clients: Clients


@asynccontextmanager
async def serving(
    folder: Path, *options: str, under: tuple[str, ...] = ()
) -> AsyncIterator[Stopping]:
    """A proxy before a slow engine, as a process."""
    engine = SlowEngine()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(engine.listening())
        proxy = front(folder, "--decode", f"{url}=127.0.0.1:9", *options)
        proxy.command = [*under, *proxy.command]
        stack.callback(proxy.kill)
        proxy.start()
        await asyncio.to_thread(proxy.wait)
        assert proxy.running is not None
        clients = Clients(proxy.url, stack)
        yield Stopping(engine, url, proxy, proxy.running, clients)
    assert "Traceback" not in proxy.tail()


async def test_sigterm_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Each client is told what can be told, and the log has nothing to be read."""
    async with serving(tmp_path, "--stop-s", "0.5") as s:
        engine, proxy, clients = s.engine, s.proxy, s.clients
        stream = await clients.generate("events")
        await stream.readuntil(b"data: 1\n\n")
        whole = await clients.generate("json")
        await whole.readuntil(b"data: 1\n\n")
        waits = await clients.generate("silence")
        await clients.generate("much")  # nobody reads it
        await clients.ask("/v1/completions", lacks=7)
        for _ in range(4):
            await engine.asked.get()
        drains = await clients.ask("/drain", engine=s.url, wait_s=3600)
        while await asyncio.to_thread(state, proxy) != "draining":
            pass
        began = time.monotonic()
        s.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            told = await stream.read()
            assert b"the proxy was stopped" in told
            assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert (await waits.read()).startswith(b"HTTP/1.1 503")
            assert not (await whole.read()).endswith(b"\r\n0\r\n\r\n")
            assert (await drains.read()).startswith(b"HTTP/1.1 503")
            status = await asyncio.to_thread(s.process.wait)
        assert status == -signal.SIGTERM
        assert 0.5 <= time.monotonic() - began < 10


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, "--stop-s", "600") as s:
        stream = await s.clients.generate("events")
        await stream.readuntil(b"data: 1\n\n")
        idle = await s.clients.ask("/nothing")
        await idle.readuntil(b"}}")
        s.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await idle.read() == b""  # it was let go of at the first
            s.process.send_signal(signal.SIGINT)
            status = await asyncio.to_thread(s.process.wait)
    assert status == -signal.SIGTERM


async def test_it_has_descriptors_for_all_requests(tmp_path: Path) -> None:
    """Shells give a process 1024, which 1024 requests at once do not fit in."""
    few = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh")
    async with serving(tmp_path, under=few) as s:
        async with asyncio.timeout(60):
            for _ in range(40):
                stream = await s.clients.generate("events")
                told = await stream.readuntil(b"data: 1\n\n")
                assert told.startswith(b"HTTP/1.1 200")


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def state(proxy: Front) -> Any:
    return httpx.get(f"{proxy.url}/fleet", timeout=PATIENCE_S).json()["engines"][0][
        "state"
    ]


def test_how_long_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    for s in ("-1", "nan", "inf"):
        with pytest.raises(SystemExit):
            main([*DECODE, "--stop-s", s])
        assert f"--stop-s {s}: pass 0 to" in capsys.readouterr().err
