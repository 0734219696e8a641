"""examples/http_server.py in two processes, over real sockets.

Nothing is waited for by time: prefill that is stopped with SIGSTOP keeps a request open
for as long as a test wants, and what a server has noticed it prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tree import ROOT
from toy_model import ToyModel, text_of, tokens_of

pytest.importorskip("starlette", reason="starlette is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

pytestmark = [
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]

PROMPT = "who are you, said the caterpillar. this was not an encouraging opening"
NEW = 24
EXPECTED = text_of(ToyModel().alone(tokens_of(PROMPT), NEW))
# Blocks of 16 tokens for one request and no more.
ONE_REQUEST = -(-(len(PROMPT) + NEW) // 16)


class Server:
    def __init__(self, process: asyncio.subprocess.Process, line: str) -> None:
        self.process = process
        self.address = line.rpartition(" ")[2]

    async def says(self, line: str) -> None:
        assert self.process.stdout is not None
        while (said := await self.process.stdout.readline()).decode().strip() != line:
            assert said, f"it ended without {line!r}"


@contextlib.asynccontextmanager
async def server(folder: Path, *arguments: str) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples" / "http_server.py"), *arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Server(process, (await process.stdout.readline()).decode().strip())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGINT)
        await process.wait()


@contextlib.asynccontextmanager
async def both(folder: Path, *options: str) -> AsyncIterator[tuple[Server, Server]]:
    async with server(folder, "prefill", "--listen", "127.0.0.1:0") as prefill:
        where = ("--prefill", prefill.address, "--http", "127.0.0.1:0")
        async with server(folder, "decode", *where, *options) as decode:
            await decode.says("prefill is connected")
            yield prefill, decode


def client(decode: Server) -> Any:
    return httpx.AsyncClient(base_url=f"http://{decode.address}", timeout=300)


async def ask(http: Any) -> Any:
    return await http.post("/generate", json={"prompt": PROMPT, "new": NEW})


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line]


def check(response: Any, *, received: int) -> None:
    """The answer is right, and so much of its prompt came from prefill."""
    assert response.status_code == 200
    *tokens, last = events(response.text)
    assert "".join(event["text"] for event in tokens) == EXPECTED
    computed = len(PROMPT) - 1 - received
    assert last == {"received": received, "computed": computed}


async def test_a_killed_prefill_costs_time_and_a_new_one_is_found(
    tmp_path: Path,
) -> None:
    async with both(tmp_path) as (prefill, decode), client(decode) as http:
        for response in await asyncio.gather(*(ask(http) for _ in range(3))):
            check(response, received=len(PROMPT) - 1)
        prefill.process.kill()
        await decode.says("prefill is gone")
        check(await ask(http), received=0)
        again = ("prefill", "--listen", prefill.address)
        async with server(tmp_path, *again):
            await decode.says("prefill is connected")
            check(await ask(http), received=len(PROMPT) - 1)
        health = (await http.get("/health")).json()
        assert (health["running"], health["free_blocks"]) == (0, 1024)


async def test_without_memory_it_says_try_again(tmp_path: Path) -> None:
    options = ("--blocks", str(ONE_REQUEST), "--patience", "40")
    async with both(tmp_path, *options) as (prefill, decode), client(decode) as http:
        prefill.process.send_signal(signal.SIGSTOP)
        asked = {"prompt": PROMPT, "new": NEW}
        async with http.stream("POST", "/generate", json=asked) as first:
            assert first.status_code == 200  # it has its blocks, and waits for KV
            second = await ask(http)
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
            prefill.process.send_signal(signal.SIGCONT)
            await first.aread()
            check(first, received=len(PROMPT) - 1)
        check(await ask(http), received=len(PROMPT) - 1)


async def test_a_client_that_goes_gives_its_memory_back(tmp_path: Path) -> None:
    options = ("--blocks", str(ONE_REQUEST), "--patience", "40")
    async with both(tmp_path, *options) as (prefill, decode), client(decode) as http:
        prefill.process.send_signal(signal.SIGSTOP)
        asked = {"prompt": PROMPT, "new": NEW}
        async with http.stream("POST", "/generate", json=asked) as first:
            assert first.status_code == 200
        await decode.says(f"the client has gone; {ONE_REQUEST} blocks are free")
        prefill.process.send_signal(signal.SIGCONT)
        check(await ask(http), received=len(PROMPT) - 1)


async def test_a_slow_prefill_is_not_waited_for(tmp_path: Path) -> None:
    async with both(tmp_path, "--patience", "0.2") as (prefill, decode):
        prefill.process.send_signal(signal.SIGSTOP)
        async with client(decode) as http:
            check(await ask(http), received=0)
            health = (await http.get("/health")).json()
        assert health["prefill"] == "connected"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "truncated"),
        (b"{}", 400, "prompt"),
        (b'{"prompt": "a"}', 400, "length"),
        (b'{"prompt": "aa", "new": 101}', 400, "<= 100"),
        (b" " * 20_000, 413, "at most"),
    ],
)
async def test_sizes_of_a_stranger_are_compared(
    body: bytes, status: int, says: str, web: Any
) -> None:
    response = await web.post("/generate", content=body)
    assert response.status_code == status
    assert says in response.text


@pytest.fixture
async def web() -> AsyncIterator[Any]:
    """The application in this process, without prefill."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    import http_server

    routes = [Route("/generate", http_server.generate, methods=["POST"])]
    app = Starlette(routes=routes)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        yield http
