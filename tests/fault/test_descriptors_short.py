"""No descriptors left: what needs one fails with an error of the tree, others go on.

And when there are some again everything works, as if nothing had been.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvwire
from tests.support.caches import Memory, same
from tests.support.pairs import connected
from tests.support.runs import python
from tests.support.tree import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="/proc/self/fd is Linux's"
)
LIST, DEST = [3, 1, 4], [10, 11, 12]
LARGE = bytes(1 << 20)


@contextmanager
def descriptors(left: int) -> Iterator[None]:
    """Leave this process so many descriptors that it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 50, hard))
    try:
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            for fd in taken[len(taken) - left :]:
                os.close(fd)
            del taken[len(taken) - left :]
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_is_connected_goes_on() -> None:
    async with connected(forbid=("local", "ucx")) as pair:
        source, target = Memory(), Memory()
        source.stamp(LIST)
        with descriptors(0):
            with pytest.raises(kvwire.ConnectError, match="Too many open files"):
                await pair.near.connect(pair.address)
            with pytest.raises(kvwire.ListenError, match="Too many open files"):
                await pair.near.listen("127.0.0.1:0")
            received = pair.right.recv(1)
            await asyncio.gather(pair.left.send(1, LARGE), received)
            out = pair.far.publish("t", source.cache, LIST)
            inc = pair.left.pull("t", target.cache, DEST)
            out.ready()
            out.finish()
            assert (await inc).complete
        assert received.result() == LARGE
        assert same(source, LIST, target, DEST)
        await (await pair.near.connect(pair.address)).close()


async def test_a_listener_accepts_again() -> None:
    """A client that it had no descriptor for waits for its own time, and no longer."""
    async with connected(forbid=("local", "ucx")) as pair:
        with descriptors(1), pytest.raises(kvwire.HandshakeTimeout):
            await pair.near.connect(pair.address, timeout_s=0.3)
        again = await pair.near.connect(pair.address)
        await again.send(1, b"here")
        async for there in pair.far.connections():
            if not there.closed:
                assert await there.recv(1) == b"here"
                break


@pytest.mark.parametrize("tier", ["memory:1MiB", "disk:{path}?size=1MiB"])
def test_a_store_says_what_to_do(tier: str, tmp_path: Path) -> None:
    """In a process that has opened none before."""
    program = """
import asyncio, kvwire, kvwire_store
from tests.fault.test_descriptors_short import descriptors

async def main():
    with descriptors({left}):
        try:
            async with kvwire_store.BlockStore.open(["memory:1MiB", *{tiers}]):
                print("opened")
        except kvwire.UsageError as exc:
            print("refused", "ulimit -n" in str(exc))
    async with kvwire_store.BlockStore.open(["memory:1MiB", *{tiers}]):
        print("opened")

asyncio.run(main())
"""
    below = [] if tier.startswith("memory") else [tier.format(path=tmp_path)]
    said = set()
    for left in (0, 2, 8):
        done = python("-c", program.format(left=left, tiers=below), cwd=ROOT)
        said.add(done.stdout)
        assert done.stdout.split()[-1:] == ["opened"], (left, done.stderr)
    assert said == {"refused True\nopened\n", "opened\nopened\n"}


def test_backends_are_found_when_there_are_descriptors_again() -> None:
    """An empty answer about what is installed is not remembered."""
    program = """
import asyncio, kvwire
from tests.fault.test_descriptors_short import descriptors

async def main():
    async with kvwire.open(name="a") as a, kvwire.open(name="b") as b:
        with descriptors({left}):
            try:
                await a.connect("127.0.0.1:1")
            except (kvwire.BackendUnavailable, kvwire.ConnectError) as exc:
                print("refused", flush=True)
        where = await b.listen("127.0.0.1:0")
        await (await a.connect(where)).close()
        print("connected")

asyncio.run(main())
"""
    for left in range(3):
        done = python("-c", program.format(left=left), cwd=ROOT)
        assert done.stdout.split() == ["refused", "connected"], (left, done.stderr)
