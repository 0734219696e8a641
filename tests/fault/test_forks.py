"""Children that are forked from a process with kvwire: what they keep, how they end.

Each case is a program of its own. It forks, and what it had is looked at from here,
also after it was killed while its child lives on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvwire
from kvwire_store import BlockStore
from tests.support.cases import each

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system has no fork"
)
TIMEOUT_S = 300
# How quickly a peer knows of a reset; a peer that is silent takes 6.5 s.
RESET_S = 4.0

HOLDER = """
import asyncio, multiprocessing, os, signal, socket, sys, time, warnings, uvloop
import kvwire
from kvwire_store import BlockStore, StoreServer
from kvwire_store.metrics_server import MetricsServer
warnings.simplefilter("ignore")  # of forking with threads, which is the point

def helper():
    signal.pause()

def forked():
    child = os.fork()
    if not child:
        helper()
    return child

def by_multiprocessing():
    started = multiprocessing.get_context("fork").Process(target=helper)
    started.start()
    return started.pid

async def main(how, folder):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        metrics = sock.getsockname()[1]
    async with (
        BlockStore.open(["memory:1MiB", f"disk:{folder}/kv?size=2MiB"]) as store,
        kvwire.open(name="holder", inspect=f"{folder}/run") as comm,
    ):
        with MetricsServer(store, f"127.0.0.1:{metrics}"):
            address = await comm.listen("127.0.0.1:0")
            print(address, metrics, flush=True)
            connection = await comm.accept()
            await connection.recv(1)
            print(how(), flush=True)
            await asyncio.sleep(3600)
"""


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER + textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.mark.parametrize("how", ["forked", "by_multiprocessing"])
async def test_a_child_keeps_nothing_of_a_parent_that_was_killed(
    how: str, tmp_path: Path
) -> None:
    disk = f"disk:{tmp_path}/kv?size=2MiB"
    program = f"asyncio.run(main({how}, {str(tmp_path)!r}))"
    async with kvwire.open(name="peer") as peer:
        with running(program) as process:
            address, metrics = _line(process)
            connection = await peer.connect(address)
            await connection.send(1, b"fork now")
            child = int(_line(process)[0])
            try:
                # What the child has let go of, the parent still has.
                with pytest.raises(kvwire.UsageError, match=rf"process {process.pid} "):
                    await BlockStore.open(["memory:1MiB", disk])
                assert not connection.closed
                process.kill()
                process.wait()
                os.kill(child, 0)
                async with asyncio.timeout(RESET_S):
                    await connection.wait_closed()
                await peer.listen(address)
                with socket.create_server(("127.0.0.1", int(metrics))):
                    pass
                async with BlockStore.open(["memory:1MiB", disk]):
                    pass
                for path in (tmp_path / "run").iterdir():
                    with (
                        socket.socket(socket.AF_UNIX) as asking,
                        pytest.raises(ConnectionRefusedError),
                    ):
                        asking.connect(str(path))
            finally:
                os.kill(child, signal.SIGKILL)


ENGINES = """
with kvwire.Engine(name="a") as a, kvwire.Engine(name="b") as b:
    c = b.connect("localhost:%d" % a.listen("127.0.0.1:0").port)
    taken = a.run(a.communicator.accept())

    async def as_libraries_do():
        _, writer = await asyncio.open_connection("localhost", other.getsockname()[1])
        writer.close()
        await writer.wait_closed()

    with socket.create_server(("127.0.0.1", 0)) as other:
        a.run(as_libraries_do(), timeout_s=10)
    ends = []
    for _ in range(5):
        child = os.fork()
        if not child:
            END
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    async def send():
        await c.send(1, b"after the forks")

    async def receive():
        return await taken.recv(1)

    b.run(send(), timeout_s=10)
    print(ends, a.run(receive(), timeout_s=10).decode())
"""
LOOPS = """
async def main():
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0"),
        kvwire.open(name="a") as a,
        await kvwire.open(name="b") as b,
        await b.connect(await a.listen("127.0.0.1:0")) as c,
        await a.accept() as taken,
    ):
        ends = []
        for _ in range(5):
            child = os.fork()
            if not child:
                END
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        await c.send(1, b"after the forks")
        print(ends, bytes(await taken.recv(1)).decode())

NEW_LOOP
"""


def _check_ends_well(program: str) -> None:
    with running(program) as process:
        said, complaints = process.communicate(timeout=TIMEOUT_S)
    assert (said.strip(), complaints) == (str([0] * 5) + " after the forks", "")


@each(
    "end",
    {
        "sys.exit": "sys.exit(0)",
        "os._exit": "os._exit(0)",
        "an error": "raise SystemExit(0) from ValueError()",
        "collected": "import gc; a = b = c = taken = None; gc.collect(); sys.exit(0)",
    },
)
def test_a_child_of_engines_ends_well(end: str) -> None:
    """In the way of its kind, and nothing of its parent's is harmed."""
    _check_ends_well(ENGINES.replace("END", end))


@pytest.mark.parametrize("run", ["asyncio.run", "uvloop.run"])
@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_child_of_coroutines_ends_well(end: str, run: str) -> None:
    """Though the blocks of its parent are left there too."""
    program = LOOPS.replace("END", end).replace("NEW_LOOP", f"{run}(main())")
    _check_ends_well(program)
