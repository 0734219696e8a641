"""Links within one process: the reference for the backend contract, and its faults.

:mod:`kvwire_inproc.link` is the contract of :mod:`kvwire.backend` as executable text,
on one loop or between two loops in two threads. :mod:`kvwire_inproc.faults` breaks that
contract on purpose and by a seed, so that what stands above can show that it notices.
"""

from kvwire_inproc.backend import InprocBackend
from kvwire_inproc.faults import FaultPlan, injected

__all__ = ["FaultPlan", "InprocBackend", "injected"]
