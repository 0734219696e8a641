"""Runs schedules at the left end, and checks both ends' results."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NoReturn, TypeVar

import msgspec

from kvwire.aio import start_task
from kvwire_certify.oracle import WatchedMemory, Words, Wrong, landed
from kvwire_certify.processes import (
    Gone,
    MessageSocket,
    Order,
    OrderFailed,
    Process,
    Usage,
    memories,
    part,
    usage,
)
from kvwire_certify.schedule import IDLE_S, WRITERS, Schedule, Step
from kvwire_certify.transport import End, failure_text, load

T = TypeVar("T")

# How long memory is watched after the last step, to detect late writes.
_SETTLE_S: Final = 0.02
# A process that polls runs for the whole time or wakes constantly. On a busy machine it
# gets only part of the CPU time that it asks for, and each wake-up is delayed.
_RAN: Final = 0.05
_WANTED: Final = 0.7
_SLEEPS_HZ: Final = 100
_ROUNDS: Final = 3
OPENING: Final = 3
"""The factor by which opening and connecting may take longer than any other call."""
_LEAK_BYTES: Final = 1 << 20
# What a schedule checks once both ends are connected, by a successful operation, and
# by connecting many times.
_CONNECTED: Final = ("failed", "hang", "crash")
_SUCCEEDED: Final = ("stale", "torn", "hole", "misplaced", "foreign", "lost")
_CYCLED: Final = ("leak-memory", "leak-descriptor", "leak-thread")


class Played(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a schedule, or a report of the step that begins.

    Attributes:
        step: The number of the running step; -1 at the end.
        rule: The broken promise, a key of ``RULES``; "" if all promises were kept.
        text: A description of the failure.
        operations: The number of gets and puts that landed.
        checked: The promises that its steps have checked.
    """

    step: int
    rule: str = ""
    text: str = ""
    operations: int = 0
    checked: frozenset[str] = frozenset()


@dataclass(eq=False, slots=True)
class Reference:
    """A reference to memory of the right end.

    Attributes:
        data: The transport's reference.
        slots: The right end's slots.
        content: The slots' content when the reference was made, or when it ended; None
            if unknown.
        live: Whether it has not been withdrawn, and its process and connection are
            alive.
        users: The number of operations that use it now.
        puts: The number of these that write.
    """

    data: bytes
    slots: range
    content: Words | None
    live: bool = True
    users: int = 0
    puts: int = 0


@dataclass(eq=False, slots=True)
class StartedStep:
    """A running get or put.

    Attributes:
        step: The step that started it.
        reference: The reference that it uses.
        own: The left end's slots.
        expected: The bytes that a get has to return, or that a put has to leave.
        blank: The destination's previous content.
        trouble: How often the peer had been disturbed when it began.
        task: The task of the transport's call.
    """

    step: Step
    reference: Reference
    own: range
    expected: Words
    blank: Words
    trouble: int
    task: asyncio.Task[bool]


