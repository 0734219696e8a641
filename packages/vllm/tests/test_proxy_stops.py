"""How the proxy starts and ends, as a process."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import web

from kvwire_vllm.proxy.command import main
from packages.vllm.tests.support.proxies import ASK, EVENTS, PATH
from packages.vllm.tests.support.serving import Front, front
from tests.support.servers import free_port
from tests.support.waiting import eventually

DECODE = ("--decode", "http://127.0.0.1:9=127.0.0.1:9", "--port", "0")


@asynccontextmanager
async def streaming(
    folder: Path, *options: str, under: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Front, asyncio.Event]]:
    """A proxy as a process, before an engine whose streams end at an event."""
    may_end = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers=EVENTS)
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await may_end.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    engine = web.Application()
    engine.add_routes([web.post(PATH, generate), web.get("/health", health)])
    runner = web.AppRunner(engine, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    proxy = front(folder, "--decode", f"{url}=127.0.0.1:9", *options)
    proxy.command = [*under, *proxy.command]
    try:
        proxy.start()
        await asyncio.to_thread(proxy.wait)
        yield proxy, may_end
    finally:
        proxy.kill()
        await runner.cleanup()
    assert "Traceback" not in proxy.tail()


async def begun(user: aiohttp.ClientSession, proxy: Front) -> aiohttp.ClientResponse:
    """An answer whose first event has come."""
    said = await user.post(f"{proxy.url}{PATH}", json=ASK)
    assert await said.content.readuntil(b"\n\n") == b"data: 1\n\n"
    return said


def health(proxy: Front) -> int:
    """The status that it answers; 0 where nobody listens."""
    try:
        return httpx.get(f"{proxy.url}/health").status_code
    except httpx.TransportError:
        return 0


def test_it_looks_after_its_engines_by_itself(tmp_path: Path) -> None:
    """No request has to fail first."""
    proxy = front(tmp_path, "--decode", f"http://127.0.0.1:{free_port()}=127.0.0.1:9")
    proxy.start()
    try:
        assert eventually(lambda: health(proxy) == 503)
    finally:
        proxy.kill()


@pytest.mark.parametrize(
    ("stop_s", "ends"), [("600", True), ("0.5", False), ("0", False)]
)
async def test_sigterm_lets_requests_end_for_a_while(
    tmp_path: Path, stop_s: str, *, ends: bool
) -> None:
    """No new ones are taken; what has not ended by then is cut."""
    async with (
        streaming(tmp_path, "--stop-s", stop_s) as (proxy, may_end),
        aiohttp.ClientSession() as user,
        asyncio.timeout(60),
    ):
        stream = await begun(user, proxy)
        assert proxy.running is not None
        proxy.running.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(eventually, lambda: not health(proxy))
        if ends:
            may_end.set()
            assert (await stream.content.read()).endswith(b"data: [DONE]\n\n")
        else:
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.content.read()
            stream.close()
        assert await asyncio.to_thread(proxy.running.wait) == 0


async def test_it_has_descriptors_for_all_requests(tmp_path: Path) -> None:
    """Shells give a process 1024, which 1024 requests at once do not fit in."""
    few = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh")
    async with (
        streaming(tmp_path, under=few) as (proxy, _),
        aiohttp.ClientSession() as user,
        asyncio.timeout(60),
    ):
        streams = [await begun(user, proxy) for _ in range(40)]
        assert {one.status for one in streams} == {200}
        for one in streams:
            one.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "[::]"])
def test_a_port_that_is_taken(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([*DECODE, "--host", host, "--port", port]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen at --host {host} --port {port}: Address already" in error


def test_a_host_that_is_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DECODE, "--host", "a..b"]) == 1
    assert "cannot listen at --host a..b --port 0: " in capsys.readouterr().err


def test_how_long_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    for s in ("-1", "nan", "inf"):
        with pytest.raises(SystemExit):
            main([*DECODE, "--stop-s", s])
        assert f"--stop-s {s}: pass 0 to" in capsys.readouterr().err
