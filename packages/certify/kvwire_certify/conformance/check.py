"""Checks: an id, the promise to check, the coroutine that checks it, and the result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Run = Callable[..., Awaitable[None]]
Cases = Mapping[str, Any] | None


class CheckFailed(AssertionError):
    """A broken promise; the message describes the breach."""


class Planted(Exception):
    """The exception that a handler raises on purpose, for a check."""


def raise_planted(*_: object) -> None:
    """Raise :exc:`Planted`, as a callback."""
    raise Planted


def require(condition: bool, otherwise: str) -> None:
    """Raise CheckFailed with `otherwise` unless the condition holds.

    It is a function because ``python -O`` would remove an ``assert`` statement.
    """
    if not condition:
        raise CheckFailed(otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise that every backend, lane or directory must keep.

    Attributes:
        id: Its stable name, such as ``"close.flushed[many]"``.
        promise: The promise, in one line.
        run: The coroutine that checks it on a rig.
    """

    id: str
    promise: str
    run: Run


class Group:
    """Checks about one subject, in the order they are written.

    A check gets a rig. A check with two more parameters also gets a connected pair; if
    ``held``, the pair's right side receives nothing at first. With ``cases`` there is
    one check per case: the case's name replaces ``{}`` in the promise, and its value is
    the last argument.
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
        """Register the decorated coroutine both as a check of links and of lanes."""
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
    """The result of one check.

    Attributes:
        check: The check.
        seconds: Its duration.
        reason: Why it failed; "" if it passed.
    """

    check: Check
    seconds: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the promise was kept."""
        return not self.reason

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        line = f"{verdict}  {self.check.id:<44}  {self.check.promise}"
        return line if self.passed else f"{line}\n        {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all checks of one backend or tier.

    Attributes:
        backend: The backend's scheme, or the tier's name.
        results: The results, in the order in which the checks ran.
        what: ``"backend"`` or ``"tier"``.
    """

    backend: str
    results: tuple[Result, ...]
    what: str = "backend"

    @property
    def passed(self) -> tuple[Result, ...]:
        """Return the checks that passed."""
        return tuple(result for result in self.results if result.passed)

    @property
    def failed(self) -> tuple[Result, ...]:
        """Return the checks that failed, each with its reason."""
        return tuple(result for result in self.results if not result.passed)

    def raise_for_failures(self) -> None:
        """Raise if any check failed.

        Raises:
            CheckFailed: Some checks failed; the message has the reason of each.
        """
        if self.failed:
            raise CheckFailed(f"{self.summary}\n{self.failures}")

    @property
    def summary(self) -> str:
        """Return one line with the numbers of passed and failed checks."""
        seconds = sum(result.seconds for result in self.results)
        return (
            f"{self.what} {self.backend!r}: {len(self.passed)} of {len(self.results)} "
            f"checks passed in {seconds:.1f} s"
        )

    @property
    def failures(self) -> str:
        """One line for each failed check: its id and the reason."""
        return "\n".join(f"{r.check.id}: {r.reason}" for r in self.failed)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.results), self.summary])


def show_end(report: Report) -> int:
    """Print the failed checks and the number that passed; return the exit status."""
    if report.failed:
        print(f"\n{len(report.failed)} failed:\n{report.failures}\n")
    print(report.summary)
    return 1 if report.failed else 0
