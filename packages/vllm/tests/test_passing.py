"""What is passed to one engine: all that an engine has for clients, as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from aiohttp import web

from kvwire_vllm.proxy.app import ProxySettings, make_app
from kvwire_vllm.proxy.engines import VllmServer
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.passing import PASSED
from kvwire_vllm.proxy.server import ProxyServer
from kvwire_vllm.proxy.stopping import Ending
from packages.vllm.tests.support.proxies import Engines, app, call, mover, refused
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])  # its server has one

ROUTES = [(method, path) for path, methods in PASSED.items() for method in methods]
KEPT = "/v1/responses/resp_0a-F"
ROUTES += [("GET", KEPT), ("POST", f"{KEPT}/cancel")]
FORM = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n\xff\x00,[{\r\n--x--'


async def echoed(_: web.BaseRequest, said: bytes) -> web.StreamResponse:
    headers = {"x-own": "1", "set-cookie": "a=b", "keep-alive": "9", "vary": "origin"}
    headers |= {"access-control-allow-origin": "*", "content-type": "x/y"}
    return web.Response(status=207, body=said, headers=headers)


Answer = Callable[[web.BaseRequest, bytes], Coroutine[Any, Any, web.StreamResponse]]


@dataclass
class Engine:
    """A server of HTTP that notes what it is asked, but for its health."""

    answer: Answer = echoed
    heard: list[tuple[str, str, bytes]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        content = await request.read()
        self.heard.append((request.method, request.raw_path, content))
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        return await self.answer(request, content)


@asynccontextmanager
async def proxied(
    answer: Answer = echoed,
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    """A client of a proxy before one engine, all of it over sockets."""
    engine = Engine(answer)
    port, ending = free_port(), Ending()
    server = VllmServer(f"http://127.0.0.1:{port}", ("127.0.0.1:9",))
    served = make_app(EngineFleet([], [server]), ProxySettings(), ending=ending)
    async with AsyncExitStack() as stack:
        runner = web.ServerRunner(web.Server(engine.handle))
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        proxy = ProxyServer(served, "127.0.0.1", 0, ending, 0.0)
        there = await stack.enter_async_context(proxy.serving())
        url = f"http://127.0.0.1:{there}"
        yield (
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)
            ),
            engine,
        )


async def test_what_an_engine_has_is_passed_as_it_is() -> None:
    """Method, path, query and body; status, headers and body."""
    query = "a=%2B+%20&b=%C3%A9&c=[1]"
    body = b'{ "input" : "\\u00e9" , "x":1.0}'
    async with proxied() as (client, engine):
        for method, path in ROUTES:
            content = body if method == "POST" else b""
            headers = {"content-type": "application/json"} if content else {}
            said = await client.request(
                method, f"{path}?{query}", content=content, headers=headers
            )
            seen = "GET" if method == "HEAD" else method
            assert engine.heard.pop() == (seen, f"{path}?{query}", content)
            assert said.status_code == 207
            assert said.content == content
            assert engine.headers.get("content-type") == headers.get("content-type")


async def test_headers() -> None:
    """Those that are of one connection or one host are not passed, either way."""
    passed = {
        "x-api-key": "k",
        "anthropic-version": "1",
        "accept": "x/y",
        "origin": "o",
    }
    kept = {"connection": "x-hop", "x-hop": "1", "cookie": "a=b", "te": "trailers"}
    async with proxied() as (client, engine):
        said = await client.post("/v1/messages", json={}, headers=passed | kept)
        for name, value in passed.items():
            assert engine.headers[name] == value
        assert not {"x-hop", "cookie", "te"} & engine.headers.keys()
        assert engine.headers["host"] != client.base_url.netloc.decode()
    assert said.headers["x-own"] == "1"
    assert said.headers["content-type"] == "x/y"
    assert said.headers["content-length"] == "2"
    assert not {"set-cookie", "keep-alive"} & said.headers.keys()


async def test_a_form_is_passed_as_it_is() -> None:
    kind = {"content-type": "multipart/form-data; boundary=x"}
    async with proxied() as (client, engine):
        path = "/v1/audio/transcriptions"
        said = await client.post(path, content=FORM, headers=kind)
        assert engine.heard == [("POST", path, FORM)]
        assert engine.headers["content-type"] == kind["content-type"]
    assert said.content == FORM


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("name", [b"kv_transfer_params", b"\\u006bv_transfer_params"])
async def test_engines_hear_nothing_of_each_other(path: str, name: bytes) -> None:
    async with proxied() as (client, engine):
        await client.post(path, content=b'{"a": 1, "%b": {"remote": "x"}}' % name)
        assert json.loads(engine.heard[0][2]) == {"a": 1}
        # What an engine would read, and the proxy does not.
        secret = '{"kv_transfer_params": {}}'
        for content in (secret.encode("utf-16"), b"\xef\xbb\xbf" + secret.encode()):
            said = await client.post(path, content=content)
            assert said.status_code == 400
        assert len(engine.heard) == 1


async def status_of(client: httpx.AsyncClient, method: str, target: bytes) -> bytes:
    """Ask for what no client would write so."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    head = b"%b %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    writer.write(head % (method.encode(), target) + b"content-length: 0\r\n\r\n")
    status = (await reader.read()).split()[1]
    writer.close()
    await writer.wait_closed()
    return status


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/pause"),
        *("/reset_mm_cache", "/collective_rpc", "/server_info", "/resume", "/shutdown"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile"),
        *("/scale_elastic_ep", "/update_weights", "/abort_requests", "/invocations"),
        *("/inference/v1/generate", "/docs", "/openapi.json", "/load", "/ping", "/"),
        *("/v1/models/../../sleep", "/v1/models/%2e%2e/%2e%2e/sleep", "//v1/models"),
        *("/v1/responses/../sleep", "/v1/responses/a%2f..%2f..%2fsleep"),
        *("/v1/responses/a/b", "/v1/responses/", "/v1/models%3fa", "/V1/models"),
    ],
)
async def test_what_is_for_operators_is_not_passed(path: str) -> None:
    async with proxied() as (client, engine):
        for method in ("GET", "POST", "OPTIONS"):
            assert await status_of(client, method, path.encode()) == b"404"
        assert not engine.heard


