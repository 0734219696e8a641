"""Benchmarks against another host: ``kvwire bench serve`` there, ``--peer`` here.

The side that measures makes one connection for each contender, over the transport that
is measured, and has the peer be the right side of it: calls are messages of that
connection, in the same JSON as between processes of one host. So there is no other
way in than a connection of kvwire, which both sides have authenticated, and nothing of
it is Python of the peer's.

Whoever serves does one call at a time, whosever it is: nobody's round is measured
beside another's. What a call may ask for is bounded. The profile of a communicator says
which version of these calls it serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from rich.console import Console

import kvwire
from kvwire import Address, Communicator, Connection, ConnectionClosed
from kvwire.cli.bench.limits import (
    BENCH_CALL_BYTES_MAX,
    BENCH_FRAGMENTS_MAX,
    BENCH_PEERS_MAX,
)
from kvwire.cli.bench.operations import OpsSide, OpsWork
from kvwire.cli.bench.pair import ANSWER_TIMEOUT_S, BenchError, Contender
from kvwire.cli.bench.report import Loop, within
from kvwire.cli.bench.side import answer, asked, require_same, run
from kvwire.config import Config
from kvwire.limits import MIB

logger: logging.Logger = logging.getLogger("kvwire")

# Another with every change of a call, and of what a work means.
PROFILE: Final = {"kvwire.bench": "1"}
# Of a call and its answer; those of works are smaller.
CALL_TAG: Final = 100
ANSWER_TAG: Final = 101
# Between two calls: a contender waits for the rounds of others.
PATIENCE_S: Final = 600.0
# One call, as long as a side of this host has for it: others wait for their turn.
TURN_S: Final = ANSWER_TIMEOUT_S

Memory = Annotated[int, within(1, 65_536)]


class PeerSide(OpsSide):
    """Plays the left side, and has a peer be the right one of its connection."""

    async def connect(self, address: Any) -> dict[str, Any]:
        facts = await super().connect([self.options["peer"]])
        if not serves(self.connection, PROFILE):
            raise BenchError("the peer is no `kvwire bench serve` of this version")
        return facts

    async def call(self, name: str, **arguments: Any) -> Any:
        """Have the peer do something, and wait for its answer."""
        await self.connection.send(CALL_TAG, asked(name, arguments))
        buffer = bytearray(BENCH_CALL_BYTES_MAX)
        count = await self.connection.recv(ANSWER_TAG, into=buffer)
        found = msgspec.json.decode(memoryview(buffer)[:count], type=dict[str, Any])
        if "answer" not in found:
            raise BenchError(f"the peer could not {found.get('error')}")
        return found["answer"]

    async def use(self, work: OpsWork, given: Any) -> None:
        await super().use(work, await self.call("prepare", work=work))

    async def fill(self, work: OpsWork) -> None:
        await super().fill(work)
        await self.call("fill", work=work)

    async def drive(self, work: OpsWork) -> Sequence[float]:
        serving = self.call("serve", work=work)
        seconds, _ = await asyncio.gather(super().drive(work), serving)
        return seconds

    async def digest(self, work: OpsWork) -> str:
        here = await super().digest(work)
        require_same(here, await self.call("digest", work=work))
        return here

    async def cpu(self) -> float:
        return await super().cpu() + float(await self.call("cpu"))


def contender(name: str, peer: str, **options: object) -> Contender:
    """Make a contender whose other side is a peer, or else a process of this host."""
    if not peer:
        return Contender(name, OpsSide, options=options)
    Address.parse(peer)  # or else it is refused now
    return Contender(name, PeerSide, alone=True, options={"peer": peer, **options})


def serves(connection: Connection, profile: Mapping[str, str]) -> bool:
    """Tell whether a peer serves this version of the calls."""
    return profile.items() <= dict(connection.peer.profile).items()


# --- who serves -----------------------------------------------------------------------


class ServedSide(OpsSide):
    """Plays the right side of one connection, of a communicator with others too."""

    calls: ClassVar[frozenset[str]] = frozenset(
        {"prepare", "fill", "serve", "digest", "cpu"}
    )

    def __init__(
        self, communicator: Communicator, connection: Connection, memory_bytes_max: int
    ) -> None:
        super().__init__({}, communicator, connection)
        self._memory_bytes_max = memory_bytes_max

    def check(self, work: OpsWork) -> None:
        """Refuse more than this side does for a peer."""
        if work.layers * work.blocks > BENCH_FRAGMENTS_MAX:
            raise BenchError(f"at most {BENCH_FRAGMENTS_MAX} fragments")
        if work.memory_bytes > self._memory_bytes_max:
            raise BenchError(
                f"{work.memory_bytes / MIB:.0f} MiB of memory are more than the "
                f"{self._memory_bytes_max / MIB:.0f} MiB that this side has for a peer"
            )


S = TypeVar("S", bound=ServedSide)


async def attend(
    communicator: Communicator,
    made: Callable[[Communicator, Connection], S],
    ended: Callable[[S], None],
) -> None:
    """Serve connections until the communicator is closed.

    ``ended`` is called with each side that ``made`` has returned, when it is over.
    """
    turn, room = asyncio.Lock(), asyncio.Semaphore(BENCH_PEERS_MAX)

    async def serve(side: S) -> None:
        try:
            await _serve(side, turn)
        except Exception:
            # The end of one peer is not that of the others.
            logger.exception("bench: %s", side.connection.peer)
        finally:
            room.release()
        ended(side)

    async with asyncio.TaskGroup() as serving:
        async for connection in communicator.connections():
            # At most BENCH_PEERS_MAX; the others wait.
            await room.acquire()
            serving.create_task(serve(made(communicator, connection)))


async def _serve(side: ServedSide, turn: asyncio.Lock) -> None:
    """Do what the peer asks, until it goes."""
    connection = side.connection
    answering = asyncio.ensure_future(_answer(side, turn))
    gone = asyncio.ensure_future(connection.wait_closed())
    try:
        # A transfer whose peer has gone may not end for long.
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        answering.cancel()
        gone.cancel()
        (why, _) = await asyncio.gather(answering, gone, return_exceptions=True)
        if not isinstance(why, asyncio.CancelledError | ConnectionClosed):
            logger.warning("bench: %s: %r", connection.peer, why)
        try:
            await connection.close()
        finally:
            await side.take_back()


async def _answer(side: ServedSide, turn: asyncio.Lock) -> None:
    buffer = bytearray(BENCH_CALL_BYTES_MAX)
    while True:
        async with asyncio.timeout(PATIENCE_S):
            count = await side.connection.recv(CALL_TAG, into=buffer)
        async with turn, asyncio.timeout(TURN_S):
            said = await answer(side, bytes(buffer[:count]), side.calls)
        await side.connection.send(ANSWER_TAG, said)


async def attend_at(
    address: Address,
    config: Config,
    profile: Mapping[str, str],
    made: Callable[[Communicator, Connection], S],
    ended: Callable[[S], None],
) -> None:
    """Listen and serve until Ctrl-C, and say on the standard error who was there."""
    say = Console(stderr=True, highlight=False, markup=False).print

    def over(side: S) -> None:
        say(f"served {side.connection.peer} over {side.connection.transport}")
        ended(side)

    whole = {**config.profile, **profile}
    async with kvwire.open(config, profile=whole) as communicator:
        say(f"listening on {await communicator.listen(address)}; Ctrl-C ends")
        await attend(communicator, made, over)


def serve(
    *,
    listen: str,
    config: Path | None = None,
    memory_mib: Memory = 1024,
    loop: Loop = "uvloop",
) -> None:
    """Let benchmarks of other hosts measure with this one, until Ctrl-C.

    There, `kvwire bench fragments --peer ADDRESS`, or messages.

    Args:
        listen: Where; other hosts than this one need a key.
        config: A kvwire.toml; KVWIRE_* environment variables count in any case.
        memory_mib: MiB that a work of each connection may have here.
        loop: The event loop of this side.
    """
    made = partial(ServedSide, memory_bytes_max=memory_mib * MIB)
    found, address = Config.load(config), Address.parse(listen)
    run(attend_at(address, found, PROFILE, made, lambda _: None), loop)
