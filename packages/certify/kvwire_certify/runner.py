"""Runs schedules on a target, in processes that may crash, and collects breaches."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import msgspec

from kvwire.errors import BackendUnavailable, UsageError, nearest
from kvwire_certify.oracle import RULES
from kvwire_certify.player import OPENING, Played
from kvwire_certify.processes import (
    MEMORY_BYTES,
    START_S,
    Gone,
    Process,
    Started,
)
from kvwire_certify.schedule import Schedule, effective, make, shrink

LIMIT_S: Final = 10.0
"""The default time limit of each call."""
BLOCKED_S: Final = 5.0
"""How much later the process of a blocked event loop is killed: it cannot report."""
_LOG_LINES: Final = 5
# How often a schedule is tried before a step counts as needed for the failure, since
# some failures depend on timing.
_TRIES: Final = 2
# An overloaded machine breaks these promises too, so a failure counts only if it can be
# reproduced.
_OF_TIME: Final = frozenset({"hang", "busy-idle"})
# The factor by which a call may take longer before its schedule counts as a hang. A
# call that only is slow, because other programs use the cores or the disk, ends then.
_PATIENCE: Final = 6
_SHRINK_S: Final = 60.0


class Breach(msgspec.Struct, frozen=True):
    """A broken promise, with a schedule that reproduces it.

    Attributes:
        target: The target that broke it.
        version: The target's version.
        rule: The promise, a key of ``kvwire_certify.oracle.RULES``.
        text: A description of the failure.
        seeds: The seeds whose schedules broke it. For ``hang`` and ``busy-idle``, which
            have to be confirmed, only the first one.
        schedule: The smallest schedule found that breaks it.
        without: The rules that were left out.
        again: In how many replays the promise was broken again.
        times: The number of replays.
    """

    target: str
    version: str
    rule: str
    text: str
    seeds: tuple[int, ...]
    schedule: Schedule
    without: tuple[str, ...] = ()
    again: int = 0
    times: int = 0


class Certificate(msgspec.Struct, frozen=True):
    """The result of a run.

    Attributes:
        target: The target that was tested.
        version: Its version.
        schedules: The number of schedules that ran.
        operations: The number of gets and puts in them that landed.
        seconds: The duration of the run.
        breaches: One breach for each broken promise.
        unchecked: The promises that no schedule has checked.
    """

    target: str
    version: str
    schedules: int
    operations: int
    seconds: float
    breaches: tuple[Breach, ...]
    unchecked: tuple[str, ...] = ()


class Stage:
    """Runs schedules on one target, and starts new processes after each breach.

    Args:
        target: The target to certify.
        limit_s: The time limit of each call.
        without: Rules that the target need not keep.
        start_s: The time limit of a start.
        blocked_s: How much longer than its limit a call may say nothing.

    Attributes:
        started: What its first process has reported about the target.
    """

    def __init__(
        self,
        target: str,
        limit_s: float = LIMIT_S,
        without: Collection[str] = (),
        *,
        start_s: float = START_S,
        blocked_s: float = BLOCKED_S,
    ) -> None:
        self._start_s = start_s
        self._blocked_s = blocked_s
        self.without: tuple[str, ...] = tuple(without)
        self.target = target
        self.started: Started = Started()
        self._limit_s = limit_s
        self._left: Process | None = None
        # Its processes may be killed, and then leave their temporary files there.
        self._folder = tempfile.TemporaryDirectory(
            prefix="kvwire-certify-", ignore_cleanup_errors=True
        )
        self._memory = Path(self._folder.name, "memory")
        self._log: IO[bytes] | None = None

    async def __aenter__(self) -> Self:
        """Create the memory of both ends.

        Cancel safety: safe.
        """
        with self._memory.open("wb") as memory:
            memory.truncate(2 * MEMORY_BYTES)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed below
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes.

        Cancel safety: safe.
        """
        await self._end()
        if self._log is not None:
            self._log.close()
        self._folder.cleanup()

    async def start(self) -> Process:
        """Start the processes, unless they are running; return the left one.

        Raises:
            BackendUnavailable: The processes do not start.
            UsageError: There is no such target.
            ImportError: A library that the target needs is not installed.

        Cancel safety: safe, its processes end with the stage.
        """
        assert self._log is not None
        if self._left is not None:
            return self._left
        self._left = Process(
            "left",
            self.target,
            str(self._memory),
            ",".join(self.without),
            folder=self._folder.name,
            log=self._log.fileno(),
            start_s=self._start_s,
        )
        self._log.truncate(0)
        try:
            self.started = await self._left.start()
        except Gone as exc:
            text = f"certify: {self.target}: {exc}{self._last_words()}"
            raise BackendUnavailable(text) from None
        return self._left

    async def play(self, schedule: Schedule, *, patience: float = 1) -> Played:
        """Run a schedule, and also check how its processes end.

        Args:
            schedule: The schedule.
            patience: The factor by which each call may take longer.

        Raises:
            BackendUnavailable: The processes do not start.

        Cancel safety: safe, its processes end with the stage.
        """
        left = await self.start()
        channel = left.channel
        assert channel is not None
        limit_s = self._limit_s * patience
        await channel.send((schedule, limit_s))
        step = -1
        last = Played(-1)
        while True:
            patience_s = limit_s * OPENING + self._blocked_s
            if step >= 0 and schedule.steps[step].verb == "kill":
                patience_s += self._start_s
            try:
                async with asyncio.timeout(patience_s):
                    line = await channel.receive()
            except TimeoutError:
                text = f"{self._at(schedule, step)}: blocked"
                played = msgspec.structs.replace(last, rule="hang", text=text)
            else:
                if line:
                    played = msgspec.json.decode(line, type=Played)
                    step = played.step
                    if not played.rule and step >= 0:
                        last = played
                        continue
                else:
                    how = f"the left process has ended: {await left.ended()}"
                    text = f"{self._at(schedule, step)}: {how}{self._last_words()}"
                    played = msgspec.structs.replace(last, rule="crash", text=text)
            if played.rule:
                await self._end()
            return played

    def _at(self, schedule: Schedule, step: int) -> str:
        return str(schedule.steps[step]) if step >= 0 else "open"

    def _last_words(self) -> str:
        """Return the last lines that the processes printed."""
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "".join(f"\n    {line}" for line in lines[-_LOG_LINES:])

    async def _end(self) -> None:
        if self._left is not None:
            await self._left.kill()
            self._left = None


