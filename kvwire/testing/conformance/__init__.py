"""The conformance kit: checks of the promises that every backend makes.

>>> report = await check_backend("tcp")

or, from a shell, ``python -m kvwire.testing.conformance tcp``. It needs no test
framework; docs/howto/write-a-backend.md shows one pytest test for each check.
"""

from kvwire.testing.conformance.check import Check, CheckFailed, Report, Result
from kvwire.testing.conformance.runner import CHECKS, check_backend, run_check

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailed",
    "Report",
    "Result",
    "check_backend",
    "run_check",
]
