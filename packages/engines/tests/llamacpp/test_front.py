"""The front of a llama-server: a client changes one URL, and its sessions survive.

Needs xllamacpp and gguf, as test_sessions.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvwire.cli.main import main
from kvwire_engines.llamacpp import LlamaCppSessions
from kvwire_engines.llamacpp.front import SessionFront
from kvwire_engines.llamacpp.sessions import BLOCK_TOKENS
from kvwire_store import BlockStore
from packages.engines.tests.llamacpp.server import (
    LlamaServer,
    front_beside,
    llama_server,
    prompt_of,
    serving,
    toy_model,
)
from tests.support.pairs import until


@contextlib.asynccontextmanager
async def front_of(server: LlamaServer, store: BlockStore) -> AsyncIterator[str]:
    """Run a front in this process; yield its address."""
    async with (
        LlamaCppSessions(store, server.url, server.folder) as sessions,
        SessionFront(sessions, "127.0.0.1", 0) as front,
    ):
        yield front.url


async def test_a_chat_goes_on_after_its_server_was_killed(
    model: Path, tmp_path: Path
) -> None:
    """With another server at the same address, as after a swap of models."""
    prompt = prompt_of(0, 300)
    async with BlockStore.open(["memory:64MiB"]) as store:
        async with llama_server(model, tmp_path) as server:
            port = server.url.rpartition(":")[2]
            async with front_of(server, store) as url:
                first = await server.complete(prompt, url=url)
                again = await server.complete(prompt, url=url)
            assert again["timings"]["cache_n"] == 299, "the slot has it still"
        longer = prompt + first["tokens"] + prompt_of(1, 9)
        async with (
            llama_server(model, tmp_path, "--port", port) as server,
            front_of(server, store) as url,
        ):
            second = await server.complete(longer, url=url)
            expected = await server.complete(longer, cache_prompt=False)
    assert second["timings"]["cache_n"] == 9 * BLOCK_TOKENS
    assert second["tokens"] == expected["tokens"]


async def test_the_front_outlives_the_server(model: Path, tmp_path: Path) -> None:
    prompt = prompt_of(0, 200)
    other = toy_model(tmp_path / "other.gguf", seed=1)
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        contextlib.AsyncExitStack() as running,
    ):
        server = await running.enter_async_context(llama_server(model, tmp_path))
        port = server.url.rpartition(":")[2]
        url = await running.enter_async_context(front_of(server, store))
        first = await server.complete(prompt, url=url)
        await until(lambda: store.stats()["memory:64MiB"].blocks == 6)
        for weights, cached in ((model, 6 * BLOCK_TOKENS), (other, 0), (model, 192)):
            await server.kill()
            body = {"prompt": prompt}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/completion", json=body) as lost,
            ):
                assert lost.status == 502
                assert server.url in await lost.text()
            server = await running.enter_async_context(
                llama_server(weights, tmp_path, "--port", port)
            )
            answer = await server.complete(prompt, url=url)
            assert answer["timings"]["cache_n"] in (cached, cached + 1)
            assert (answer["tokens"] == first["tokens"]) is (weights is model)


async def test_streams_chats_and_other_requests_pass_through(
    model: Path, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": "a" * 90}], "max_tokens": 8}
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path) as server,
        front_of(server, store) as url,
        aiohttp.ClientSession() as session,
    ):

        async def asked(where: str, path: str, body: Any) -> bytes:
            async with session.post(where + path, json=body) as response:
                return await response.read()

        events = await asked(
            url, "/v1/chat/completions", {**chat, "stream": True, "temperature": 0}
        )
        assert events.startswith(b"data: {")
        assert events.endswith(b"data: [DONE]\n\n")
        await until(lambda: (store.stats()["memory:64MiB"].blocks or 0) >= 3)
        for path, body in (
            ("/tokenize", {"content": "abc"}),
            ("/completion", {"prompt": "abc", "n_predict": "many"}),
            ("/completion", {"prompt": [["a"], 3.5]}),
        ):
            assert await asked(url, path, body) == await asked(server.url, path, body)
        async with session.get(f"{url}/health") as health:
            assert msgspec.json.decode(await health.read()) == {"status": "ok"}


@pytest.mark.parametrize("answer", [b"[]", b"{}", b'{"total_slots": []}', b"<html>"])
async def test_another_server_is_named(tmp_path: Path, answer: bytes) -> None:
    """One that answers each request with something else."""

    async def other(_: web.BaseRequest) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    async with (
        serving(other) as where,
        BlockStore.open(["memory:64MiB"]) as store,
        LlamaCppSessions(store, where, tmp_path) as sessions,
        SessionFront(sessions, "127.0.0.1", 0) as front,
        aiohttp.ClientSession() as session,
        session.post(f"{front.url}/completion", json={"prompt": [1, 2]}) as response,
    ):
        assert response.status == 502
        assert where in await response.text()


async def test_what_a_client_breaks_leaves_nothing_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is answered if it is still there."""
    left = asyncio.Event()
    over = asyncio.Event()

    async def other(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"1\n")
        await left.wait()
        with contextlib.suppress(ConnectionError):
            while True:  # until the front has gone as well
                await response.write(b"2\n")
        over.set()
        return response

    async with (
        serving(other) as where,
        BlockStore.open(["memory:64MiB"]) as store,
        LlamaCppSessions(store, where, tmp_path) as sessions,
        SessionFront(sessions, "127.0.0.1", 0) as front,
    ):
        port = int(front.url.rpartition(":")[2])
        for wrong, answer in (
            (b"host", b"HTTP/1.0 400"),
            (
                b"host: x\r\ncontent-encoding: gzip\r\ncontent-length: 3",
                b"HTTP/1.1 400",
            ),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /x HTTP/1.1\r\n" + wrong + b"\r\n\r\n???")
            assert (await reader.readline()).startswith(answer)
            writer.transport.abort()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"1\n")
        writer.transport.abort()
        left.set()
        await over.wait()
    assert not [each for each in caplog.records if each.levelname != "INFO"]