async def certify(
    target: str,
    *,
    seeds: Iterable[int] = range(1, 201),
    seconds: float | None = None,
    limit_s: float = LIMIT_S,
    times: int = 3,
    without: Collection[str] = (),
    progress: Callable[[int, Played], None] | None = None,
) -> Certificate:
    """Run schedules on a target, and report its broken promises.

    Args:
        target: One of ``kvwire_certify.transport.TARGETS``, ``module:Class`` or
            ``file.py:Class``. The part after a further colon is its variant.
        seeds: The seeds of the schedules.
        seconds: The time after which no further schedule starts; None for no limit.
        limit_s: The time after which a call counts as hanging.
        times: How often the smallest schedule of each breach is replayed.
        without: Rules that the target need not keep. Without ``stale``, no reference is
            used after its end.
        progress: Called with each seed and its result.

    Raises:
        UsageError: There is no such target or rule.
        ImportError: A library that the target needs is not installed.
        BackendUnavailable: The processes do not start, or the first connection fails.

    Cancel safety: safe, all processes are ended.
    """
    for rule in without:
        if rule not in RULES:
            known = nearest(rule, RULES)
            raise UsageError(f"certify: unknown rule {rule!r}; {known}")
    began = time.monotonic()
    broken: dict[str, list[tuple[Schedule, Played]]] = {}
    schedules = 0
    operations = 0
    checked: set[str] = set()
    async with Stage(target, limit_s, without) as stage:
        await stage.start()
        for seed in seeds:
            if seconds is not None and time.monotonic() - began > seconds:
                break
            schedule = make(seed)
            played = await stage.play(schedule)
            if played.rule in broken and played.rule in _OF_TIME:
                # It may only have been slow: it counts as run, but not as a breach.
                played = msgspec.structs.replace(played, step=-1, rule="", text="")
            elif played.rule in _OF_TIME:
                played = await _confirmed(stage, schedule, played.rule)
            if played.rule and played.step < 0 and not schedules:
                raise BackendUnavailable(f"certify: {target}: {played.text}")
            schedules += 1
            operations += played.operations
            checked |= played.checked
            if played.rule:
                broken.setdefault(kind(played), []).append((schedule, played))
            if progress is not None:
                progress(seed, played)
        breaches = [await _breach(stage, shown, times) for shown in broken.values()]
    failed = {breach.rule for breach in breaches}
    checked = checked.difference(without) | failed
    return Certificate(
        target=target,
        version=stage.started.version,
        schedules=schedules,
        operations=operations,
        seconds=time.monotonic() - began,
        breaches=tuple(breaches),
        unchecked=tuple(rule for rule in RULES if rule not in checked),
    )


