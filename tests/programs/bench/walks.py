"""How far one public call walks through kvwire: calls, files, moves between files.

Both communicators live in this process, on one loop, over TCP. Only Python functions
of kvwire and of its backends count; a coroutine that goes on counts once more. A move
is a call in another file than the call before it. Each walk is taken several times
after a first one, and the shortest is shown, since a ping may come between.

    python -m tests.programs.bench.walks             a table
    python -m tests.programs.bench.walks --json      the same for programs
    python -m tests.programs.bench.walks --show "mark to socket"     each of its calls
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import msgspec
import numpy as np

import kvwire
import kvwire_tcp

_ROOTS: Final = (
    f"{Path(kvwire.__file__).parent}/",
    f"{Path(kvwire_tcp.__file__).parent.parent}/kvwire_",
)
# What gives bytes to a socket.
_SOCKET_CALLS: Final = {"send", "sendmsg", "writev"}
_SPEC: Final = kvwire.KVSpec(
    layers=16, kv_heads=8, head_dim=2, block_tokens=16, dtype="float16"
)
_BLOCKS: Final = 4
_SOURCE: Final = [0, 1]
_TARGET: Final = [2, 3]
_TIMES: Final = 6
_TAG: Final = 1
_PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk; ``steps`` names each call by its file and function."""

    calls: int
    files: int
    moves: int
    steps: list[str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Alive:
    """How many objects of kvwire's classes one thing keeps alive, on both sides."""

    objects: int
    classes: int
    names: dict[str, int] = field(repr=False)


class Walked:
    """Records kvwire's calls in this thread, up to the first system call if asked."""

    def __init__(self, *, to_socket: bool = False) -> None:
        self._to_socket = to_socket
        self._steps: list[tuple[str, str]] = []
        self.arrived = False

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def result(self) -> Walk:
        files = [file for file, _ in self._steps]
        return Walk(
            calls=len(files),
            files=len(set(files)),
            moves=sum(
                one != other for one, other in itertools.pairwise([None, *files])
            ),
            steps=[f"{file} {name}" for file, name in self._steps],
        )

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.arrived:
            return
        if event == "c_call":
            self.arrived = self._to_socket and argument.__name__ in _SOCKET_CALLS
        elif event == "call" and frame.f_code.co_filename.startswith(_ROOTS):
            path = Path(frame.f_code.co_filename)
            file = "/".join(path.parts[-2:])
            self._steps.append((file, frame.f_code.co_qualname))


# Transports whose libraries a machine may have: then choosing takes more calls.
_OPTIONAL: Final = ("nccl", "nixl", "ucx")


class Both:
    """Two communicators and a warm connection between them."""

    def __init__(self, near: kvwire.Communicator, far: kvwire.Communicator) -> None:
        self._near = near
        self._far = far
        self._names = itertools.count()
        # The plan of a pair of caches is made once.
        self._caches = _cache(), _cache()
        self.address: kvwire.Address
        self.left: kvwire.Connection
        self.right: kvwire.Connection

    async def connect(self) -> tuple[kvwire.Connection, kvwire.Connection]:
        left = await self._near.connect(self.address)
        return left, await self._far.accept()

    async def connect_walk(self) -> Walked:
        with Walked() as walked:
            await self.connect()
        return walked

    async def send_walk(self, nbytes: int) -> Walked:
        """The call itself; the receiver has posted its memory long before."""
        received = self.right.recv(_TAG, bytearray(nbytes))
        await _turns()
        with Walked() as walked:
            sent = self.left.send(_TAG, bytes(nbytes))
        await sent
        await received
        return walked

    async def pull_walk(self) -> Walked:
        name = next(self._names)
        source, target = self._caches
        out = self._far.publish(name, source, _SOURCE)
        await _turns()
        with Walked(to_socket=True) as walked:
            incoming = self.left.pull(name, target, _TARGET)
        assert walked.arrived, "OPEN was not sent by the call"
        out.abort()
        await out
        await incoming
        return walked

    @asynccontextmanager
    async def transfer(self) -> AsyncIterator[tuple[kvwire.Outgoing, kvwire.Incoming]]:
        """Open one and walk its first layer, so that what remains is steady."""
        name = next(self._names)
        out = self._far.publish(name, _cache(), _SOURCE)
        incoming = self.left.pull(name, _cache(), _TARGET)
        await _until(lambda: incoming.met)
        out.ready(layers=0)
        await incoming.layer(0)
        await _turns()
        yield out, incoming
        out.abort()
        await out
        await incoming
        await incoming.drained()
        await out.drained()

    async def mark_walk(self) -> Walked:
        async with self.transfer() as (out, incoming):
            with Walked(to_socket=True) as walked:
                out.ready(layers=1)
                await _until(lambda: walked.arrived)
            await incoming.layer(1)
            return walked

    async def layer_walk(self) -> Walked:
        async with self.transfer() as (out, incoming):
            with Walked() as walked:
                out.ready(layers=1)
                await incoming.layer(1)
            return walked

    async def alive_of_a_transfer(self) -> Alive:
        """With its caches, after a layer."""
        async with self.transfer() as kept:
            before = _objects()
            async with self.transfer() as more:
                return _alive(before, keep=(kept, more))

    async def alive_of_a_connection(self) -> Alive:
        kept = await self.connect()
        await _turns()
        before = _objects()
        more = await self.connect()
        await _turns()
        return _alive(before, keep=(kept, more))


@asynccontextmanager
async def both() -> AsyncIterator[Both]:
    """Two communicators whose every path has been walked once."""
    async with (
        kvwire.open(name="near", prefer=("tcp",), forbid=_OPTIONAL) as near,
        kvwire.open(name="far", prefer=("tcp",), forbid=_OPTIONAL) as far,
    ):
        made = Both(near, far)
        made.address = await far.listen("tcp://127.0.0.1:0")
        made.left, made.right = await made.connect()
        yield made


WALKS: Final[dict[str, Callable[[Both], Awaitable[Walked]]]] = {
    "send 100 B": lambda pair: pair.send_walk(100),
    "send 4 MB": lambda pair: pair.send_walk(4_000_000),
    "pull to OPEN on the link": Both.pull_walk,
    "mark to socket": Both.mark_walk,
    "ready to layer": Both.layer_walk,
    "connect": Both.connect_walk,
}
ALIVE: Final[dict[str, Callable[[Both], Awaitable[Alive]]]] = {
    "open transfer": Both.alive_of_a_transfer,
    "connection": Both.alive_of_a_connection,
}


async def walk(name: str) -> Walk:
    """The shortest of several warm walks."""
    async with asyncio.timeout(_PATIENCE_S), both() as pair:
        found = [(await WALKS[name](pair)).result() for _ in range(_TIMES)]
    return min(found[1:], key=lambda one: one.calls)


async def alive(name: str) -> Alive:
    """The fewest of several counts."""
    async with asyncio.timeout(_PATIENCE_S), both() as pair:
        found = [await ALIVE[name](pair) for _ in range(_TIMES)]
    return min(found[1:], key=lambda one: one.objects)


def _cache() -> kvwire.PagedCache:
    shape = (
        _BLOCKS,
        _SPEC.components,
        _SPEC.block_tokens,
        _SPEC.kv_heads,
        _SPEC.head_dim,
    )
    return kvwire.PagedCache(
        _SPEC, [np.zeros(shape, np.float16) for _ in range(_SPEC.layers)]
    )


async def _turns() -> None:
    """Until a loop with nothing to wait for would be idle."""
    for _ in range(50):
        await asyncio.sleep(0)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0)


