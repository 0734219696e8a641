"""The ceilings of what operations cost, in calls of Python and in frames.

Both sides are on one loop, so nothing depends on whose turn it is on a CPU, and the
counts of two runs are the same but for a wake-up more or less. What the loop itself
does is not counted: it is another one in each engine.
"""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import secrets
import selectors
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import kvwire
from kvwire.cli.bench import side
from kvwire.cli.bench.fragments import LEFT, RIGHT, FragmentWork, Pool
from kvwire.cli.bench.side import End, mark_all, over, require_complete, serve_store
from kvwire.limits import KIB, MIB
from kvwire.proto.framing import Framing
from tests.support.pairs import Pair, connected

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="other Pythons inline other calls"
    ),
]

# Operations that are counted: enough that what comes seldom, such as CREDIT, has its
# share. Connections are dearer than what is done on them.
COUNT: Final = 40
FRESH: Final = 10
_WARM_UP: Final = 3
# Ends that the other side has ready before they are asked for.
_AHEAD: Final = 2
_DATA: Final = 1
_BACK: Final = 2
# Whose calls are not counted: those of this test, and of a loop in Python.
_OUTSIDE: Final = (
    str(Path(__file__).parent),
    str(Path(side.__file__)),
    str(Path(asyncio.__file__).parent),
    str(Path(selectors.__file__)),
)


