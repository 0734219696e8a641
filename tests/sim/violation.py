"""What a seed fails with."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant of the simulator does not hold.

    Attributes:
        rule: Its short name. Two failures with the same rule count as the same one when
            a plan is made smaller.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{message} [{rule}]")
        self.rule = rule


def demand(holds: object, rule: str, message: str) -> None:
    """Fail the seed unless ``holds`` is true."""
    if not holds:
        raise Violation(rule, message)
