"""``/metrics``, ``/health`` and ``/top`` of a store, read by a real client of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvwire import BlockStore, ListenError, StoreServer
from kvwire.observe import listening
from kvwire.observe.http import MetricsServer
from kvwire.observe.listening import HttpReply, HttpThread
from kvwire.security.keys import write_key_file
from kvwire.store.server.orders import StoreOrders
from kvwire.types import HttpClient
from tests.support.caches import Filled, chain
from tests.support.certificates import FAR, NEAR, Authority, issue
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


def test_head_and_expect_are_answered_as_http_says() -> None:
    """As probes of load balancers, and curl with a large body, rely on."""

    class Echo:
        bytes_max = 100

        def answer(
            self, path: str, headers: Mapping[str, str], client: HttpClient, body: bytes
        ) -> tuple[HTTPStatus, dict[str, Any]]:
            return HTTPStatus.OK, {"body": body.decode()}

        def secured(self, connection: socket.socket) -> None:
            """Serve by HTTP alone."""

        def identity(self, tls: ssl.SSLSocket) -> str:
            return ""

    def get(path: str, headers: Mapping[str, str], client: HttpClient) -> HttpReply:
        return HttpReply.of(HTTPStatus.OK, "text/plain", b"fine")

    with HttpThread("127.0.0.1:0", get, Echo()) as server:
        url = urlsplit(server.url)
        where = str(url.hostname), url.port or 0
        with (
            socket.create_connection(where, timeout=60) as sock,
            sock.makefile("rb") as r,
        ):
            sock.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
            head, body = r.read().split(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.0 200 OK\r\nServer: kvwire\r\n")
            assert (b"Content-Length: 4" in head, body) == (True, b"")
        with (
            socket.create_connection(where, timeout=60) as sock,
            sock.makefile("rb") as r,
        ):
            sock.sendall(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\n")
            sock.sendall(b"content-length: 2\r\n\r\n")
            assert r.readline() + r.readline() == b"HTTP/1.1 100 Continue\r\n\r\n"
            sock.sendall(b"ok")
            assert r.read().endswith(b'{"body": "ok"}\n')


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

    def slow(path: str, headers: Mapping[str, str], client: HttpClient) -> HttpReply:
        monkeypatch.setattr(listening, "_SILENT_S", -1.0)
        assert looked.wait(PATIENCE_S), (path, headers, client)
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
            status, _, body = server.get("/health", {}, HttpClient("127.0.0.1"))
            assert status == HTTPStatus.SERVICE_UNAVAILABLE
            assert json.loads(body)["status"] == "stuck"


async def test_a_page_of_a_loop_that_is_stuck_gets_the_reason() -> None:
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0") as served,
    ):
        with MetricsServer(
            store, "127.0.0.1:0", served.communicator, StoreOrders(served)
        ) as server:
            # As above.
            status, _, body = server.get(
                "/top.json", {"host": "x"}, HttpClient("127.0.0.1")
            )
    assert status == HTTPStatus.SERVICE_UNAVAILABLE
    assert "event loop is blocked" in json.loads(body)["error"]


async def test_tiers_in_trouble_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with BlockStore.open(["memory:1MiB"]) as store:
        trouble = {"memory": "", "disk": "no space left"}
        monkeypatch.setattr(BlockStore, "report", trouble)
        with MetricsServer(store, "127.0.0.1:0") as server:
            status, body = await asyncio.to_thread(fetched, server, "/health")
    assert status == HTTPStatus.OK
    found = json.loads(body)
    assert found == {"status": "degraded", "trouble": {"disk": "no space left"}}


def test_a_connection_whose_tls_fails_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever kind of error it is."""

    class Failing:
        bytes_max = 100

        def answer(
            self, path: str, headers: Mapping[str, str], client: HttpClient, body: bytes
        ) -> tuple[HTTPStatus, dict[str, Any]]:
            raise NotImplementedError

        def secured(self, connection: socket.socket) -> ssl.SSLSocket | None:
            raise ValueError("certificates")

        def identity(self, tls: ssl.SSLSocket) -> str:
            raise NotImplementedError

    def get(path: str, headers: Mapping[str, str], client: HttpClient) -> HttpReply:
        raise NotImplementedError

    with HttpThread("127.0.0.1:0", get, Failing()) as server:
        url = urlsplit(server.url)
        where = str(url.hostname), url.port or 0
        with socket.create_connection(where, timeout=PATIENCE_S) as client:
            client.sendall(b"\x16")
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
    assert [str(one.exc_info and one.exc_info[1]) for one in caplog.records] == [
        "certificates"
    ]


