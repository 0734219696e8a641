"""``kvwire doctor --vllm``: a proxy's findings, and those about one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvwire.cli.doctor.command import UNWELL
from kvwire.cli.main import CALLED_WRONG, FAILED, main
from kvwire.integrations.vllm.proxy import checking
from kvwire.integrations.vllm.proxy.sharing import MOVED
from tests.integrations.vllm.test_sharing import OF_VLLM, FakeVllm
from tests.support.engines.proxies import D1, P1, Engines, app, call, post, proxy
from tests.support.servers import free_port


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@asynccontextmanager
async def _engine(fake: FakeVllm, status: int = 200) -> AsyncIterator[str]:
    """The URL of an engine that has nothing but its metrics."""

    async def metrics(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/metrics":
            return web.Response(status=404)
        return web.Response(text=fake.metrics(), status=status)

    runner = web.ServerRunner(web.Server(metrics))
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def _doctor(url: str, *more: str) -> int:
    return await asyncio.to_thread(main, ["doctor", "--vllm", url, *more])


async def test_a_proxy_whose_decode_lacks_the_connector(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checking, "PROBE_S", 0)
    network = Engines(p1=FakeVllm("kv_producer"), d1=FakeVllm(connector=False))
    application = app(network, prefill=[P1], decode=[D1])
    async with application.running(), proxy(application) as port:
        while "KvwireConnector" not in (await call(application, "GET", "/fleet")).text:
            await post(application)
        assert await _doctor(f"http://127.0.0.1:{port}") == UNWELL
    shown = capsys.readouterr().out
    assert "http://d1, decode" in shown
    assert "missing connector" in shown
    assert "-> start it with --kv-transfer-config" in shown
    assert "ok      prompts" in shown  # of prefill
    assert shown.rstrip().endswith("prompts are computed twice")


async def test_a_proxy_before_an_engine_that_is_down(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    application = app(Engines(), prefill=[P1], decode=[D1])
    async with proxy(application) as port:
        await call(application, "POST", "/drain", json={"engine": P1.url})
        assert await _doctor(f"http://127.0.0.1:{port}", "--json") == 0
    prefill = json.loads(capsysbinary.readouterr().out)["engines"][1]
    assert prefill["role"] == "prefill"
    assert prefill["findings"][0] == {
        "name": "state",
        "state": "warn",
        "text": "draining",
        "remedy": "",
    }


@pytest.mark.parametrize(
    ("fake", "results", "code", "text"),
    [
        (FakeVllm("kv_consumer"), {MOVED: 9}, 0, "fetched: 9"),
        (FakeVllm("kv_consumer"), {"unequal": 3}, UNWELL, "releases of kvwire"),
        (FakeVllm("kv_producer"), {}, 0, "kv_producer; prompts sent: 7"),
        (FakeVllm(connector=False), {}, UNWELL, "it has no KvwireConnector"),
        (
            FakeVllm(connector=False, more=f"{OF_VLLM}vllm:nixl_x 1\n"),
            {},
            1,
            "NixlConnector",
        ),
        (FakeVllm(connector=False, more="x 1\n"), {}, 0, "--disable-log-stats"),
    ],
)
async def test_one_engine(
    fake: FakeVllm,
    results: dict[str, int],
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.results.clear()
    fake.results.update(results)
    async with _engine(fake) as url:
        assert await _doctor(url) == code
    assert text in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("status", [404, 500])
async def test_an_engine_without_metrics(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with _engine(FakeVllm(), status) as url:
        assert await _doctor(url) == 0
    assert "has no metrics of vLLM" in " ".join(capsys.readouterr().out.split())


async def test_metrics_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    async with _engine(FakeVllm(connector=False, more="vllm:kvwire_x{ 1\n")) as url:
        assert await _doctor(url) == FAILED
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "code", "text"),
    [
        ("http://127.0.0.1:9", FAILED, "Connection refused"),
        ("127.0.0.1:8000", CALLED_WRONG, "is not an http://host:port"),
    ],
)
async def test_nobody_answers(
    url: str, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _doctor(url) == code
    assert text in capsys.readouterr().err


async def test_something_else_has_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    async def fleet(_: Any) -> web.StreamResponse:
        return web.json_response({"ships": 3})

    runner = web.ServerRunner(web.Server(fleet))
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    assert await _doctor(f"http://127.0.0.1:{port}") == CALLED_WRONG
    await runner.cleanup()
    assert "/fleet: " in capsys.readouterr().err
