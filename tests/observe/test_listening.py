"""HTTP on a thread: what it answers, and who does not keep others from their answer."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvwire import ListenError
from kvwire.observe.listening import HTTP_CONNECTIONS_MAX, HttpReply, HttpThread
from tests.support.waiting import PATIENCE_S

FINE = HttpReply.of(HTTPStatus.OK, "text/plain", b"fine")


def fine(_: str, __: Mapping[str, str]) -> HttpReply:
    return FINE


def place(server: HttpThread) -> tuple[str, int]:
    url = urlsplit(server.url)
    return str(url.hostname), url.port or 0


def asked(server: HttpThread, path: str = "/health") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.url + path, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


@pytest.mark.parametrize(
    ("method", "status", "body"),
    [
        ("GET", "200 OK", "fine"),
        ("HEAD", "200 OK", ""),
        ("POST", "501 Not Implemented", "only GET and HEAD are answered\n"),
    ],
)
def test_an_answer_is_as_http_says(method: str, status: str, body: str) -> None:
    """HEAD as well, on which probes of load balancers rely."""
    heads: list[tuple[str, str]] = []

    def get(path: str, headers: Mapping[str, str]) -> HttpReply:
        heads.append((path, headers["host"]))
        return FINE

    with (
        HttpThread("127.0.0.1:0", get) as server,
        socket.create_connection(place(server), PATIENCE_S) as client,
    ):
        client.sendall(f"{method} /a?b=c HTTP/1.1\r\nHost: x:1\r\n\r\n".encode())
        with client.makefile("rb") as answer:
            found = answer.read().decode()
    lines, _, rest = found.partition("\r\n\r\n")
    first, *rows = lines.split("\r\n")
    assert (first, rest) == (f"HTTP/1.1 {status}", body)
    assert {"Server: kvwire", "Connection: close"} < set(rows)
    if method != "POST":
        assert "Content-Length: 4" in rows
        assert heads == [("/a", "x:1")]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_all_interfaces_are_those_of_both_families(host: str) -> None:
    with HttpThread("[::]:0", fine) as server:
        port = urlsplit(server.url).port
        url = f"http://{host}:{port}/"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            assert answer.read() == b"fine"


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=where):
            HttpThread(where, fine)


def test_what_is_not_answered_is_in_the_log_and_no_news_to_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(path: str, _: Mapping[str, str]) -> HttpReply:
        raise ValueError(path)

    with HttpThread("127.0.0.1:0", fail) as server:
        # One that has gone before its answer is none.
        with socket.create_connection(place(server)) as gone:
            gone.sendall(b"GET / HT")
        assert asked(server, "/a") == (500, "see the server's log\n")
    (said,) = (one for one in caplog.records if one.name == "kvwire.store")
    assert said.getMessage() == "'/a' was not answered"
    assert said.exc_info
    assert isinstance(said.exc_info[1], ValueError)


# --- clients that are waited for ------------------------------------------------------


@contextlib.contextmanager
def many_silent(where: tuple[str, int], count: int, first: bytes) -> Iterator[None]:
    """Have so many clients at any time that send some bytes and then nothing."""
    over = threading.Event()

    def stay(_: int) -> None:
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(where) as client,
            ):
                client.settimeout(0.05)
                client.sendall(first)
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not client.recv(1):
                            break

    with ThreadPoolExecutor(count) as clients:
        done = clients.map(stay, range(count))
        try:
            yield
        finally:
            over.set()
            list(done)


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\n"])
@pytest.mark.parametrize("count", [20, HTTP_CONNECTIONS_MAX + 16])
def test_clients_that_say_nothing_do_not_keep_a_probe_from_its_answer(
    count: int, first: bytes
) -> None:
    """They come again at once when they are cut off, and all from one address."""
    with (
        HttpThread("127.0.0.1:0", fine) as server,
        many_silent(place(server), count, first),
    ):
        answers = [asked(server) for _ in range(20)]
    assert answers == [(200, "fine")] * 20


def test_the_longest_waiting_client_of_the_busiest_address_goes_first() -> None:
    with HttpThread("[::]:0", fine) as server, contextlib.ExitStack() as opened:
        port = urlsplit(server.url).port or 0

        def client(host: str) -> socket.socket:
            return opened.enter_context(
                socket.create_connection((host, port), PATIENCE_S)
            )

        other = client("::1")
        first, *_ = [client("127.0.0.1") for _ in range(HTTP_CONNECTIONS_MAX - 1)]
        client("127.0.0.1")
        assert first.recv(1) == b""
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert other.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("takes", [False, True])
def test_a_client_that_never_ends_its_request_is_cut_off(
    takes: bool,
) -> None:
    """However often something of it comes."""
    with HttpThread("127.0.0.1:0", fine, silent_s=0.2) as server:
        began = time.monotonic()
        with (
            socket.create_connection(place(server)) as slow,
            contextlib.suppress(ConnectionError),
        ):
            slow.settimeout(0.01)
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            while time.monotonic() - began < PATIENCE_S:
                with contextlib.suppress(TimeoutError):
                    slow.sendall(b"a: b\r\n"[:takes])
                    if slow.recv(1) == b"":
                        break
        assert time.monotonic() - began < PATIENCE_S
        assert asked(server) == (200, "fine")


def test_a_client_that_does_not_take_its_answer_is_cut_off() -> None:
    large = HttpReply.of(HTTPStatus.OK, "text/plain", bytes(1 << 24))
    with (
        HttpThread("127.0.0.1:0", lambda *_: large, silent_s=0.2) as server,
        socket.create_connection(place(server), PATIENCE_S) as slow,
    ):
        slow.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for _ in range(2):  # the first one may have come before the answer was made
            with socket.create_connection(place(server), PATIENCE_S) as silent:
                assert silent.recv(1) == b""
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := slow.recv(1 << 20):
                received += len(part)
    assert 0 < received < len(large.body)


# --- answers --------------------------------------------------------------------------


def test_an_answer_may_take_longer_than_a_request() -> None:
    """A page waits as long for a stopped process as a client may take to ask."""

    def slow(*_: Any) -> HttpReply:
        with socket.create_connection(place(server), PATIENCE_S) as silent:
            assert silent.recv(1) == b""  # after the time that a client has
        return FINE

    with HttpThread("127.0.0.1:0", slow, silent_s=0.1) as server:
        assert asked(server, "/") == (200, "fine")


def test_health_has_threads_of_its_own_and_other_requests_have_a_limit() -> None:
    going_on = threading.Event()

    def get(path: str, _: Mapping[str, str]) -> HttpReply:
        assert path == "/health" or going_on.wait(PATIENCE_S)
        return FINE

    with HttpThread("127.0.0.1:0", get) as server, ThreadPoolExecutor(32) as clients:
        waiting = [clients.submit(asked, server, "/metrics") for _ in range(32)]
        try:
            assert asked(server) == (200, "fine")
        finally:
            going_on.set()
        statuses = [one.result()[0] for one in waiting]
    assert set(statuses) == {200, 503}
    assert statuses.count(503) <= 16