async def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        async with BlockStore.open(["memory:1MiB"]) as store:
            with pytest.raises(ListenError, match=where):
                MetricsServer(store, where)


# --- verbs ----------------------------------------------------------------------------

A = chain(4, "a")
CACHE = Filled(seed=1).cache


def ordered(
    server: MetricsServer, path: str, order: object, key: str = "", **headers: str
) -> tuple[int, Any]:
    """Order a verb; return the status and the decoded answer."""
    sent = {"Content-Type": "application/json", **headers}
    if key:
        sent["Authorization"] = f"Bearer {key}"
    body = order if isinstance(order, bytes) else json.dumps(order).encode()
    where = server.url.removesuffix("/metrics") + path
    request = urllib.request.Request(where, body, sent)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.loads(exc.read())


async def test_verbs_are_carried_out_for_those_who_have_a_key(tmp_path: Path) -> None:
    keys = {}
    for who in ("x", "y", "all"):
        write_key_file(tmp_path / who)
        keys[who] = (tmp_path / who).read_text().strip()
    tenants = [f"{who}?key={tmp_path}/{who}" for who in ("x", "y")]
    hashes = [one.hex() for one in A]
    async with (
        BlockStore.open(["memory:1MiB"], tenants=tenants) as store,
        StoreServer(store, "127.0.0.1:0", psk_file=str(tmp_path / "all")) as served,
    ):
        await store.put(A, CACHE, range(4), tenant="x")
        with MetricsServer(
            store, "127.0.0.1:0", served.communicator, StoreOrders(served)
        ) as server:

            async def order(*arguments: Any, **more: str) -> tuple[int, Any]:
                return await asyncio.to_thread(ordered, server, *arguments, **more)

            status, told = await order(
                "/kv/pin", {"hashes": hashes, "ttl_s": 60}, keys["x"]
            )
            assert (status, told["counts"]) == (200, {"done": 4})
            use = store.tenant_stats()["x"].tiers["memory:1MiB"]
            assert use.pinned_bytes == 4 * 4096
            wanted: dict[str, object] = {"hashes": hashes}
            abroad = {**wanted, "to": "kvwire://h:1"}
            status, told = await order("/kv/locate", wanted, keys["y"])
            assert (status, told["blocks"]) == (200, ["missing"] * 4)
            wanted["tenant"] = "x"
            status, told = await order("/kv/locate", wanted, keys["all"])
            assert (status, told["held"]) == (200, {"memory:1MiB": [True] * 4})
            assert told["prefix"] == 4
            for path, asked, key, code, why in (
                ("/kv/locate", wanted, keys["y"], 403, "cannot act for 'x'"),
                ("/kv/locate", wanted, "", 401, "authorization"),
                ("/kv/locate", wanted, "ab" * 32, 401, "authorization"),
                ("/kv/locate", wanted, "x", 401, "authorization"),
                ("/kv/lock", wanted, keys["x"], 404, "/kv/locate"),
                ("/kv/pin", {"hash": "ab"}, keys["x"], 400, "unknown field"),
                ("/kv/pin", b"{", keys["x"], 400, "not the expected JSON"),
                ("/kv/pin", {"hashes": ["x"]}, keys["x"], 400, "hashes"),
                ("/kv/move", {**wanted, "to": "n"}, keys["x"], 400, "no node"),
                ("/kv/move", abroad, keys["x"], 400, "kvwire:// servers"),
            ):
                status, told = await order(path, asked, key)
                assert (status, why in told["error"]) == (code, True), (path, told)
            plain = {"Content-Type": "text/plain"}
            status, told = await order("/kv/pin", wanted, keys["x"], **plain)
            assert status == 415
            large = {"Content-Length": str(5 << 20)}
            status, told = await order("/kv/pin", wanted, keys["x"], **large)
            assert status == 413