async def test_a_slot_is_used_once_also_after_a_swap(tmp_path: Path) -> None:
    """An answer that began before the swap of models has its slot until its end."""
    asked = asyncio.Queue[int]()
    ends = asyncio.Event()
    alias = "one"

    async def other(request: web.BaseRequest) -> web.Response:
        match request.path:
            case "/props":
                return web.json_response({"total_slots": 2, "model_alias": alias})
            case "/lora-adapters" | "/slots":
                return web.json_response([])
            case "/completion":
                asked.put_nowait((await request.json())["id_slot"])
                await ends.wait()
        return web.json_response({})

    async with (
        serving(other) as where,
        BlockStore.open(["memory:64MiB"]) as store,
        LlamaCppSessions(store, where, tmp_path) as sessions,
        SessionFront(sessions, "127.0.0.1", 0) as front,
        aiohttp.ClientSession() as session,
        asyncio.TaskGroup() as clients,
    ):

        async def client() -> None:
            body = {"prompt": [1, 2]}
            async with session.post(f"{front.url}/completion", json=body) as answer:
                assert answer.status == 200

        clients.create_task(client())
        first = await asked.get()
        alias = "two"
        clients.create_task(client())
        second = await asked.get()
        ends.set()
    assert {first, second} == {0, 1}


def test_an_address_in_use_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        command = ["session", "serve", "--engine", "http://127.0.0.1:9"]
        command += ["--slots", str(tmp_path), "--tier", "memory:16MiB"]
        assert main([*command, "--listen", where]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kvwire: cannot listen on tcp://{where}: ")


async def test_a_folder_that_is_gone_costs_the_session_and_no_request(
    model: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(0, 100)
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path) as server,
        front_of(server, store) as url,
    ):
        first = await server.complete(prompt, url=url)
        await until(lambda: store.stats()["memory:64MiB"].blocks == 3)
        await server.complete([97], id_slot=0, cache_prompt=False)
        await asyncio.to_thread(server.folder.rename, tmp_path / "elsewhere")
        again = await server.complete(prompt, url=url)
    assert again["tokens"] == first["tokens"]


async def test_requests_beyond_the_slots_wait(model: Path, tmp_path: Path) -> None:
    prompts = [prompt_of(seed, 100) for seed in range(6)]
    async with (
        BlockStore.open(["memory:64MiB"]) as store,
        llama_server(model, tmp_path, "--parallel", "2") as server,
        front_of(server, store) as url,
    ):
        answers = await asyncio.gather(
            *(server.complete(prompt, url=url) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            alone = await server.complete(prompt, cache_prompt=False)
            assert answer["tokens"] == alone["tokens"]


async def test_the_command_serves_and_stores_before_it_ends(
    model: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(0, 100)
    tiers = ("memory:4MiB", f"disk:{tmp_path}/kv?size=64MiB")
    async with (
        llama_server(model, tmp_path) as server,
        front_beside(server, *tiers) as front,
    ):
        await front.complete(prompt)
        front.signal(signal.SIGTERM)
        assert await front.wait() == 0
    async with BlockStore.open(tiers) as store:
        assert store.stats()[tiers[1]].blocks == 3, store.stats()
