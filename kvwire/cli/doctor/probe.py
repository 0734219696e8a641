"""Measures a connection to another doctor: round trip, put and get, and the bytes.

Small and bounded: it says whether a path is in order, not which of two is faster; that
is what ``kvwire bench`` is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, Literal

import msgspec

from kvwire import Communicator, Connection, Grant, KVWireError
from kvwire.cli.doctor.attendant import (
    ANSWER_TAG,
    ASK_TAG,
    DIGEST,
    ECHO,
    FRAGMENT_BYTES,
    GREETING_TAG,
    MESSAGE_BYTES_MAX,
    PASS_BYTES,
    PROFILE,
    REPORT,
    SEED,
    Greeting,
    ProbeMemory,
    decoded,
)
from kvwire.cli.doctor.examination import Examination
from kvwire.cli.doctor.trial import PeerReport, Rate, Trial
from kvwire.kv.fragments import Fragments
from kvwire.types import Address

# The median of these; on a slow wire fewer, so that nothing takes minutes.
_PASSES: Final = 3
_BUDGET_S: Final = 1.0
_ECHOES: Final = 200
# Of an echo; a digest is shorter.
_ANSWER_BYTES_MAX: Final = 64
# One transport, all sizes: a wire of 100 Mbit/s needs most of it.
TRIAL_TIMEOUT_S: Final = 180.0


async def try_out(
    communicator: Communicator,
    address: Address,
    sizes: Sequence[int],
    *,
    transport: str = "",
) -> tuple[Trial, Examination | None]:
    """Connect and measure.

    Args:
        communicator: To connect with.
        address: Where the peer listens.
        sizes: Fragment sizes to measure; none for the choice of transport alone.
        transport: Require this one.

    Returns:
        What was found, also what went wrong; and what the peer's host is like, if it is
        a doctor's.
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
    """Try every transport that both sides can use, and give the peer the report too.

    Args:
        communicator: To connect with.
        address: Where the peer listens.
        here: What this host is like.
        progress: Told in a line what happens now.
    """
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
    """Measure one size.

    Args:
        connection: To the attendant.
        grant: For its fragments of this size.
        there: What must be in its memory, now and afterwards.
        size: Of the fragments.
        rates: Gets what was measured.

    Returns:
        What arrived otherwise than it was sent, every byte compared.
    """
    damaged: list[str] = []
    what = f"of {size} B fragments"
    here, before = ProbeMemory(len(grant), size), ProbeMemory(len(grant), size)
    fragments = here.fragments(size)

    async def get() -> None:
        await connection.get(grant, into=fragments)

    async def put() -> None:
        await connection.put(fragments, grant)

    rates.append(await _rate("get", fragments, get))
    if (here.slots(size)[:, 0] != there.slots(size)[:, 0]).any():
        damaged.append(f"get {what}: other bytes than were sent")
    if (here.slots(size)[:, 1] != before.slots(size)[:, 1]).any():
        damaged.append(f"get {what}: written beside them")
    here.bytes[:] = before.bytes
    there.slots(size)[:, 0] = here.slots(size)[:, 0]
    rates.append(await _rate("put", fragments, put))
    if await _ask(connection, DIGEST) != there.digest():
        damaged.append(f"put {what}: other bytes than were sent, or beside them")
    return damaged


async def _rate(
    verb: Literal["put", "get"],
    fragments: Fragments,
    once: Callable[[], Awaitable[None]],
) -> Rate:
    """The median pass. The first does not count, unless it is all there is time for."""
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
