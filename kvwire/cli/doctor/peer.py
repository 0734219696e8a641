"""Two doctors: one listens, the other one measures with it.

``kvwire doctor --peer`` measures like ``kvwire bench --peer`` (see
:mod:`kvwire.cli.bench.hosts`): round trip, put and get, with every byte compared. It is
small and bounded: it shows whether a path works, not which of two paths is faster. A
doctor that listens also sends the examination of its host, and receives the other's
report. Its profile identifies it as a doctor; other peers are not measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec

from kvwire import Communicator, ConnectError, KVWireError
from kvwire.cli.bench.hosts import ConnectionLine, ask, attend
from kvwire.cli.bench.line import Line, Turn
from kvwire.cli.bench.sides import Left
from kvwire.cli.bench.work import GET, PUT, ROUND_TRIP, Work
from kvwire.cli.doctor.examination import Examination
from kvwire.config import converted
from kvwire.limits import KIB, MIB
from kvwire.types import Address, Candidate

PROFILE: Final = {"kvwire.doctor": "1"}

# The bytes of one pass in each direction: enough that startup costs little, and little
# enough for any host's memory.
PASS_BYTES: Final = 64 * MIB
# The fragment sizes of one block and layer: small models, large ones, cross-layer
# blocks.
FRAGMENT_BYTES: Final = (4 * KIB, 32 * KIB, 1 * MIB)
# How many passes the median is taken from; fewer on a slow wire, which would take
# minutes.
_PASSES: Final = 3
_BUDGET_S: Final = 1.0
_ECHOES: Final = 200
_ECHO_BYTES: Final = 64
# The time for all sizes over one transport; a wire of 100 Mbit/s needs most of it.
TRIAL_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate at which a put or get moved fragments of one size."""

    verb: Literal["put", "get"]
    # Of contiguous bytes, at both ends.
    fragment_bytes: int
    # The median of so many passes.
    bytes_per_s: float
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One connection and its results."""

    # The required transport; "" for the configured choice.
    asked: str = ""
    # Every transport that was considered, with the reason for or against it.
    candidates: tuple[Candidate, ...] = ()
    # The median round trip of 64 B; None if not measured.
    round_trip_s: float | None = None
    rates: tuple[Rate, ...] = ()
    # Bytes that arrived damaged.
    damaged: tuple[str, ...] = ()
    # Why the measurement is incomplete; "" if it is complete.
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """The findings on two hosts, and between them."""

    # The address on which the peer listens.
    address: str
    # The host of the doctor that measures, and the peer's host if it is known.
    here: Examination
    there: Examination | None
    trials: tuple[Trial, ...]

    @property
    def well(self) -> bool:
        """Return whether something was measured and nothing was damaged."""
        measured = any(trial.rates and not trial.error for trial in self.trials)
        return measured and not any(trial.damaged for trial in self.trials)


# --- the doctor that listens ----------------------------------------------------------


def works() -> list[Work]:
    """Return everything that is measured, in this order."""
    passes = [
        Work(
            verb=verb,
            nbytes=PASS_BYTES,
            count=1,
            layers=1,
            blocks=PASS_BYTES // size,
        )
        for size in FRAGMENT_BYTES
        for verb in (GET, PUT)
    ]
    return [*passes, Work(verb=ROUND_TRIP, nbytes=_ECHO_BYTES, count=_ECHOES)]


async def listen(
    communicator: Communicator,
    examination: Examination,
    reported: Callable[[PeerReport], None],
) -> None:
    """Serve other doctors until the communicator is closed; pass their reports on."""

    def heard(value: object) -> None:
        reported(converted(value, PeerReport))

    await attend(communicator, works(), examination, heard)


# --- the doctor that measures ---------------------------------------------------------


async def try_out(
    communicator: Communicator,
    address: Address,
    *,
    transport: str = "",
) -> tuple[Trial, Examination | None]:
    """Connect by a transport and measure; without one, find only the choice.

    Failures are part of the trial. The second result is the examination of the peer's
    host, if the peer is a doctor.
    """
    trial = Trial(asked=transport)
    there = None
    try:
        async with asyncio.timeout(TRIAL_TIMEOUT_S):
            connection = await communicator.connect(
                address, transport=transport or None
            )
            side = Left(communicator, connection, {})
            try:
                if PROFILE.items() <= dict(connection.peer.profile).items():
                    line = ConnectionLine(connection)
                    there = converted(await line.receive(), Examination)
                    if transport:
                        trial = await _measured(line, side, trial)
                else:
                    other = (
                        "the peer does not run `kvwire doctor --listen` of this version"
                    )
                    trial = replace(trial, error=f"{other}: nothing to measure")
            finally:
                # Last: a transport may have failed at its first use.
                report = connection.transport_report.candidates
                trial = replace(trial, candidates=report)
                side.memory.close()
                await connection.close()
    except TimeoutError:
        trial = replace(trial, error=f"not done within {TRIAL_TIMEOUT_S:g} s")
    except (KVWireError, OSError, EOFError, msgspec.MsgspecError) as exc:
        nobody = isinstance(exc, ConnectError)
        asked = "; does `kvwire doctor --listen` run there?" if nobody else ""
        trial = replace(trial, error=f"{type(exc).__name__}: {exc}{asked}")
    return trial, there


async def examine_peer(
    communicator: Communicator,
    address: Address,
    here: Examination,
    progress: Callable[[str], None],
) -> PeerReport:
    """Try every transport that both sides can use, and send the report to the peer."""
    progress("what both sides choose")
    choice, there = await try_out(communicator, address)
    trials = [choice]
    # The first trial has the reason against each other transport.
    for name in [c.name for c in choice.candidates if c.possible and there]:
        progress(f"transport {name}")
        trial, _ = await try_out(communicator, address, transport=name)
        trials.append(trial)
    report = PeerReport(
        address=str(address), here=here, there=there, trials=tuple(trials)
    )
    if there is not None:
        with contextlib.suppress(KVWireError, EOFError):  # it has gone
            await _hand_over(communicator, address, report)
    return report


async def _hand_over(
    communicator: Communicator, address: Address, report: PeerReport
) -> None:
    connection = await communicator.connect(address)
    try:
        line = ConnectionLine(connection)
        # The peer sends its examination first; a close before that would end its side
        # before it reads.
        await line.receive()
        await line.send(report)
    finally:
        await connection.close()


async def _measured(line: Line, side: Left, trial: Trial) -> Trial:
    every = works()

    async def measure(work: Work, *, checks: bool = False) -> dict[str, Any]:
        return await ask(line, side, every, Turn(work, checks))

    rates: list[Rate] = []
    damaged: list[str] = []
    *passes, echo = every
    for work in passes:
        size = work.layer_bytes
        # Every byte of the first pass is compared.
        checked = await measure(work, checks=True)
        here = checked["digest"]
        there = checked["other"]["digest"]
        if here != there:
            damaged.append(
                f"{work.verb} of {size} B fragments: the received bytes differ: {here} "
                f"on the left, {there} on the right"
            )
        # The median pass; the first does not count, unless there is no time.
        took = [*checked["seconds"]]
        while len(took) <= _PASSES and sum(took) < _BUDGET_S:
            took += (await measure(work))["seconds"]
        counted = took[1:] or took
        rate = PASS_BYTES / statistics.median(counted)
        verb: Literal["put", "get"] = "put" if work.verb == PUT else "get"
        rates.append(
            Rate(verb=verb, fragment_bytes=size, bytes_per_s=rate, passes=len(counted))
        )
    echoes = await measure(echo)
    return replace(
        trial,
        rates=tuple(rates),
        damaged=tuple(damaged),
        round_trip_s=statistics.median(echoes["seconds"]),
    )
