"""examples/fastapi_pair.py in two processes, over real sockets.

Nothing is waited for by time: prefill that is stopped with SIGSTOP keeps a request open
for as long as a test wants, and decode prints when a client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.runs import Beside, beside
from tests.support.servers import free_port
from tests.support.tree import ROOT
from toy_model import ToyModel, text_of, tokens_of

pytest.importorskip("fastapi", reason="fastapi is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

PROMPT = "who are you, said the caterpillar. this was not an encouraging opening"
NEW = 24
ASK = {"prompt": PROMPT, "new": NEW}
WHOLE = len(PROMPT) - 1
EXPECTED = text_of(ToyModel().alone(tokens_of(PROMPT), NEW))
# Blocks of 16 tokens for one request and no more.
ONE_REQUEST = -(-(len(PROMPT) + NEW) // 16)


@dataclass
class Pair:
    """Both servers, and a client of decode."""

    prefill: Beside
    decode: Beside
    http: Any
    stack: contextlib.AsyncExitStack
    port: int

    async def ask(self) -> Any:
        return await self.http.get("/answer", params=ASK)

    async def check(self, *, received: int) -> None:
        """Its answer is right, and so much of its prompt came from prefill."""
        found = (await self.ask()).json()
        assert found == {"text": EXPECTED, "tokens": WHOLE, "from_prefill": received}

    async def restart(self) -> None:
        """Another prefill at the same port."""
        self.prefill = await started(self.stack, "prefill", str(self.port))


async def until(server: Beside, text: str) -> None:
    """Wait for a line of its log."""
    while text not in await server.line():
        pass


async def started(
    stack: contextlib.AsyncExitStack, *arguments: str, **variables: str
) -> Beside:
    """One of the servers, once it answers."""
    program = (str(ROOT / "examples" / "fastapi_pair.py"), *arguments)
    server = await stack.enter_async_context(
        beside(*program, kind=Beside, logs=True, env=os.environ | variables)
    )
    await until(server, "running on")
    return server


@contextlib.asynccontextmanager
async def pair(**variables: str) -> AsyncIterator[Pair]:
    """Both servers; the variables are decode's."""
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with contextlib.AsyncExitStack() as stack:
        prefill = await started(stack, "prefill", str(ports[0]))
        decode = await started(stack, "decode", str(ports[1]), urls[0], **variables)
        client = httpx.AsyncClient(base_url=urls[1], timeout=300, trust_env=False)
        http = await stack.enter_async_context(client)
        yield Pair(prefill, decode, http, stack, ports[0])


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line]


async def test_a_killed_prefill_costs_time_and_a_new_one_is_found() -> None:
    async with pair() as both:
        await asyncio.gather(*(both.check(received=WHOLE) for _ in range(4)))
        both.prefill.signal(signal.SIGKILL)
        await both.prefill.wait()
        await both.check(received=0)
        await both.restart()
        await both.check(received=WHOLE)
        assert (await both.http.get("/health")).json() == {"free_blocks": 1024}
        both.decode.signal(signal.SIGINT)
        assert await both.decode.wait() == 0


async def test_tokens_come_one_by_one() -> None:
    async with pair() as both:
        streamed = await both.http.get("/stream", params=ASK)
        *tokens, last = events(streamed.text)
        assert "".join(token["text"] for token in tokens) == EXPECTED
        assert len(tokens) == NEW
        assert last == {"tokens": WHOLE, "from_prefill": WHOLE}


async def test_without_memory_it_says_try_again() -> None:
    async with pair(BLOCKS=str(ONE_REQUEST), PATIENCE_S="40") as both:
        both.prefill.signal(signal.SIGSTOP)
        async with both.http.stream("GET", "/stream", params=ASK) as first:
            assert first.status_code == 200  # it has its blocks, and waits for KV
            second = await both.ask()
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
            both.prefill.signal(signal.SIGCONT)
            await first.aread()
            assert events(first.text)[-1]["from_prefill"] == WHOLE
        await both.check(received=WHOLE)


async def test_a_client_that_goes_gives_its_memory_back() -> None:
    async with pair(BLOCKS=str(ONE_REQUEST), PATIENCE_S="40") as both:
        both.prefill.signal(signal.SIGSTOP)
        async with both.http.stream("GET", "/stream", params=ASK) as first:
            assert first.status_code == 200
        await until(both.decode, f"a client has gone; {ONE_REQUEST} blocks are free")
        both.prefill.signal(signal.SIGCONT)
        await both.check(received=WHOLE)


async def test_a_slow_prefill_is_not_waited_for() -> None:
    async with pair(PATIENCE_S="0.2") as both:
        both.prefill.signal(signal.SIGSTOP)
        await both.check(received=0)


@pytest.mark.parametrize(
    "wrong", [{}, {"prompt": "a"}, {"prompt": "a" * 901}, ASK | {"new": 101}]
)
async def test_sizes_of_a_stranger_are_compared(wrong: dict[str, Any]) -> None:
    import fastapi_pair

    transport = httpx.ASGITransport(app=fastapi_pair.decode)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        for path in ("/answer", "/stream"):
            refused = await http.get(path, params=wrong)
            assert refused.status_code == 422