async def test_without_keys_this_host_orders_and_a_reader_is_only_read() -> None:
    wanted = {"hashes": [one.hex() for one in A]}
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0", read_only=True) as served,
    ):
        await store.put(A, CACHE, range(4))
        with MetricsServer(
            store, "127.0.0.1:0", served.communicator, StoreOrders(served)
        ) as server:
            status, _ = await asyncio.to_thread(ordered, server, "/kv/locate", wanted)
            assert status == 200
            status, told = await asyncio.to_thread(ordered, server, "/kv/pin", wanted)
            assert (status, told["error"]) == (403, "this server is read-only")
        with MetricsServer(store, "127.0.0.1:0") as server:
            status, told = await asyncio.to_thread(ordered, server, "/kv/pin", wanted)
            assert (status, told["error"]) == (404, "this server accepts no orders")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Host", "kv.example.com:9400"),
        ("Origin", "http://kv.example.com"),
        ("Origin", "http://[x"),
    ],
)
async def test_a_page_of_another_host_orders_and_reads_nothing(
    name: str, value: str
) -> None:
    """Its owner can point its name to 127.0.0.1, and browsers then let it ask."""
    wanted = {"hashes": [one.hex() for one in A]}
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0") as served,
    ):
        await store.put(A, CACHE, range(4))
        with MetricsServer(
            store, "127.0.0.1:0", served.communicator, StoreOrders(served)
        ) as server:
            status, told = await asyncio.to_thread(
                ordered, server, "/kv/pin", wanted, **{name: value}
            )
            assert (status, value in told["error"]) == (403, True)
            status, told = await asyncio.to_thread(looked, server, **{name: value})
            assert (status, value in told["error"]) == (403, True)


# --- the page -------------------------------------------------------------------------


