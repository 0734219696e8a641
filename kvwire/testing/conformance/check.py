"""A check: an id, the promise it is about, and a coroutine that fails if broken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# What a check works with: a rig of links, or one of lanes.
R = TypeVar("R")


class CheckFailed(AssertionError):
    """A backend did not keep a promise; the message says what was seen instead."""


class Planted(Exception):
    """What a handler raises where a check wants it to."""


def raise_planted(*_: object) -> None:
    """Raise, in the place of a callback.

    Raises:
        Planted: Always.
    """
    raise Planted


def require(condition: bool, otherwise: str) -> None:
    """Fail the check with ``otherwise`` unless the condition holds.

    Not an ``assert`` statement, which ``python -O`` would remove.

    Raises:
        CheckFailed: It does not hold.
    """
    if not condition:
        raise CheckFailed(otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOf(Generic[R]):
    """One thing that every backend must do.

    Attributes:
        id: Its stable name, such as ``"close.flushes[many]"``.
        promise: One line: what the backend promises.
        run: Shows that a backend keeps it.
    """

    id: str
    promise: str
    run: Callable[[R], Awaitable[None]]


class GroupOf(Generic[R]):
    """Checks about one subject, in the order they are written.

    Args:
        name: The first part of their ids.
        parts: Groups of links and of lanes that get each check as well.
    """

    def __init__(self, name: str, *parts: GroupOf[Any]) -> None:
        self.name = name
        self.checks: list[CheckOf[R]] = []
        self._parts = parts

    def check(
        self, name: str, promise: str
    ) -> Callable[[Callable[[R], Awaitable[None]]], None]:
        """Register the decorated coroutine as one check."""

        def register(run: Callable[[R], Awaitable[None]]) -> None:
            self._add(name, promise, run)

        return register

    def pair(
        self, name: str, promise: str
    ) -> Callable[[Callable[[R, Any, Any], Awaitable[None]]], None]:
        """Register the decorated coroutine as one check of a pair that is joined."""

        def register(run: Callable[[R, Any, Any], Awaitable[None]]) -> None:
            async def paired(rig: Any) -> None:
                await run(rig, *await rig.pair())

            self._add(name, promise, paired)

        return register

    def each(
        self, name: str, promise: str, cases: Mapping[str, T]
    ) -> Callable[[Callable[[R, T], Awaitable[None]]], None]:
        """Register the decorated coroutine as one check for each case.

        Args:
            name: The checks' name, without the case.
            promise: With ``{}`` where the case goes.
            cases: By name; the value is passed to the coroutine.
        """

        def register(run: Callable[[R, T], Awaitable[None]]) -> None:
            def bound(value: T) -> Callable[[R], Awaitable[None]]:
                return lambda rig: run(rig, value)

            for case, value in cases.items():
                self._add(f"{name}[{case}]", promise.format(case), bound(value))

        return register

    def _add(
        self, name: str, promise: str, run: Callable[[R], Awaitable[None]]
    ) -> None:
        check = CheckOf(id=f"{self.name}.{name}", promise=promise, run=run)
        assert all(other.id != check.id for other in self.checks), f"two {check.id}"
        for group in (self, *self._parts):
            group.checks.append(check)
