"""The conformance kit: checks of the promises that every backend makes.

>>> report = await check_backend("tcp")

or, from a shell, ``kvwire certify backend tcp``. It needs no test
framework; docs/howto/write-a-backend.md explains how to make one pytest test of each
check.
"""

from kvwire_certify.conformance.check import Check, CheckFailed, Report, Result
from kvwire_certify.conformance.runner import (
    CHECKS,
    check_backend,
    check_lanes,
    run_check,
)

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailed",
    "Report",
    "Result",
    "check_backend",
    "check_lanes",
    "run_check",
]