class Meter:
    """Counts calls of Python functions, and frames on the wire, of both sides."""

    def __init__(self) -> None:
        self.operations = self.frames = 0
        self._profile = cProfile.Profile()

    @contextmanager
    def counting(self, operations: int) -> Iterator[None]:
        """Count what happens within the block as so many operations."""
        self.operations += operations
        with pytest.MonkeyPatch.context() as patch:
            for name in ("control", "payload"):
                patch.setattr(Framing, name, self._counted(getattr(Framing, name)))
            self._profile.enable()
            try:
                yield
            finally:
                self._profile.disable()

    @property
    def calls(self) -> int:
        """Of functions of Python; a generator that goes on is one more."""
        return sum(
            entry.callcount
            for entry in self._profile.getstats()
            if not isinstance(entry.code, str)
            and not entry.code.co_filename.startswith(_OUTSIDE)
        )

    def _counted(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.frames += 1
            return send(*given, **named)

        return counted


async def measured(meter: Meter, once: Callable[[], Awaitable[object]]) -> None:
    """Do it a few times, and count the next."""
    for _ in range(_WARM_UP):
        await once()
    with meter.counting(COUNT):
        for _ in range(COUNT):
            await once()


# --- operations -----------------------------------------------------------------------


def pool(nbytes: int, layers: int, blocks: int, which: int) -> Pool:
    fragments = FragmentWork(
        verb="push",
        nbytes=nbytes // (layers * blocks),
        count=layers * blocks,
        layers=layers,
    )
    return Pool(np.ones(fragments.pool_bytes, np.uint8), fragments, which)


async def transfers(
    pair: Pair,
    meter: Meter,
    *,
    verb: str,
    nbytes: int,
    layers: int = 16,
    blocks: int = 1,
    fresh: bool = False,
) -> None:
    near, far = (pool(nbytes, layers, blocks, who) for who in (LEFT, RIGHT))
    asked, offered = itertools.count(), itertools.count()

    async def once(connection: kvwire.Connection = pair.left) -> None:
        ask = connection.pull if verb == "pull" else connection.push
        end = ask(next(asked), near.cache, near.blocks)
        await over(mark_all(end) if isinstance(end, kvwire.Outgoing) else end)

    def offer() -> End:
        if verb == "pull":
            return mark_all(pair.far.publish(next(offered), far.cache, far.blocks))
        return pair.far.expect(next(offered), far.cache, far.blocks)

    async def serve(count: int) -> None:
        ends = [offer() for _ in range(_AHEAD)]
        for number in range(count):
            await over(ends.pop(0))
            if number + _AHEAD < count:
                ends.append(offer())

    serving = asyncio.create_task(serve(_WARM_UP + (FRESH if fresh else COUNT)))
    if fresh:
        for number in range(_WARM_UP + FRESH):
            connection = await pair.near.connect(pair.address)
            with meter.counting(1) if number >= _WARM_UP else nullcontext():
                await once(connection)
            await connection.close()
    else:
        await measured(meter, once)
    await serving


async def layers(pair: Pair, meter: Meter, *, nbytes: int, layers: int) -> None:
    near, far = (pool(layers * nbytes, layers, 1, who) for who in (LEFT, RIGHT))
    incoming = pair.far.expect("it", far.cache, far.blocks)
    out = pair.left.push("it", near.cache, near.blocks, group_bytes=1)
    out.ready(0)
    await incoming.layer(0)
    with meter.counting(layers - 1):
        for layer in range(1, layers):
            out.ready(layer)
            await incoming.layer(layer)
    out.finish()
    await over(out)
    await over(incoming)


async def messages(
    pair: Pair, meter: Meter, *, nbytes: int, answered: bool = False
) -> None:
    near, far = bytearray(nbytes), bytearray(nbytes)

    async def answer() -> None:
        for _ in range(_WARM_UP + COUNT):
            await pair.right.recv(_DATA, far)
            if answered:
                await pair.right.send(_BACK, far)

    async def once() -> None:
        await pair.left.send(_DATA, near)
        if answered:
            await pair.left.recv(_BACK, near)

    answering = asyncio.create_task(answer())
    await measured(meter, once)
    await answering


async def memory(pair: Pair, meter: Meter, *, verb: str, nbytes: int) -> None:
    near, far = (np.ones(nbytes, np.uint8) for _ in range(2))
    grant = pair.far.register(far, access="readwrite").grant(pair.right)
    if verb == "put":
        await measured(meter, lambda: pair.left.put(near, grant))
    else:
        await measured(meter, lambda: pair.left.get(grant, into=near))


async def stored(pair: Pair, meter: Meter, *, verb: str, nbytes: int) -> None:
    """A block into a store server or out of it, in whose front memory it is not."""
    del pair
    front, got = 4 * nbytes, 16
    cache, hashes = pool(nbytes, 16, 1, LEFT), list[bytes]()
    async with AsyncExitStack() as stack:
        tier = f"memory:{256 * nbytes}B?slab={got * nbytes}B"
        address = await serve_store(stack, tier)
        tiers = [f"memory:{front}B?slab={front}B", f"kvwire://{address}"]
        store = await stack.enter_async_context(kvwire.BlockStore.open(tiers))

        async def put() -> None:
            hashes.append(secrets.token_bytes(32))
            require_complete(await store.put(hashes[-1:], cache.cache, cache.blocks))
            await store.flush()

        async def get() -> None:
            hashes.append(hashes.pop(0))
            require_complete(await store.get(hashes[-1:], cache.cache, cache.blocks))

        for _ in range(got):
            await put()
        await measured(meter, put if verb == "put" else get)


# --- ceilings -------------------------------------------------------------------------

Operation = Callable[[Pair, Meter], Awaitable[None]]

# Python calls and frames of an operation, both sides, over tcp. What makes one dearer
# is named here, with its reason in the commit; what makes it cheaper lowers its line.
# The last word of a transfer has a frame of its own where the next transfer comes late.
CEILINGS: Final[dict[str, tuple[Operation, int, int]]] = {
    "first pull, 64 KiB, 16 layers": (
        partial(transfers, verb="pull", nbytes=64 * KIB, fresh=True),
        *(595, 4),
    ),
    "pull, 64 KiB, 16 layers": (
        partial(transfers, verb="pull", nbytes=64 * KIB),
        *(700, 5),
    ),
    "pull, 256 KiB, 16 layers": (
        partial(transfers, verb="pull", nbytes=256 * KIB, blocks=2),
        *(695, 5),
    ),
    "push, 256 KiB, 16 layers": (
        partial(transfers, verb="push", nbytes=256 * KIB, blocks=2),
        *(705, 5),
    ),
    "push, 4 MiB, 32 layers": (
        partial(transfers, verb="push", nbytes=4 * MIB, layers=32, blocks=2),
        *(1130, 9),
    ),
    "ready of a layer, 64 KiB": (partial(layers, nbytes=64 * KIB, layers=80), 250, 2),
    "round trip, 64 B": (partial(messages, nbytes=64, answered=True), 175, 2),
    "send, 64 KiB": (partial(messages, nbytes=64 * KIB), 262, 3),
    "send, 1 MiB": (partial(messages, nbytes=MIB), 257, 3),
    "put, 64 KiB": (partial(memory, verb="put", nbytes=64 * KIB), 230, 3),
    "get, 64 KiB": (partial(memory, verb="get", nbytes=64 * KIB), 197, 2),
    "store put, 64 KiB": (partial(stored, verb="put", nbytes=64 * KIB), 1030, 8),
    "store get, 64 KiB": (partial(stored, verb="get", nbytes=64 * KIB), 695, 4),
    "store put, 1 MiB": (partial(stored, verb="put", nbytes=MIB), 1380, 11),
    "store get, 1 MiB": (partial(stored, verb="get", nbytes=MIB), 1035, 7),
}
# A wake-up more or less; a ping.
_MARGIN: Final = 1.03


@pytest.mark.parametrize("name", CEILINGS)
def test_an_operation_is_no_dearer_than_it_was(name: str) -> None:
    operation, calls, frames = CEILINGS[name]
    meter = Meter()

    async def run() -> None:
        async with connected(require=["tcp"]) as pair:
            await operation(pair, meter)

    asyncio.run(run())
    assert meter.calls / meter.operations <= calls * _MARGIN, f"{name}: Python calls"
    assert meter.frames / meter.operations <= frames * _MARGIN, f"{name}: frames"
