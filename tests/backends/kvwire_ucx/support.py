"""What the tests of UCX share: which UCX is under test, and whether there is one."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from kvwire.errors import BackendUnavailable
from kvwire_ucx import UcxBackend
from kvwire_ucx.diagnosis import probed
from kvwire_ucx.library import load
from kvwire_ucx.windows import VERSION_MIN

_AVAILABILITY = UcxBackend.availability()

needs_ucx = pytest.mark.skipif(
    not _AVAILABILITY.available,
    reason=f"no UCX: {_AVAILABILITY.reason}; {_AVAILABILITY.remedy}",
)


def _reads() -> bool:
    try:
        resources, _ = probed()
        return load().version >= VERSION_MIN and any(
            r.transport == "cma" for r in resources
        )
    except BackendUnavailable:
        return False


needs_reading = pytest.mark.skipif(
    not _reads(), reason="windows over UCX need UCX 1.19 and cma; see kvwire doctor"
)

SHARED_MEMORY = "self,sm,tcp"
TCP = "tcp"
TRANSPORTS = (SHARED_MEMORY, TCP)


def _has_verbs() -> bool:
    try:
        return any(found.transport == "rc_verbs" for found in probed()[0])
    except BackendUnavailable:
        return False


# An RDMA device that UCX_NET_DEVICES admits, as in the guests of tests/rdma.
HAS_VERBS = _has_verbs()


def transports_of_this_loop() -> str:
    """One way on asyncio and another on uvloop: both, without running all twice."""
    is_uvloop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    if HAS_VERBS:
        # UCX connects RC queue pairs over UD ones, and prefers the former.
        return "self,ud_verbs" if is_uvloop else "self,ud_verbs,rc_verbs"
    return TCP if is_uvloop else SHARED_MEMORY
