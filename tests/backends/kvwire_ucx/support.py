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


def transports_of_this_loop() -> str:
    """Shared memory on asyncio and TCP on uvloop: both, without running all twice."""
    is_uvloop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    return TCP if is_uvloop else SHARED_MEMORY