def kind(failure: Played | Breach) -> str:
    """Return a failure's kind: its rule, and for a late write the event before it."""
    if failure.rule != "late-write":
        return failure.rule
    after = failure.text.partition(" changed after ")[2]
    return f"{failure.rule} {after.partition(': life')[0]}"


async def _breach(
    stage: Stage, shown: list[tuple[Schedule, Played]], times: int
) -> Breach:
    """Shrink the first of some failures, and replay it."""
    schedule, played = shown[0]
    wanted = kind(played)
    smaller = shrink(schedule.steps)
    until = time.monotonic() + _SHRINK_S
    schedule = msgspec.structs.replace(schedule, steps=effective(schedule.steps))
    with contextlib.suppress(StopIteration):
        fewer = next(smaller)
        while time.monotonic() < until:
            less = msgspec.structs.replace(schedule, steps=effective(fewer))
            fails = less.steps == schedule.steps
            if not fails and (failed := await _failed(stage, less, wanted)):
                fails = True
                schedule = less
                played = failed
            fewer = smaller.send(fails)
    replays = await _repeated(stage, schedule, times)
    return Breach(
        target=stage.target,
        version=stage.started.version,
        rule=played.rule,
        text=played.text,
        seeds=tuple(each.seed for each, _ in shown),
        schedule=schedule,
        without=stage.without,
        again=[*map(kind, replays)].count(wanted),
        times=times,
    )


async def _confirmed(stage: Stage, schedule: Schedule, rule: str) -> Played:
    """Run a schedule again that has broken a rule which a busy machine breaks too.

    Returns:
        The first run with a breach that counts: of that rule, or of one that does not
        depend on time. Without one, the last run, as one that broke nothing.
    """
    for _ in range(_TRIES):
        played = await stage.play(schedule, patience=_PATIENCE)
        if played.rule and (played.rule == rule or played.rule not in _OF_TIME):
            return played
    return msgspec.structs.replace(played, step=-1, rule="", text="")


async def _failed(stage: Stage, schedule: Schedule, wanted: str) -> Played | None:
    """Run a schedule, a few times at most, until it fails in the wanted way."""
    for _ in range(_TRIES):
        played = await stage.play(schedule)
        if played.rule and kind(played) == wanted:
            return played
    return None


async def play_again(
    breach: Breach, *, times: int = 3, limit_s: float = LIMIT_S
) -> Certificate:
    """Replay the schedule of a breach several times.

    Returns:
        One breach for each promise that replays have broken, with their number; none if
        all promises were kept.

    Raises:
        UsageError: There is no such target.
        ImportError: A library that the target needs is not installed.
        BackendUnavailable: The processes do not start.

    Cancel safety: safe, all processes are ended.
    """
    began = time.monotonic()
    without = breach.without
    async with Stage(breach.target, limit_s, without) as stage:
        replays = await _repeated(stage, breach.schedule, times)
    breaches = {
        kind(played): msgspec.structs.replace(
            breach,
            version=stage.started.version,
            rule=played.rule,
            text=played.text,
            again=[*map(kind, replays)].count(kind(played)),
            times=times,
        )
        for played in replays
        if played.rule
    }
    checked = {each.rule for each in breaches.values()}
    if any(breach.rule in played.checked for played in replays):
        checked.add(breach.rule)
    return Certificate(
        target=breach.target,
        version=stage.started.version,
        schedules=times,
        operations=sum(played.operations for played in replays),
        seconds=time.monotonic() - began,
        breaches=tuple(breaches.values()),
        unchecked=tuple(rule for rule in RULES if rule not in checked),
    )


async def _repeated(stage: Stage, schedule: Schedule, times: int) -> list[Played]:
    """Run a schedule several times."""
    return [await stage.play(schedule) for _ in range(times)]
