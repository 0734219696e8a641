"""``/metrics`` and ``/health`` of a store, read by a real client of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

import pytest

from kvwire import ListenError
from kvwire.observe import listening
from kvwire.observe.listening import HttpReply, HttpThread
from kvwire_store import BlockStore, StoreServer
from kvwire_store.metrics_server import MetricsServer
from tests.support.waiting import PATIENCE_S


def fetched(server: MetricsServer | HttpThread, path: str) -> tuple[int, str]:
    where = server.url.removesuffix("/metrics") + path
    try:
        with urllib.request.urlopen(where, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def wait_answered(server: MetricsServer) -> None:
    """Ask until the threads of those who have gone have noticed."""
    while True:
        with contextlib.suppress(OSError):
            fetched(server, "/metrics")
            return


async def test_metrics_and_health_are_answered() -> None:
    async with BlockStore.open(["memory:1MiB"]) as store:
        with MetricsServer(store, "127.0.0.1:0") as server:
            status, body = await asyncio.to_thread(fetched, server, "/metrics")
            assert status == HTTPStatus.OK
            assert "kvwire_store_puts_total" in body
            status, body = await asyncio.to_thread(fetched, server, "/health?why")
            assert (status, json.loads(body)["status"]) == (HTTPStatus.OK, "ok")
            status, body = await asyncio.to_thread(fetched, server, "/")
            assert (status, "/metrics" in body) == (HTTPStatus.NOT_FOUND, True)


def test_head_is_answered_as_http_says() -> None:
    """As probes of load balancers rely on."""

    def get(path: str, headers: Mapping[str, str]) -> HttpReply:
        assert (path, headers["host"]) == ("/health", "x")
        return HttpReply.of(HTTPStatus.OK, "text/plain", b"fine")

    with HttpThread("127.0.0.1:0", get) as server:
        url = urlsplit(server.url)
        where = str(url.hostname), url.port or 0
        for method, status in ((b"HEAD", b"200 OK"), (b"POST", b"501 Unsupported")):
            with (
                socket.create_connection(where, timeout=60) as sock,
                sock.makefile("rb") as r,
            ):
                sock.sendall(method + b" /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert r.readline().startswith(b"HTTP/1.0 " + status)
                head = r.read()
                if method == b"HEAD":
                    assert head.startswith(b"Server: kvwire\r\n")
                    assert b"Content-Length: 4" in head
                    assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
async def test_the_numbers_of_a_communicator_may_be_there_too(host: str) -> None:
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0", name="served") as served,
    ):
        communicator = served.communicator
        with MetricsServer(store, f"{host}:0", communicator) as server:
            _, body = await asyncio.to_thread(fetched, server, "/metrics")
    assert 'kvwire_connections_total{communicator="served"} 0.0' in body
    assert "kvwire_store_puts_total" in body


async def test_those_beyond_the_limit_are_hung_up_on() -> None:
    """Whoever has connected and asks nothing has a place until it goes."""
    async with BlockStore.open(["memory:1MiB"]) as store:
        with MetricsServer(store, "127.0.0.1:0") as server:
            where = ("127.0.0.1", urlsplit(server.url).port)
            silent = [socket.create_connection(where) for _ in range(16)]
            with socket.create_connection(where) as late:
                assert await asyncio.to_thread(late.recv, 1) == b""
            for one in silent:
                one.close()

            await asyncio.to_thread(wait_answered, server)


@pytest.mark.parametrize("takes", [False, True])
async def test_whoever_asks_without_an_end_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, *, takes: bool
) -> None:
    """However often something of it comes."""
    monkeypatch.setattr(listening, "_SILENT_S", 0.2)

    def trickle(where: tuple[str, int]) -> None:
        with socket.create_connection(where) as slow:
            slow.settimeout(0.01)
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            while True:
                with contextlib.suppress(TimeoutError):
                    slow.sendall(b"a: b\r\n"[:takes])
                    if slow.recv(1) == b"":
                        return

    async with BlockStore.open(["memory:1MiB"]) as store:
        with MetricsServer(store, "127.0.0.1:0") as server:
            where = ("127.0.0.1", urlsplit(server.url).port or 0)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(asyncio.to_thread(trickle, where), 20)
            status, _ = await asyncio.to_thread(fetched, server, "/health")
            assert status == HTTPStatus.OK


def test_an_answer_may_take_longer_than_a_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page waits as long for a stopped process as a client may take to ask."""
    looked = threading.Event()
    service_actions = listening._Server.service_actions

    def look(server: listening._Server) -> None:
        service_actions(server)
        if listening._SILENT_S < 0:
            looked.set()

    def slow(path: str, headers: Mapping[str, str]) -> HttpReply:
        monkeypatch.setattr(listening, "_SILENT_S", -1.0)
        assert looked.wait(PATIENCE_S), (path, headers)
        return HttpReply.of(HTTPStatus.OK, "text/plain", b"all of it")

    monkeypatch.setattr(listening._Server, "service_actions", look)
    with HttpThread("127.0.0.1:0", slow) as server:
        assert fetched(server, "/") == (HTTPStatus.OK, "all of it")


async def test_whoever_asks_and_goes_is_no_news(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with BlockStore.open(["memory:1MiB"]) as store:
        with MetricsServer(store, "127.0.0.1:0") as server:
            for error in (ConnectionResetError(), BrokenPipeError(), ValueError("a")):
                try:
                    raise error
                except (OSError, ValueError):
                    server._thread._server.handle_error(None, ("127.0.0.1", 1))
    assert not capsys.readouterr().err
    (said,) = (one for one in caplog.records if one.name == "kvwire.store")
    assert said.exc_info
    assert isinstance(said.exc_info[1], ValueError)


async def test_a_loop_that_is_stuck_is_not_healthy() -> None:
    async with BlockStore.open(["memory:1MiB"]) as store:
        with MetricsServer(store, "127.0.0.1:0") as server:
            # Called from the loop itself, which so has no turn to give.
            status, _, body = server.get("/health")
            assert status == HTTPStatus.SERVICE_UNAVAILABLE
            assert json.loads(body)["status"] == "stuck"


async def test_tiers_in_trouble_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BlockStore.open(["memory:1MiB"]) as store:
        trouble = {"memory": "", "disk": "no space left"}
        monkeypatch.setattr(BlockStore, "report", trouble)
        with MetricsServer(store, "127.0.0.1:0") as server:
            status, body = await asyncio.to_thread(fetched, server, "/health")
    assert status == HTTPStatus.OK
    found = json.loads(body)
    assert found == {"status": "degraded", "trouble": {"disk": "no space left"}}


async def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        async with BlockStore.open(["memory:1MiB"]) as store:
            with pytest.raises(ListenError, match=where):
                MetricsServer(store, where)
