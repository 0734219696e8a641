"""The house style as checks that run: see CONTRIBUTING.md for the rules in prose."""

from __future__ import annotations

from tests.support.house import bounds, contracts, files, forbidden, statements, suite
from tests.support.house.check import Check, Finding

CHECKS: tuple[Check, ...] = (
    *forbidden.CHECKS,
    *contracts.CHECKS,
    *bounds.CHECKS,
    *files.CHECKS,
    *statements.CHECKS,
    *suite.CHECKS,
)

__all__ = ["CHECKS", "Check", "Finding"]
