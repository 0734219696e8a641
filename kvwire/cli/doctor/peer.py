"""Two doctors: one lends memory and answers, the other one measures with it.

``kvwire doctor --listen`` serves one prober at a time: two would measure each other. A
prober chooses nothing. It is greeted with grants for memory that this side has filled,
one for each size of fragments. It may ask for three things: an echo, a digest of all of
that memory, and that its report is shown. One that asks nothing for a while is shown
out. The profile says that this is a doctor, so that nobody asks a server that is none.

``kvwire doctor --peer`` measures: round trip, put and get, and every byte. Small and
bounded: it says whether a path is in order, not which of two is faster; that is what
``kvwire bench`` is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire import Communicator, Connection, ConnectionClosed, Grant, KVWireError
from kvwire.cli.doctor.examination import Examination
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, MIB
from kvwire.types import Address, Candidate

logger: logging.Logger = logging.getLogger("kvwire")

PROFILE_KEY: Final = "kvwire.doctor"
PROFILE: Final = {PROFILE_KEY: "2"}
GREETING_TAG: Final = 1
ASK_TAG: Final = 2
ANSWER_TAG: Final = 3
# The first byte of what is asked.
ECHO: Final = b"e"
DIGEST: Final = b"d"
REPORT: Final = b"r"
MESSAGE_BYTES_MAX: Final = 1 * MIB

# The bytes of one pass, each way: much beside what starting costs, and little beside
# the memory of any host.
PASS_BYTES: Final = 64 * MIB
# Fragments of one block and layer: small models, large ones, cross-layer blocks.
FRAGMENT_BYTES: Final = (4 * KIB, 32 * KIB, 1 * MIB)
# What the memory of an attendant is filled from.
SEED: Final = 1
# A prober that is alive asks again as soon as it has measured.
PATIENCE_S: Final = 120.0
# The median of these; on a slow wire fewer, so that nothing takes minutes.
_PASSES: Final = 3
_BUDGET_S: Final = 1.0
_ECHOES: Final = 200
# Of an echo; a digest is shorter.
_ANSWER_BYTES_MAX: Final = 64
# One transport, all sizes: a wire of 100 Mbit/s needs most of it.
TRIAL_TIMEOUT_S: Final = 180.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Tells how fast a put to the peer, or a get, moved fragments of one size."""

    verb: Literal["put", "get"]
    # Contiguous, at both ends.
    fragment_bytes: int
    # Of the median of so many passes.
    bytes_per_s: float
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Holds one connection, and what it did."""

    # The transport that was required; "" for the configured choice.
    asked: str = ""
    # Every transport that was considered, and why it was taken or not.
    candidates: tuple[Candidate, ...] = ()
    # Median time of 64 B there and back; None if not measured.
    round_trip_s: float | None = None
    rates: tuple[Rate, ...] = ()
    # What arrived otherwise than it was sent.
    damaged: tuple[str, ...] = ()
    # Why there is no more; "" if all was measured.
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """Two hosts and what went on between them."""

    # Where the attendant listens.
    address: str
    # The prober's host, and the attendant's if it said.
    here: Examination
    there: Examination | None
    trials: tuple[Trial, ...]

    @property
    def well(self) -> bool:
        """Tell whether something could be measured and nothing was damaged."""
        measured = any(trial.rates and not trial.error for trial in self.trials)
        return measured and not any(trial.damaged for trial in self.trials)


# --- who listens ----------------------------------------------------------------------


class Greeting(msgspec.Struct, frozen=True):
    """Holds what an attendant says first."""

    examination: Examination
    # For the fragments of each size of FRAGMENT_BYTES.
    grants: tuple[bytes, ...]


class ProbeMemory:
    """Memory to measure with: fragments that lie apart, as the blocks of a cache do.

    At each size every second slot is a fragment. What lies between them must never
    change, which shows that a transport writes what it should and nothing beside it.
    """

    def __init__(self, pass_bytes: int, seed: int) -> None:
        noise = np.random.default_rng(seed).bytes(2 * pass_bytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(noise, np.uint8).copy()

    def slots(self, size: int) -> npt.NDArray[np.uint8]:
        """Pairs of slots: a fragment of this size, and what lies behind it."""
        return self.bytes.reshape(-1, 2, size)

    def fragments(self, size: int) -> Fragments:
        """Return the same as memory to move."""
        count = len(self.slots(size))
        step = np.uint64(2 * size)
        return Fragments(
            np.uint64(self.bytes.ctypes.data)
            + np.arange(count, dtype=np.uint64) * step,
            np.full(count, size, np.uint64),
            owner=self.bytes,
            writable=True,
        )

    def digest(self) -> bytes:
        """BLAKE2 of all of it."""
        return hashlib.blake2b(self.bytes.data, digest_size=32).digest()


async def attend(
    communicator: Communicator,
    examination: Examination,
    heard: Callable[[Connection, PeerReport | None], None],
    lend: Callable[[], ProbeMemory] = lambda: ProbeMemory(PASS_BYTES, SEED),
) -> None:
    """Serve one connection after the other, until the communicator is closed.

    ``heard`` is called with each that is over, and its report if it sent one.
    """
    async for connection in communicator.connections():
        memory = lend()
        regions = [
            communicator.register(memory.fragments(size), "readwrite")
            for size in FRAGMENT_BYTES
        ]
        reports: list[PeerReport] = []
        try:
            grants = tuple(region.grant(connection).to_bytes() for region in regions)
            greeting = Greeting(examination, grants)
            await connection.send(GREETING_TAG, msgspec.json.encode(greeting))
            await _answer(connection, memory, reports)
        except (KVWireError, TimeoutError) as exc:
            if not isinstance(exc, ConnectionClosed):
                logger.warning("doctor: %s: %r", connection.peer, exc)
        finally:
            await connection.close()
            for region in regions:
                await region.close()
        heard(connection, reports[-1] if reports else None)


async def _answer(
    connection: Connection, memory: ProbeMemory, reports: list[PeerReport]
) -> None:
    """Do what the prober asks, until it goes."""
    buffer = bytearray(MESSAGE_BYTES_MAX)
    while True:
        async with asyncio.timeout(PATIENCE_S):
            count = await connection.recv(ASK_TAG, into=buffer)
            verb, said = bytes(buffer[:1]), bytes(buffer[1:count])
            answer = verb + said
            if verb == DIGEST:
                answer = memory.digest()
            elif verb == REPORT:
                reports[:] = [decoded(connection, said, PeerReport)]
                answer = b""
            await connection.send(ANSWER_TAG, answer)


def decoded(connection: Connection, said: bytes, kind: type[T]) -> T:
    """Read what another doctor said, who must be of this version."""
    try:
        return msgspec.json.decode(said, type=kind)
    except msgspec.DecodeError as exc:
        raise KVWireError(
            f"the doctor at {connection.peer} is of another version: {exc}"
        ) from None


# --- who asks -------------------------------------------------------------------------


async def try_out(
    communicator: Communicator,
    address: Address,
    sizes: Sequence[int],
    *,
    transport: str = "",
) -> tuple[Trial, Examination | None]:
    """Connect and measure; without sizes, the choice of transport alone.

    What went wrong is found as well. The second is what the peer's host is like, if it
    is a doctor's.
    """
    trial, there = Trial(asked=transport), None
    try:
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            connection = await communicator.connect(
                address, transport=transport or None
            )
            try:
                if PROFILE.items() <= dict(connection.peer.profile).items():
                    greeting = await _greeting(connection)
                    there = greeting.examination
                    trial = await _measured(connection, greeting.grants, sizes, trial)
                else:
                    said = "the peer is no `kvwire doctor --listen` of this version"
                    trial = replace(trial, error=f"{said}: nothing to measure")
            finally:
                # Last: a transport may have failed at its first use.
                report = connection.transport_report.candidates
                trial = replace(trial, candidates=report)
                await connection.close()
    except TimeoutError:
        trial = replace(trial, error=f"not done within {TRIAL_TIMEOUT_S:g} s")
    except (KVWireError, OSError) as exc:
        trial = replace(trial, error=f"{type(exc).__name__}: {exc}")
    return trial, there


async def examine_peer(
    communicator: Communicator,
    address: Address,
    here: Examination,
    progress: Callable[[str], None],
) -> PeerReport:
    """Try every transport that both sides can use, and give the peer the report too."""
    progress("what both sides choose")
    choice, there = await try_out(communicator, address, ())
    trials = [choice]
    # Why each of the others is not, the first trial says.
    for name in [c.name for c in choice.candidates if c.possible and there]:
        progress(f"transport {name}")
        trial, _ = await try_out(communicator, address, FRAGMENT_BYTES, transport=name)
        trials.append(trial)
    report = PeerReport(
        address=str(address), here=here, there=there, trials=tuple(trials)
    )
    if there is not None:
        with contextlib.suppress(KVWireError):  # it has gone
            await _hand_over(communicator, address, report)
    return report


async def _hand_over(
    communicator: Communicator, address: Address, report: PeerReport
) -> None:
    connection = await communicator.connect(address)
    try:
        await _ask(connection, REPORT + msgspec.json.encode(report))
    finally:
        await connection.close()


async def _greeting(connection: Connection) -> Greeting:
    buffer = bytearray(MESSAGE_BYTES_MAX)
    count = await connection.recv(GREETING_TAG, into=buffer)
    return decoded(connection, bytes(buffer[:count]), Greeting)


async def _ask(connection: Connection, question: bytes) -> bytes:
    await connection.send(ASK_TAG, question)
    answer = bytearray(_ANSWER_BYTES_MAX)
    return bytes(answer[: await connection.recv(ANSWER_TAG, into=answer)])


async def _measured(
    connection: Connection, grants: Sequence[bytes], sizes: Sequence[int], trial: Trial
) -> Trial:
    rates: list[Rate] = []
    damaged: list[str] = []
    there: ProbeMemory | None = None
    for size, said in zip(FRAGMENT_BYTES, grants, strict=False):
        if size not in sizes:
            continue
        grant = Grant.from_bytes(said)
        nbytes = len(grant)
        if not size <= nbytes <= PASS_BYTES or nbytes % FRAGMENT_BYTES[-1]:
            raise KVWireError(f"the peer lends {nbytes} bytes; {PASS_BYTES} at most")
        there = there or ProbeMemory(nbytes, SEED)
        damaged += await _passes(connection, grant, there, size, rates)
    round_trip_s = await _round_trip(connection) if sizes else None
    return replace(
        trial, rates=tuple(rates), damaged=tuple(damaged), round_trip_s=round_trip_s
    )


async def _passes(
    connection: Connection,
    grant: Grant,
    there: ProbeMemory,
    size: int,
    rates: list[Rate],
) -> list[str]:
    """Measure one size, and say what arrived otherwise than it was sent.

    ``there`` is what must be in the peer's memory, now and afterwards.
    """
    damaged: list[str] = []
    what = f"of {size} B fragments"
    here, before = ProbeMemory(len(grant), size), ProbeMemory(len(grant), size)
    fragments = here.fragments(size)

    rates.append(
        await _rate("get", fragments, lambda: connection.get(grant, fragments))
    )
    if (here.slots(size)[:, 0] != there.slots(size)[:, 0]).any():
        damaged.append(f"get {what}: other bytes than were sent")
    if (here.slots(size)[:, 1] != before.slots(size)[:, 1]).any():
        damaged.append(f"get {what}: written beside them")
    here.bytes[:] = before.bytes
    there.slots(size)[:, 0] = here.slots(size)[:, 0]
    rates.append(
        await _rate("put", fragments, lambda: connection.put(fragments, grant))
    )
    if await _ask(connection, DIGEST) != there.digest():
        damaged.append(f"put {what}: other bytes than were sent, or beside them")
    return damaged


async def _rate(
    verb: Literal["put", "get"],
    fragments: Fragments,
    once: Callable[[], Awaitable[int]],
) -> Rate:
    """Time the median pass; the first does not count, unless there is no time."""
    took: list[float] = []
    while len(took) <= _PASSES and sum(took) < _BUDGET_S:
        began = time.perf_counter()
        await once()
        took.append(time.perf_counter() - began)
    counted = took[1:] or took
    return Rate(
        verb=verb,
        fragment_bytes=int(fragments.lengths[0]),
        bytes_per_s=fragments.nbytes / statistics.median(counted),
        passes=len(counted),
    )


async def _round_trip(connection: Connection) -> float:
    """Seconds that 64 B take there and back: the median."""
    took: list[float] = []
    for _ in range(_ECHOES):
        began = time.perf_counter()
        await _ask(connection, ECHO + bytes(_ANSWER_BYTES_MAX - 1))
        took.append(time.perf_counter() - began)
    return statistics.median(took)
