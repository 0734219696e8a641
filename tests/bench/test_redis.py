"""redis beside a store server: the real one where it is, and one that lies."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvwire.cli.bench.pair import BenchError, Contender
from kvwire.cli.bench.side import HOST
from kvwire.cli.bench.store import (
    GET,
    LOOKUPS,
    MATCH,
    ONE,
    PUT,
    StoreWork,
    store,
    work_of,
)
from kvwire.limits import MIB
from tests.bench import redis
from tests.bench.redis import PROGRAM, RedisSide
from tests.bench.store import beside
from tests.cli.bench.test_store import choice

pytestmark = pytest.mark.timeout(120)


def work(verb: str) -> StoreWork:
    return work_of("any", verb, "small", 4 * MIB)


def test_it_does_every_work_and_ends() -> None:
    absent = redis.missing()
    if absent is not None:
        pytest.skip(f"{absent.name} is not installed: {absent.remedy}")
    with Contender("redis", RedisSide, alone=True).start() as pair:
        assert pair.facts["redis"]
        for verb in (PUT, GET, ONE, MATCH, PUT):
            pair.check(work(verb))
            sample = pair.round(work(verb))
            assert min(sample.values) > 0
            assert sum(sample.cpu_s) > 0
            expected = {ONE: work(ONE).count, MATCH: LOOKUPS}.get(verb, 1)
            assert len(sample.values) == expected


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / PROGRAM
    program.write_text("#!/bin/sh\necho no room\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BenchError, match="redis-server ended: no room"):
        Contender("redis", RedisSide, alone=True).start()


def test_where_it_is_not_installed_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = choice(tmp_path, tiers=["server"])
    found = store(chosen, beside(chosen))
    assert [(m.name, m.remedy) for m in found.missing] == [(PROGRAM, redis.INSTALL)]
    names = {one.name for case in found.cases for one in case.contenders}
    assert "redis" not in names


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server of one connection that answers this to whatever it is asked."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(answer)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"$-1\r\n-ERR\r\n", r"redis answers b'\$-1.* instead of b'\$65536"),
        (b"$65", "redis has ended the connection"),
    ],
)
async def test_a_block_that_is_not_there_is_an_error(answer: bytes, said: str) -> None:
    with answering(answer) as port:
        peer = RedisSide({})
        peer._socket = socket.create_connection((HOST, port))
        try:
            done = work(ONE)
            with pytest.raises((RuntimeError, ConnectionError), match=said):
                await peer.get_one(done, peer.flat(done), 0)
        finally:
            await peer.close()
