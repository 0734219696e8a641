"""What came of the checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvwire.testing.conformance.check import CheckFailed, CheckOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one check.

    Attributes:
        check: Which.
        seconds: How long it took.
        reason: Why it failed; "" if it passed.
    """

    check: CheckOf[Any]
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
    """What came of all checks of one backend.

    Attributes:
        backend: Its scheme.
        results: In the order they ran.
    """

    backend: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> tuple[Result, ...]:
        """The checks that passed."""
        return tuple(result for result in self.results if result.passed)

    @property
    def failed(self) -> tuple[Result, ...]:
        """The checks that failed, each with its reason."""
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
        """One line: how many passed and failed."""
        seconds = sum(result.seconds for result in self.results)
        return (
            f"backend {self.backend!r}: {len(self.passed)} of {len(self.results)} "
            f"checks passed in {seconds:.1f} s"
        )

    @property
    def failures(self) -> str:
        """Each check that failed, by its whole id, with the reason; a line each."""
        return "\n".join(f"{r.check.id}: {r.reason}" for r in self.failed)

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold of it."""
        return {
            "backend": self.backend,
            "passed": len(self.passed),
            "failed": len(self.failed),
            "checks": [
                {
                    "id": result.check.id,
                    "promise": result.check.promise,
                    "passed": result.passed,
                    "reason": result.reason,
                    "seconds": round(result.seconds, 6),
                }
                for result in self.results
            ],
        }

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.results), self.summary])
