"""What the tests of UCX share: which UCX is under test, and whether there is one."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from kvwire_ucx import UcxBackend

_AVAILABILITY = UcxBackend.availability()

needs_ucx = pytest.mark.skipif(
    not _AVAILABILITY.available,
    reason=f"no UCX: {_AVAILABILITY.reason}; {_AVAILABILITY.remedy}",
)

SHARED_MEMORY = "self,sm,tcp"
TCP = "tcp"
TRANSPORTS = (SHARED_MEMORY, TCP)


def transports_of_this_loop() -> str:
    """Shared memory on asyncio and TCP on uvloop: both, without running all twice."""
    is_uvloop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    return TCP if is_uvloop else SHARED_MEMORY
