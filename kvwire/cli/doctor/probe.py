"""Measures a connection to another doctor: round trip, put and get, and the bytes.

Small and bounded: it says whether a path is in order, not which of two is faster; that
is what ``kvwire bench`` is for.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, Literal

from kvwire import Communicator, Connection, Grant, KVWireError
from kvwire.cli.doctor.arena import Arena
from kvwire.cli.doctor.examination import Examination
from kvwire.cli.doctor.trial import Rate, Trial
from kvwire.cli.doctor.words import (
    ECHO_BYTES,
    ECHO_TAG,
    PASS_BYTES,
    PROFILE_KEY,
    Digest,
    Digested,
    Done,
    Echo,
    Examine,
    Examined,
    Lend,
    Lent,
    ask,
    heard,
    say,
)
from kvwire.types import Address

# The median of these; on a slow wire fewer, so that nothing takes minutes.
_PASSES: Final = 3
_BUDGET_S: Final = 1.0
_ECHOES: Final = 200
# One transport, all sizes: a wire of 100 Mbit/s needs most of it.
TRIAL_TIMEOUT_S: Final = 180.0
_SEEDS: Final = {"put": 1, "get": 2}


async def try_out(
    communicator: Communicator,
    address: Address,
    sizes: Sequence[int],
    *,
    transport: str = "",
    before: Callable[[Connection], Awaitable[None]] | None = None,
) -> Trial:
    """Connect, measure, and say what was found; what goes wrong is in the trial.

    Args:
        communicator: To connect with.
        address: Where the peer listens.
        sizes: Fragment sizes to measure; none for the choice of transport alone.
        transport: Require this one.
        before: Called with the connection, first of all.
    """
    trial = Trial(asked=transport)
    try:
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            connection = await communicator.connect(
                address, transport=transport or None
            )
            try:
                if before is not None:
                    await before(connection)
                if is_doctor(connection):
                    trial = await _measured(connection, sizes, trial)
                else:
                    said = "the peer is no `kvwire doctor --listen`: nothing to measure"
                    trial = replace(trial, error=said)
            finally:
                # Last: a transport may have failed at its first use.
                report = connection.transport_report.candidates
                trial = replace(trial, candidates=report)
                await connection.close()
    except TimeoutError:
        return replace(trial, error=f"not done within {TRIAL_TIMEOUT_S:g} s")
    except (KVWireError, OSError) as exc:
        return replace(trial, error=f"{type(exc).__name__}: {exc}")
    return trial


def is_doctor(connection: Connection) -> bool:
    """Whether there is somebody at the other end to measure with."""
    return PROFILE_KEY in dict(connection.peer.profile)


async def examine_peer(connection: Connection) -> Examination:
    """What the other host is like."""
    return (await ask(connection, Examine(), Examined)).examination


async def _measured(
    connection: Connection, sizes: Sequence[int], trial: Trial
) -> Trial:
    rates: list[Rate] = []
    damaged: list[str] = []
    for size in sizes:
        lent = await ask(connection, Lend(size, _SEEDS["get"]), Lent)
        grant = Grant.from_bytes(lent.grant)
        if not size <= len(grant) <= PASS_BYTES:
            raise KVWireError(
                f"the peer lends {len(grant)} bytes; {PASS_BYTES} at most"
            )
        arena = Arena(len(grant), size)
        rates.append(await _get(connection, grant, arena))
        damaged += _compared("get", size, arena, _SEEDS["get"])
        arena.fill(_SEEDS["put"])
        rates.append(await _put(connection, grant, arena))
        there = await ask(connection, Digest(), Digested)
        if there.digest != arena.digest():
            damaged.append(f"put of {size} B fragments: other bytes than were sent")
        if not there.gaps_untouched:
            damaged.append(f"put of {size} B fragments: written beside them")
    return replace(
        trial,
        rates=tuple(rates),
        damaged=tuple(damaged),
        round_trip_s=await _round_trip(connection),
    )


def _compared(verb: str, size: int, arena: Arena, seed: int) -> list[str]:
    """What is wrong with bytes that arrived here, which the seed determines."""
    wrong: list[str] = []
    expected = Arena(arena.fragments.nbytes, size)
    expected.fill(seed)
    if arena.digest() != expected.digest():
        wrong.append(f"{verb} of {size} B fragments: other bytes than were sent")
    if not arena.gaps_untouched:
        wrong.append(f"{verb} of {size} B fragments: written beside them")
    return wrong


async def _get(connection: Connection, grant: Grant, arena: Arena) -> Rate:
    async def once() -> None:
        await connection.get(grant, into=arena.fragments)

    arena.clear()
    return await _rate("get", arena, once)


async def _put(connection: Connection, grant: Grant, arena: Arena) -> Rate:
    async def once() -> None:
        await connection.put(arena.fragments, grant)

    return await _rate("put", arena, once)


async def _rate(
    verb: Literal["put", "get"], arena: Arena, once: Callable[[], Awaitable[None]]
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
        fragment_bytes=int(arena.fragments.lengths[0]),
        bytes_per_s=arena.fragments.nbytes / statistics.median(counted),
        passes=len(counted),
    )


async def _round_trip(connection: Connection) -> float:
    """Seconds that 64 B take there and back: the median."""
    await say(connection, Echo(_ECHOES))
    sent, received = bytes(ECHO_BYTES), bytearray(ECHO_BYTES)
    took: list[float] = []
    for _ in range(_ECHOES):
        began = time.perf_counter()
        await connection.send(ECHO_TAG, sent)
        await connection.recv(ECHO_TAG, into=received)
        took.append(time.perf_counter() - began)
    await heard(connection, Done)
    return statistics.median(took)
