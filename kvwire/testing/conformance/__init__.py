"""The conformance kit: what every backend must do, as checks that anybody can run.

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
