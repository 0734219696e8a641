"""Checks: an id, the promise it is about, a coroutine, and what came of running it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Run = Callable[..., Awaitable[None]]
Cases = Mapping[str, Any] | None


class CheckFailed(AssertionError):
    """Reports a promise that was not kept; the message says what was seen."""


class Planted(Exception):
    """Marks what a handler raises where a check wants it to."""


def raise_planted(*_: object) -> None:
    """Raise, in the place of a callback."""
    raise Planted


def require(condition: bool, otherwise: str) -> None:
    """Fail the check with ``otherwise`` unless the condition holds.

    Not an ``assert`` statement, which ``python -O`` would remove.
    """
    if not condition:
        raise CheckFailed(otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Describes one thing that every backend, lane or directory must do.

    Attributes:
        id: Its stable name, such as ``"close.flushed[many]"``.
        promise: One line: what is promised.
        run: Shows, on a rig, that it is kept.
    """

    id: str
    promise: str
    run: Run


class Group:
    """Checks about one subject, in the order they are written.

    A check gets a rig. One that takes two sides as well gets a pair that is joined, of
    which the right side receives nothing yet if it is ``held``. With ``cases`` it is a
    check for each: the promise names it where it has ``{}``, and its value comes last.
    """

    def __init__(self, name: str) -> None:
        self.of_links: list[Check] = []
        self.of_lanes: list[Check] = []
        self._name = name

    def links(
        self, name: str, promise: str, cases: Cases = None, *, held: bool = False
    ) -> Callable[[Run], Run]:
        """Register the decorated coroutine as a check of links."""
        return self._register((self.of_links,), name, promise, cases, held)

    def lanes(
        self, name: str, promise: str, cases: Cases = None, *, held: bool = False
    ) -> Callable[[Run], Run]:
        """Register the decorated coroutine as a check of lanes."""
        return self._register((self.of_lanes,), name, promise, cases, held)

    def both(
        self, name: str, promise: str, cases: Cases = None, *, held: bool = False
    ) -> Callable[[Run], Run]:
        """Register the decorated coroutine as a check of links, and one of lanes."""
        where = self.of_links, self.of_lanes
        return self._register(where, name, promise, cases, held)

    def _register(
        self,
        where: tuple[list[Check], ...],
        name: str,
        promise: str,
        cases: Cases,
        held: bool,
    ) -> Callable[[Run], Run]:
        each: list[tuple[str, str, tuple[Any, ...]]] = [("", promise, ())]
        if cases is not None:
            each = [(f"[{n}]", promise.format(n), (case,)) for n, case in cases.items()]

        def register(run: Run) -> Run:
            takes_pair = len(inspect.signature(run).parameters) > 2

            async def on_rig(rig: Any, *, case: tuple[Any, ...]) -> None:
                sides: tuple[Any, ...] = ()
                if takes_pair:
                    sides = await (rig.held_pair() if held else rig.pair())
                await run(rig, *sides, *case)

            for suffix, said, case in each:
                check = Check(
                    id=f"{self._name}.{name}{suffix}",
                    promise=said,
                    run=functools.partial(on_rig, case=case),
                )
                for checks in where:
                    checks.append(check)
            return run

        return register


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Holds what came of one check.

    Attributes:
        check: Which.
        seconds: How long it took.
        reason: Why it failed; "" if it passed.
    """

    check: Check
    seconds: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Tell whether the promise was kept."""
        return not self.reason

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        line = f"{verdict}  {self.check.id:<44}  {self.check.promise}"
        return line if self.passed else f"{line}\n        {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds what came of all checks of one backend.

    Attributes:
        backend: Its scheme.
        results: In the order they ran.
    """

    backend: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> tuple[Result, ...]:
        """Return the checks that passed."""
        return tuple(result for result in self.results if result.passed)

    @property
    def failed(self) -> tuple[Result, ...]:
        """Return the checks that failed, each with its reason."""
        return tuple(result for result in self.results if not result.passed)

    def raise_for_failures(self) -> None:
        """Do nothing if all passed.

        Raises:
            CheckFailed: Some did not; the message has the reason of each.
        """
        if self.failed:
            raise CheckFailed(f"{self.summary}\n{self.failures}")

    @property
    def summary(self) -> str:
        """Return one line: how many passed and failed."""
        seconds = sum(result.seconds for result in self.results)
        return (
            f"backend {self.backend!r}: {len(self.passed)} of {len(self.results)} "
            f"checks passed in {seconds:.1f} s"
        )

    @property
    def failures(self) -> str:
        """List each check that failed: its whole id and the reason, a line each."""
        return "\n".join(f"{r.check.id}: {r.reason}" for r in self.failed)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.results), self.summary])