def _objects() -> Counter[str]:
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if kind.__module__.startswith("kvwire")
    )


def _alive(before: Counter[str], keep: object) -> Alive:
    """What is alive beside that; ``keep`` is alive until it was counted."""
    more = _objects() - before
    assert keep is not None
    return Alive(more.total(), len(more), dict(more.most_common()))


async def _main(arguments: argparse.Namespace) -> None:
    if arguments.show in ALIVE:
        names = (await alive(arguments.show)).names
        print("\n".join(f"{number:4}  {name}" for name, number in names.items()))
        return
    if arguments.show:
        print("\n".join((await walk(arguments.show)).steps))
        return
    walks = {name: await walk(name) for name in WALKS}
    lives = {name: await alive(name) for name in ALIVE}
    if arguments.json:
        report = {
            "walks": {n: (w.calls, w.files, w.moves) for n, w in walks.items()},
            "alive": {n: (a.objects, a.classes) for n, a in lives.items()},
        }
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return
    print(f"{'walk':28}calls  files  moves")
    for name, one in walks.items():
        print(f"{name:28}{one.calls:5}  {one.files:5}  {one.moves:5}")
    print(f"\n{'alive':28}objects  classes")
    for name, life in lives.items():
        print(f"{name:28}{life.objects:7}  {life.classes:7}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="walks of public calls")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", choices=[*WALKS, *ALIVE], help="each step of one")
    asyncio.run(_main(parser.parse_args()))
