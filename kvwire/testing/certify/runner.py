"""Runs schedules on a target, in processes that may crash, and collects breaches."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from types import TracebackType
from typing import IO, Final, Self

import msgspec

from kvwire.errors import BackendUnavailable, UsageError, nearest
from kvwire.testing.certify.player import OPENING, Played
from kvwire.testing.certify.processes import MEMORY_BYTES, Gone, Process
from kvwire.testing.certify.schedule import Schedule, effective, make, shrink
from kvwire.testing.certify.transport import End, load
from kvwire.testing.oracle import RULES

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
_SHRINK_S: Final = 60.0


class Breach(msgspec.Struct, frozen=True):
    """A broken promise, with a schedule that reproduces it.

    Attributes:
        target: The target that broke it.
        version: The target's version.
        rule: The promise, a key of ``kvwire.testing.oracle.RULES``.
        text: A description of the failure.
        seeds: The seeds whose schedules broke it.
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
    """

    target: str
    version: str
    schedules: int
    operations: int
    seconds: float
    breaches: tuple[Breach, ...]


class Stage:
    """Runs schedules on one target, and starts new processes after each breach.

    Args:
        target: The target to certify.
        limit_s: The time limit of each call.
        without: Rules that the target need not keep.
        start_s: The time limit of the start of a process.
    """

    def __init__(
        self,
        target: str,
        limit_s: float = LIMIT_S,
        without: Collection[str] = (),
        *,
        start_s: float = End.start_s,
    ) -> None:
        self.without = tuple(without)
        self.target = target
        self._limit_s = limit_s
        self._start_s = start_s
        self._left: Process | None = None
        self._memory: IO[bytes] | None = None
        self._log: IO[bytes] | None = None

    async def __aenter__(self) -> Self:
        """Create the memory of both ends.

        Cancel safety: safe.
        """
        self._memory = tempfile.NamedTemporaryFile(prefix="kvwire-certify-")  # noqa: SIM115
        self._memory.truncate(2 * MEMORY_BYTES)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - both are closed below
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
        for file in (self._memory, self._log):
            if file is not None:
                file.close()

    async def play(self, schedule: Schedule) -> Played:
        """Run a schedule, and also check how its processes end.

        Raises:
            BackendUnavailable: The processes do not start.

        Cancel safety: safe, its processes end with the stage.
        """
        assert self._memory is not None
        assert self._log is not None
        if self._left is None:
            self._left = Process(
                "left",
                self.target,
                self._memory.name,
                str(self._limit_s),
                ",".join(self.without),
                start_s=2 * self._start_s,  # it starts the right one as well
                log=self._log.fileno(),
            )
            self._log.truncate(0)
            try:
                await self._left.start()
            except Gone as exc:
                text = f"certify: {self.target}: {exc}{self._last_words()}"
                raise BackendUnavailable(text) from None
        channel = self._left.channel
        assert channel is not None
        await channel.send(schedule)
        step = -1
        while True:
            patience_s = self._limit_s * OPENING + BLOCKED_S
            if step >= 0 and schedule.steps[step].verb == "kill":
                patience_s += self._start_s
            try:
                async with asyncio.timeout(patience_s):
                    line = await channel.receive()
            except TimeoutError:
                played = Played(step, "hang", f"{self._at(schedule, step)}: blocked")
            else:
                if line:
                    played = msgspec.json.decode(line, type=Played)
                    step = played.step
                    if not played.rule and step >= 0:
                        continue
                else:
                    how = f"the left process has ended: {await self._left.ended()}"
                    text = f"{self._at(schedule, step)}: {how}{self._last_words()}"
                    played = Played(step, "crash", text)
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
        target: The target; see :func:`~kvwire.testing.certify.transport.load`.
        seeds: The seeds of the schedules.
        seconds: The time after which no further schedule starts; None for no limit.
        limit_s: The time after which a call counts as hanging.
        times: How often the smallest schedule of each breach is replayed.
        without: Rules that the target need not keep. Without ``stale``, no reference is
            used after its end.
        progress: Called with each seed and its result.

    Raises:
        UsageError: There is no such target or rule.
        ImportError: Its library is not installed.

    Cancel safety: safe, all processes are ended.
    """
    end = _checked(target, without)
    began = time.monotonic()
    broken: dict[str, list[tuple[Schedule, Played]]] = {}
    schedules = 0
    operations = 0
    async with Stage(target, limit_s, without, start_s=end.start_s) as stage:
        for seed in seeds:
            if seconds is not None and time.monotonic() - began > seconds:
                break
            schedule = make(seed)
            played = await stage.play(schedule)
            if played.rule in _OF_TIME:
                again = await _failed(stage, schedule, kind(played))
                played = again or Played(-1)
            schedules += 1
            operations += played.operations
            if played.rule:
                broken.setdefault(kind(played), []).append((schedule, played))
            if progress is not None:
                progress(seed, played)
        breaches = [
            await _breach(stage, end.version, shown, times) for shown in broken.values()
        ]
    spent = time.monotonic() - began
    return Certificate(
        target, end.version, schedules, operations, spent, tuple(breaches)
    )


def _checked(target: str, without: Collection[str]) -> End:
    """Make an end of a target, after checking the arguments."""
    for rule in without:
        if rule not in RULES:
            known = nearest(rule, RULES)
            raise UsageError(f"certify: unknown rule {rule!r}; {known}")
    end = load(target)
    if not (type(end).can("get") or type(end).can("put")):
        raise UsageError(f"certify: {target} has neither get nor put")
    return end


def kind(failure: Played | Breach) -> str:
    """Return a failure's kind: its rule, and for a late write the event before it."""
    if failure.rule != "late-write":
        return failure.rule
    after = failure.text.partition(" changed after ")[2]
    return f"{failure.rule} {after.partition(': life')[0]}"


async def _breach(
    stage: Stage, version: str, shown: list[tuple[Schedule, Played]], times: int
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
    again = await _repeated(stage, schedule, wanted, times)
    return Breach(
        target=stage.target,
        version=version,
        rule=played.rule,
        text=played.text,
        seeds=tuple(each.seed for each, _ in shown),
        schedule=schedule,
        without=stage.without,
        again=again,
        times=times,
    )


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
        The breach, with the number of replays that broke the promise; no breach if none
        did.

    Raises:
        UsageError: There is no such target.
        ImportError: Its library is not installed.

    Cancel safety: safe, all processes are ended.
    """
    end = load(breach.target)
    began = time.monotonic()
    without = breach.without
    async with Stage(breach.target, limit_s, without, start_s=end.start_s) as stage:
        again = await _repeated(stage, breach.schedule, kind(breach), times)
    found = msgspec.structs.replace(
        breach, version=end.version, again=again, times=times
    )
    spent = time.monotonic() - began
    breaches = (found,) if again else ()
    return Certificate(breach.target, end.version, times, 0, spent, breaches)


async def _repeated(stage: Stage, schedule: Schedule, wanted: str, times: int) -> int:
    """Run a schedule several times; return how often it failed in the wanted way."""
    count = 0
    for _ in range(times):
        played = await stage.play(schedule)
        count += bool(played.rule) and kind(played) == wanted
    return count
