"""The backend: lanes between processes of one host, and no links of its own."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from kvwire.backend import (
    Availability,
    Backend,
    Capabilities,
    Finding,
)
from kvwire.backend.lane import Lane, LaneContext
from kvwire_local import diagnosis
from kvwire_local.lane import READ_METHODS, LocalLane
from kvwire_local.tracer_slot import CHOICES


class LocalBackend(Backend):
    """Moves payload within a host: the receiver reads the sender's memory."""

    scheme: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(
        links=False, lanes=True, same_host=True
    )
    settings: ClassVar = {"way": tuple(READ_METHODS), "tracer": CHOICES}

    @classmethod
    def rank(cls) -> int:
        """Return a place before networks, behind what stays in the process."""
        return 10

    @classmethod
    def availability(cls) -> Availability:
        """Tell whether this system has what it takes, if not whether it permits it."""
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            return Availability(
                available=False,
                reason=f"needs Linux (this is {sys.platform}): no other system lets "
                f"processes read each other's memory lists at once",
                remedy="use tcp",
            )
        return Availability(available=True, reason="process_vm_readv and memfd_create")

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        """Return what the kernel permits."""
        return diagnosis.findings() if cls.availability().available else ()

    def open_lane(self, context: LaneContext) -> Lane:
        """Prepare a lane to a process that is hopefully on this host."""
        return LocalLane(context)