class Player:
    """Runs one schedule.

    Args:
        target: The target to certify.
        right: The running process of the right end.
        path: The file that contains both memories.
        channel: The channel on which the start of each step is reported.
        without: Rules that the target need not keep.
    """

    def __init__(
        self,
        target: str,
        right: Process,
        path: str,
        channel: MessageSocket,
        without: Collection[str] = (),
    ) -> None:
        self._without = without
        self._target = target
        self._right_process = right
        self._memories = memories(path)
        self._channel = channel

    async def play(self, schedule: Schedule, limit_s: float) -> Played:
        """Run a schedule.

        Args:
            schedule: The schedule.
            limit_s: The time limit of each call.

        Cancel safety: never cancelled.
        """
        self._schedule = schedule
        self._limit_s = limit_s
        self._views = {name: part(m, schedule) for name, m in self._memories.items()}
        words = {
            name: m[: len(self._views[name]) // 8] for name, m in self._memories.items()
        }
        self._left = WatchedMemory(WRITERS["left"], words["left"], schedule.slots)
        self._right = WatchedMemory(WRITERS["right"], words["right"], schedule.slots)
        self._references: dict[int, Reference] = {}
        self._operations: list[StartedStep] = []
        self._trouble = 0
        self._stopped: asyncio.TimerHandle | None = None
        self._going = asyncio.Event()
        self._going.set()
        self._landed = 0
        self._checked: set[str] = set()
        self._doing = "open"
        number = -1
        try:
            await self._open()
            self._checked.update(_CONNECTED)
            for number, step in enumerate(schedule.steps):
                await self._channel.send(self._played(number))
                self._doing = str(step)
                await self._step(number, step)
                self._watch()
            self._doing = "the end"
            await self._all()
            await self._settle()
            await self._close()
            await self._settle()
        except Wrong as exc:
            return self._played(number, exc.rule, exc.text)
        return self._played(-1)

    def _played(self, step: int, rule: str = "", text: str = "") -> Played:
        return Played(step, rule, text, self._landed, frozenset(self._checked))

    async def _step(self, number: int, step: Step) -> None:
        match step.verb:
            case "offer":
                await self._offer(step)
            case "withdraw":
                await self._withdraw(step.reference)
            case "get" | "put":
                await self._operate(step)
            case "stop":
                self._stop(step.after_s)
            case "kill":
                await self._kill()
            case "reconnect":
                await self._close()
                await self._open()
            case "pause":
                await asyncio.sleep(step.after_s)
            case "idle":
                await self._idle()
            case "cycle":
                await self._cycle(number, step.count)

    # --- both ends --------------------------------------------------------------------

    async def _open(self) -> None:
        self._end: End = load(self._target)
        order = Order("open", self._schedule)
        right = await self._ask(order)
        left = await self._within(self._end.open(self._views["left"]), "open")
        both = (
            self._within(self._end.connect(right), "connect"),
            self._ask(Order("connect", data=left)),
        )
        await asyncio.gather(*both)

    async def _close(self, *, dead: bool = False) -> None:
        """Close both ends during their operations, and reuse all memory."""
        self._trouble += 1
        await self._within(self._end.close(), "close")
        if not dead:
            await self._ask(Order("close"))
        await self._all("the peer's death" if dead else "its connection was closed")
        for reference in self._references.values():
            reference.live = False
        since = "the process died" if dead else "the connection was closed"
        self._right.write(range(self._schedule.slots), since)

    async def _kill(self) -> None:
        self._trouble += 1
        if self._stopped is not None:
            self._stopped.cancel()
            self._stopped = None
            self._going.set()
        await self._right_process.kill()
        await self._all("the peer's death")
        await self._close(dead=True)
        try:
            await self._right_process.start()
        except Gone as exc:
            raise Wrong("crash", f"{self._doing}: {exc}") from exc
        await self._open()

    def _stop(self, seconds: float) -> None:
        if self._stopped is None:
            self._trouble += 1
            self._going.clear()
            self._right_process.signal(signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            self._stopped = loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._trouble += 1
        self._stopped = None
        self._going.set()
        self._right_process.signal(signal.SIGCONT)

    # --- the right end ----------------------------------------------------------------

    async def _offer(self, step: Step) -> None:
        slots = range(step.slot, step.slot + step.count)
        taken = {s for r in self._references.values() if r.live for s in r.slots}
        if step.reference in self._references or taken & set(slots):
            return
        size = self._schedule.slot_bytes
        self._right.write(slots)
        order = Order("offer", start=slots.start * size, stop=slots.stop * size)
        reference = Reference(await self._ask(order), slots, self._right.content(slots))
        self._references[step.reference] = reference

    async def _withdraw(self, number: int) -> None:
        reference = self._references.get(number)
        if reference is None or not reference.live:
            return
        reference.content = self._right.content(reference.slots)
        await self._ask(Order("withdraw", data=reference.data))
        reference.live = False
        self._right.write(reference.slots, "its reference was withdrawn")

    async def _ask(self, order: Order) -> bytes:
        return (await self._within(self._right_process.ask(order), order.verb)).data

    # --- the left end -----------------------------------------------------------------

    async def _operate(self, step: Step) -> None:
        operation = self._begin(step)
        if operation is None:
            return
        self._operations.append(operation)
        if step.way == "behind":
            await asyncio.sleep(0)
            return
        if step.way == "cancel":
            await asyncio.sleep(step.after_s)
            operation.task.cancel()
        await self._finish(operation)

    def _begin(self, step: Step) -> StartedStep | None:
        """Start a get or put, if its reference exists and its memory is unused."""
        reference = self._references.get(step.reference)
        if reference is None or not type(self._end).can(step.verb):
            return None
        if "stale" in self._without and not reference.live:
            return None
        own = range(step.slot, step.slot + len(reference.slots))
        busy = {slot for operation in self._operations for slot in operation.own}
        if own.stop > self._schedule.slots or busy & set(own):
            return None
        live = reference.live
        content = self._right.content(reference.slots) if live else reference.content
        writes = step.verb == "put"
        if content is None or reference.puts or (writes and reference.users):
            return None
        self._left.write(own)
        blank = self._left.content(own)
        assert blank is not None
        view = self._left.view(own)
        timeout_s = step.after_s if step.way == "timeout" else None
        reference.users += 1
        if writes:
            reference.puts += 1
            if live:
                self._right.allow(reference.slots, blank)
            work = self._end.put(reference.data, view, timeout_s)
            expected = blank
            blank = content
        else:
            self._left.lend(own)
            work = self._get(reference, view, timeout_s)
            expected = content
        return StartedStep(
            step=step,
            reference=reference,
            own=own,
            expected=expected,
            blank=blank,
            trouble=self._trouble,
            task=start_task(work),
        )

    async def _get(
        self, reference: Reference, into: memoryview, timeout_s: float | None
    ) -> bool:
        found = await self._end.get(reference.data, into, timeout_s)
        if isinstance(found, bytes):
            into[:] = found
            return True
        return bool(found)

    async def _finish(self, operation: StartedStep, ended: str = "") -> None:
        """Wait for the end of an operation, and check it."""
        step = operation.step
        done, _ = await asyncio.wait([operation.task], timeout=self._limit_s)
        if not done:
            self._hang(f"{step.verb} ({ended or step.way})", self._limit_s)
        self._operations.remove(operation)
        reference = operation.reference
        reference.users -= 1
        reference.puts -= step.verb == "put"
        self._checked.add("late-write")
        failed = "it was cancelled"
        if not operation.task.cancelled():
            error = operation.task.exception()
            if error is None and operation.task.result():
                self._succeeded(operation)
                return
            failed = "it failed" if error else "it brought nothing"
            calm = operation.trouble == self._trouble and step.way in {"wait", "behind"}
            if calm and reference.live:
                text = f"{step}: "
                if error is None:
                    self._broken(
                        "lost", f"{text}the offered memory was reported as missing"
                    )
                else:
                    self._broken("failed", text + failure_text(error, self._end))
        if step.verb == "put" and reference.live:
            self._checked.add("late-read")
        if step.way == "timeout":
            failed = "its time-out"
        since = f"the end of a {step.verb}: {ended or failed}"
        self._left.write(operation.own, since)

    def _succeeded(self, operation: StartedStep) -> None:
        self._landed += 1
        self._checked.update(_SUCCEEDED)
        reference = operation.reference
        if operation.step.verb == "get":
            found = self._left.found(operation.own)
            wrong = landed(
                found,
                operation.expected,
                operation.blank,
                self._right,
                reference.slots,
            )
            self._left.set(operation.own, found)
        elif reference.live:
            found = self._right.found(reference.slots)
            wrong = landed(
                found, operation.expected, operation.blank, self._left, operation.own
            )
            self._right.set(reference.slots, found)
            if wrong is not None and (found == operation.blank).all():
                wrong = Wrong("lost", "a put was acknowledged, but nothing was written")
        elif operation.trouble == self._trouble and operation.step.way != "behind":
            wrong = Wrong(
                "stale", "a put by a reference that had already ended was acknowledged"
            )
        else:
            wrong = None  # it may have been before the end
        if wrong is not None:
            self._broken(wrong.rule, f"{operation.step}: {wrong.text}")

    def _broken(self, rule: str, text: str) -> None:
        """End the schedule, unless this rule is excluded for the target."""
        if rule not in self._without:
            raise Wrong(rule, text)

    async def _all(self, ended: str = "") -> None:
        for operation in list(self._operations):
            await self._finish(operation, ended)

    # --- what stays -------------------------------------------------------------------

    def _watch(self) -> None:
        for side in (self._left, self._right):
            wrong = side.watch()
            if wrong is not None:
                raise wrong

    async def _settle(self) -> None:
        """Watch the memory for a while, after letting a stopped peer continue."""
        await self._going.wait()
        await asyncio.sleep(_SETTLE_S)
        self._watch()

    async def _usages(self, *, tidy: bool = False) -> dict[str, Usage]:
        asked = self._right_process.ask(Order("usage", tidy=tidy))
        right = (await self._within(asked, "usage")).usage
        assert right is not None
        return {"left": usage(tidy=tidy), "right": right}

    async def _idle(self) -> None:
        await self._all()
        await self._settle()
        seen = [await self._usages()]
        for _ in range(_ROUNDS):
            await asyncio.sleep(IDLE_S)
            seen.append(await self._usages())
        for name in ("left", "right"):
            each = [one[name] for one in seen]
            ran_s = min(b.ran_s - a.ran_s for a, b in pairwise(each))
            wanted_s = min(b.wanted_s - a.wanted_s for a, b in pairwise(each))
            sleeps = min(b.sleeps - a.sleeps for a, b in pairwise(each))
            polls = ran_s > _RAN * IDLE_S and wanted_s > _WANTED * IDLE_S
            if polls or sleeps > _SLEEPS_HZ * IDLE_S:
                text = (
                    f"in {IDLE_S} s without work the {name} process wanted a core for "
                    f"{wanted_s:.2f} s, and woke {sleeps} times"
                )
                self._broken("busy-idle", text)
        self._checked.add("busy-idle")

    async def _cycle(self, step: int, count: int) -> None:
        """Connect and close many times, and check that no resource leaks."""
        seen: list[dict[str, Usage]] = []
        for _ in range(_ROUNDS):
            for number in range(count):
                await self._channel.send(self._played(step))
                await self._close()
                await self._open()
                one = Step("offer", -1 - number - count * len(seen), 0, 1)
                await self._offer(one)
                await self._operate(Step("get", one.reference, 0))
                await self._operate(Step("put", one.reference, 1))
                # from here on, only the transport holds resources
                self._references.clear()
            seen.append(await self._usages(tidy=True))
        for name in ("left", "right"):
            for what, least in (
                ("memory", max(_LEAK_BYTES, count * self._schedule.slot_bytes // 2)),
                ("descriptor", count // 2),
                ("thread", count // 2),
            ):
                counts = [getattr(each[name], what) for each in seen]
                grown = [b - a for a, b in pairwise(counts)]
                if min(grown) >= least:
                    text = (
                        f"{what} of the {name} process after {count} connections each"
                    )
                    self._broken(f"leak-{what}", f"{text}: {counts}")
        self._checked.update(_CYCLED)

    # --- time -------------------------------------------------------------------------

    async def _within(self, work: Awaitable[T], what: str) -> T:
        """Wait for a call that has to end in time and without an error."""
        # Opening something for the first time may load libraries.
        limit_s = self._limit_s * (OPENING if what in {"open", "connect"} else 1)
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait([task], timeout=limit_s)
        if not done:
            self._hang(what, limit_s)
        try:
            return task.result()
        except Gone as exc:
            raise Wrong("crash", f"{self._during(what)}: {exc}") from exc
        except OrderFailed as exc:
            raise Wrong("failed", f"{self._during(what)}: {exc}") from exc
        except Exception as exc:
            text = f"{self._during(what)}: {failure_text(exc, self._end)}"
            raise Wrong("failed", text) from exc

    def _during(self, what: str) -> str:
        return what if what == self._doing else f"{self._doing}: {what}"

    def _hang(self, what: str, limit_s: float) -> NoReturn:
        text = f"{what} has not ended within {limit_s:g} s"
        raise Wrong("hang", f"{self._doing}: {text}")


async def left_end(
    channel: MessageSocket, target: str, path: str, without: str
) -> None:
    """Run schedules one after the other, until one fails or all have run.

    Cancel safety: never cancelled.
    """
    right = Process("right", target, path)
    await channel.send(await right.start())
    try:
        player = Player(target, right, path, channel, without.split(","))
        while line := await channel.receive():
            schedule, limit_s = msgspec.json.decode(line, type=tuple[Schedule, float])
            played = await player.play(schedule, limit_s)
            await channel.send(played)
            if played.rule:
                return
    finally:
        with contextlib.suppress(ProcessLookupError):
            await right.kill()
