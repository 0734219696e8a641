"""Links within one process: the backend contract's reference, with fault injection.

:mod:`kvwire_inproc.link` is the contract of :mod:`kvwire.backend` as executable text,
on one loop or between two loops in two threads. :mod:`kvwire_inproc.faults` breaks that
contract on purpose, reproducibly by a seed, to show that the layers above notice.
"""

from kvwire_inproc.backend import InprocBackend
from kvwire_inproc.faults import FaultPlan, injected

__all__ = ["FaultPlan", "InprocBackend", "injected"]
