"""Benchmarks against another host: ``kvwire bench serve`` there, ``--peer`` here.

The left process connects to the peer over the measured transport, and the peer runs
only the right side of :func:`~kvwire.cli.bench.operations.operate` on that connection.
The peer runs one round at a time for all its clients, so that no two rounds are
measured at the same time. It bounds the memory of a work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from rich.console import Console

import kvwire
from kvwire import Address, Communicator, Connection
from kvwire.cli.bench.limits import BENCH_FRAGMENTS_MAX, BENCH_PEERS_MAX
from kvwire.cli.bench.operations import (
    PROFILE,
    ConnectionChannel,
    Ends,
    OpsWork,
    operate,
    operations,
)
from kvwire.cli.bench.pair import ANSWER_TIMEOUT_S, Contender
from kvwire.cli.bench.report import Loop, within
from kvwire.cli.bench.side import Bench, BenchError, run
from kvwire.config import Config
from kvwire.limits import MIB

logger: logging.Logger = logging.getLogger("kvwire")

# The time limit between two rounds: a contender waits for the others' rounds.
PATIENCE_S: Final = 600.0
# The time limit of one round, the same as on this host; others wait for their turn.
TURN_S: Final = ANSWER_TIMEOUT_S

Memory = Annotated[int, within(1, 65_536)]


def contender(name: str, peer: str, **options: object) -> Contender:
    """Make a contender whose right side is a peer; without a peer, a process here."""
    if not peer:
        return Contender(name, operations, options=options)
    Address.parse(peer)  # refuses an invalid address now
    return Contender(name, operations, alone=True, options={"peer": peer, **options})


class ServedBench(Bench):
    """The right side for one of several peers, with bounds on its work.

    Args:
        communicator: The communicator of ``connection`` and of other peers'
            connections.
        connection: The measured connection.
        memory_bytes_max: The most memory that a work may have.
    """

    def __init__(
        self, communicator: Communicator, connection: Connection, memory_bytes_max: int
    ) -> None:
        super().__init__({}, left=False)
        self.connection = connection
        self._ends = Ends([communicator], [connection])
        self._memory_bytes_max = memory_bytes_max
        self._deadline = asyncio.timeout(PATIENCE_S)
        self._turn: asyncio.Lock | None = None
        self._in_turn = False

    async def serve(self, turn: asyncio.Lock) -> None:
        """Run rounds until the peer disconnects or fails; each takes a ``turn``."""
        self._turn = turn
        self.meet(ConnectionChannel(self.connection))
        try:
            await self.play(lambda _: self._operate())
        finally:
            self._end_turn()
            await self.connection.close()

    async def run(self, program: Callable[[Bench], Awaitable[None]]) -> None:
        try:
            async with self._deadline:
                await super().run(program)
        except EOFError:  # the peer has gone
            raise
        except Exception as exc:
            logger.warning("bench: %s: %r", self.connection.peer, exc)
            raise

    async def _operate(self) -> None:
        await self.send(self.facts)
        await operate(self, self._ends)

    async def asked(self) -> Any:
        self._end_turn()
        self._end_after(PATIENCE_S)
        asked = await self.receive()
        self._deadline.reschedule(None)
        assert self._turn is not None
        await self._turn.acquire()
        self._in_turn = True
        self._end_after(TURN_S)
        return asked

    def admit(self, work: OpsWork) -> None:
        if work.layers * work.blocks > BENCH_FRAGMENTS_MAX:
            raise BenchError(
                f"too many fragments; at most {BENCH_FRAGMENTS_MAX} are allowed"
            )
        if work.memory_bytes > self._memory_bytes_max:
            raise BenchError(
                f"{work.memory_bytes / MIB:.0f} MiB of memory requested; this side "
                f"gives a peer at most {self._memory_bytes_max / MIB:.0f} MiB"
            )

    def _end_after(self, seconds: float) -> None:
        self._deadline.reschedule(asyncio.get_running_loop().time() + seconds)

    def _end_turn(self) -> None:
        if self._in_turn and self._turn is not None:
            self._in_turn = False
            self._turn.release()


B = TypeVar("B", bound=ServedBench)


async def attend(
    communicator: Communicator,
    made: Callable[[Communicator, Connection], B],
    ended: Callable[[B], None],
) -> None:
    """Serve connections until the communicator is closed.

    ``made`` makes a bench for each connection; ``ended`` is called with it after its
    peer has gone.
    """
    turn = asyncio.Lock()
    room = asyncio.Semaphore(BENCH_PEERS_MAX)

    async def serve(b: B) -> None:
        try:
            await b.serve(turn)
        except Exception:
            # The end of one peer is not that of the others.
            logger.exception("bench: %s", b.connection.peer)
        finally:
            room.release()
        ended(b)

    async with asyncio.TaskGroup() as serving:
        async for connection in communicator.connections():
            # At most BENCH_PEERS_MAX; the others wait.
            await room.acquire()
            serving.create_task(serve(made(communicator, connection)))


async def attend_at(
    address: Address,
    config: Config,
    profile: Mapping[str, str],
    made: Callable[[Communicator, Connection], B],
    ended: Callable[[B], None],
) -> None:
    """Listen and serve until Ctrl-C, and list the peers on the standard error."""
    show = Console(stderr=True, highlight=False, markup=False).print

    def over(b: B) -> None:
        show(f"served {b.connection.peer} over {b.connection.transport}")
        ended(b)

    whole = {**config.profile, **profile}
    async with kvwire.open(config, profile=whole) as communicator:
        show(f"listening on {await communicator.listen(address)}; Ctrl-C ends")
        await attend(communicator, made, over)


def serve(
    *,
    listen: str,
    config: Path | None = None,
    memory_mib: Memory = 1024,
    loop: Loop = "uvloop",
) -> None:
    """Serve benchmarks for other hosts, until Ctrl-C.

    Run `kvwire bench fragments --peer ADDRESS` there, or messages.

    Args:
        listen: The address to listen on; any address but loopback needs a key.
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
        memory_mib: MiB that each connection's work may use here.
        loop: The event loop of this side.
    """
    made = partial(ServedBench, memory_bytes_max=memory_mib * MIB)
    found = Config.load(config)
    address = Address.parse(listen)
    run(attend_at(address, found, PROFILE, made, lambda _: None), loop)