def looked(
    server: MetricsServer, key: str = "", **headers: str
) -> tuple[int, dict[str, Any]]:
    """Fetch what the page shows; return the status and the decoded answer."""
    if key:
        headers["Authorization"] = f"Bearer {key}"
    where = server.url.removesuffix("/metrics") + "/top.json"
    request = urllib.request.Request(where, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.loads(exc.read())


def texts(shown: dict[str, Any], table: str) -> list[list[str]]:
    """The texts of a table's rows."""
    return [
        [cell if isinstance(cell, str) else cell["text"] for cell in row["cells"]]
        for one in shown["tables"]
        if one["name"] == table
        for row in one["rows"]
    ]


async def test_the_page_shows_a_tenant_its_own_and_the_operator_all(
    tmp_path: Path,
) -> None:
    keys = {}
    for who in ("x", "y", "all"):
        write_key_file(tmp_path / who)
        keys[who] = (tmp_path / who).read_text().strip()
    tenants = [f"{who}?key={tmp_path}/{who}" for who in ("x", "y")]
    async with (
        BlockStore.open(["memory:1MiB"], tenants=tenants) as store,
        StoreServer(store, "127.0.0.1:0", psk_file=str(tmp_path / "all")) as served,
        BlockStore.open(
            [
                f"kvwire://{served.address.host}:{served.address.port}?psk_file={tmp_path}/y"
            ]
        ) as client,
    ):
        await store.put(A, CACHE, range(4), tenant="x")
        await client.put(A, CACHE, range(4))
        with MetricsServer(
            store, "127.0.0.1:0", served.communicator, StoreOrders(served)
        ) as server:
            for key in ("", "ab" * 32, "nonsense"):
                status, told = await asyncio.to_thread(looked, server, key)
                assert (status, list(told)) == (401, ["error"])
            _, of_x = await asyncio.to_thread(looked, server, keys["x"])
            _, of_y = await asyncio.to_thread(looked, server, keys["y"])
            status, of_all = await asyncio.to_thread(looked, server, keys["all"])
            assert status == 200
    # Not the process, the tiers, or another tenant; each is in the operator's view.
    assert {one["name"] for one in of_x["tables"] if one["rows"]} == {"tenants"}
    for shown, name, clients in ((of_x, "x", 0), (of_y, "y", 1)):
        assert [row[0].split()[0] for row in texts(shown, "tenants")] == [name]
        assert len(texts(shown, "clients")) == clients
    assert len(texts(of_all, "tenants")) == 3
    assert len(texts(of_all, "clients")) == len(texts(of_all, "connections")) == 1
    assert texts(of_all, "tiers")[0][:2] == ["memory:1MiB", "8"]
    assert texts(of_all, "processes")[0][0] == of_all["name"]


def fetched_by(
    server: MetricsServer, path: str, authority: Authority, config: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Fetch a path by https, with a certificate; as :func:`looked`."""
    context = ssl.create_default_context(cafile=str(authority.root.cert_file))
    context.check_hostname = False
    context.load_cert_chain(config["tls_cert_file"], config["tls_key_file"])
    where = server.url.removesuffix("/metrics").replace("http:", "https:") + path
    try:
        with urllib.request.urlopen(where, timeout=60, context=context) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.loads(exc.read())


@pytest.mark.parametrize("tenant", [FAR, "Acme.Example"])
async def test_with_certificates_the_page_is_for_those_who_have_one(
    tenant: str, tmp_path: Path
) -> None:
    """By https on the same port, where metrics stay readable without."""
    authority = Authority(tmp_path)
    served = authority.config("spiffe://kvwire.test/store", NEAR)
    near, far = authority.config(NEAR), authority.config(tenant)
    stranger = authority.config("spiffe://kvwire.test/stranger")
    (tmp_path / "other").mkdir()
    foreign = issue(tmp_path / "other", NEAR).config
    async with (
        BlockStore.open(["memory:1MiB"], tenants=[f"x?identity={tenant}"]) as store,
        StoreServer(store, "127.0.0.1:0", **served) as stores,
    ):
        await store.put(A, CACHE, range(4), tenant="x")
        with MetricsServer(
            store, "127.0.0.1:0", stores.communicator, StoreOrders(stores)
        ) as server:

            def by(config: dict[str, Any]) -> Any:
                return asyncio.to_thread(
                    fetched_by, server, "/top.json", authority, config
                )

            status, of_all = await by(near)
            assert status == 200
            assert texts(of_all, "processes")[0][0] == of_all["name"]
            _, of_x = await by(far)
            assert {one["name"] for one in of_x["tables"] if one["rows"]} == {"tenants"}
            status, refused = await by(stranger)
            assert (status, list(refused)) == (401, ["error"])
            with pytest.raises(OSError, match=r"alert|EOF|reset|closed|pipe"):
                await by(foreign)
            # Without TLS, what everybody may read.
            status, refused = await asyncio.to_thread(looked, server)
            assert status == 401
            assert "connect by https" in refused["error"]
            status, _ = await asyncio.to_thread(fetched, server, "/metrics")
            assert status == 200
            status, health = await asyncio.to_thread(
                fetched_by, server, "/health", authority, near
            )
            assert (status, health["status"]) == (200, "ok")


async def test_the_files_of_the_page_are_for_everybody_and_hold_no_foreign_code() -> (
    None
):
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0") as served,
    ):
        with MetricsServer(store, "127.0.0.1:0") as server:
            status, _ = await asyncio.to_thread(fetched, server, "/top")
            assert status == 404  # nobody decides who may read it
        with MetricsServer(
            store, "127.0.0.1:0", served.communicator, StoreOrders(served)
        ) as server:
            for path in ("/top", "/top.css", "/top.js"):
                status, headers, body = await asyncio.to_thread(
                    server.get, path, {}, HttpClient("10.0.0.1")
                )
                assert status == 200
                policy = headers["content-security-policy"].split("; ")
                assert "default-src 'none'" in policy
                assert "script-src 'self'" in policy
                assert not any("unsafe" in rule for rule in policy)
                text = body.decode().replace("http://www.w3.org/2000/svg", "")
                assert not [
                    word
                    for word in ("http:", "https:", "//cdn", "innerHTML")
                    if word in text
                ]
            status, told = await asyncio.to_thread(looked, server)
            assert (status, told["name"]) == (200, served.communicator.name)
            # From another host, without a key.
            status, _, _ = await asyncio.to_thread(
                server.get, "/top.json", {}, HttpClient("10.0.0.1")
            )
            assert status == 401