async def test_a_path_is_asked_as_its_engine_is() -> None:
    async with proxied() as (client, engine):
        assert (await client.post("/v1/models")).status_code == 405
        assert (await client.get("/v1/embeddings")).status_code == 405
        for query in (b"?\xc3\xa9", b"?\xff"):
            assert await status_of(client, "GET", b"/version" + query) == b"400"
        assert not engine.heard


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_page_asks_what_it_may(path: str) -> None:
    """An engine says it, of what is split between two as well."""
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    async with proxied() as (client, engine):
        said = await client.options(path, headers=asked)
        assert engine.heard == [("OPTIONS", path, b"")]
        assert {name: engine.headers[name] for name in asked} == asked
        assert said.headers["access-control-allow-origin"] == "*"
        said = await client.post(path, json={"messages": []}, headers=asked)
        assert engine.headers["origin"] == "http://page"
        assert said.headers["access-control-allow-origin"] == "*"
        assert said.headers["vary"] == "origin"
        for own in ("/drain", "/migrate", "/fleet", "/metrics", "/health"):
            assert (await client.options(own)).status_code == 405
        assert len(engine.heard) == 2


@pytest.mark.parametrize("cut", [False, True])
async def test_a_stream_comes_part_by_part_and_is_cut_as_it_was(cut: bool) -> None:
    may_go_on = asyncio.Event()

    async def streams(request: web.BaseRequest, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"event: message_start\n\n")
        await may_go_on.wait()
        if cut:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"event: message_stop\n\n")
        return response

    read = []
    async with (
        proxied(streams) as (client, _),
        client.stream("POST", "/v1/messages", json={"stream": True}) as said,
    ):
        parts = said.aiter_raw()
        read.append(await anext(parts))
        may_go_on.set()
        try:
            read += [part async for part in parts]
        except httpx.RemoteProtocolError:
            read.append(b"cut")
    assert read == [
        b"event: message_start\n\n",
        b"cut" if cut else b"event: message_stop\n\n",
    ]


async def test_an_engine_that_is_down_is_passed_by() -> None:
    network = Engines(d1=refused)
    application = app(network)
    for _ in range(4):
        said = await call(application, "POST", "/tokenize", json={"prompt": "a"})
        assert said.status_code == 200
    assert network.hosts().count("d1") == 1
    assert "p1" not in network.hosts()
    page = (await call(application, "GET", "/metrics")).text
    assert 'kvwire_proxy_requests_total{status="200"} 4.0' in page


async def test_what_is_passed_does_not_move() -> None:
    answering = asyncio.Event()

    async def handler(_: dict[str, Any]) -> Any:
        answering.set()
        await asyncio.Event().wait()

    application, network = mover(d1=handler, d2=handler)
    asking = asyncio.ensure_future(call(application, "POST", "/v1/messages", json={}))
    await answering.wait()
    url = f"http://{network.hosts()[0]}"
    said = await call(application, "POST", "/migrate", json={"engine": url})
    assert said.status_code == 409
    assert said.json()["requests"][0]["stayed"] == "/v1/messages does not move"
    asking.cancel()
    await asyncio.wait({asking})
