"""Bounds of lanes, staging and traces, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import HANDSHAKE_TIMEOUT_S, LANE_TIMEOUT_S

# The same where no other transport is left, and on the side that answers. A first look
# at the devices of a large or busy host takes UCX seconds.
LANE_TIMEOUT_LAST_S: Final = 4.0
# A lane that broke is raised again after a pause, doubling with jitter. What broke has
# hardly recovered within a second, and a try makes a half on both sides: threads and
# registered memory. A minute is a small part of an outage that has lasted one already.
RERAISE_S: Final = 1.0
RERAISE_S_MAX: Final = 60.0
# Chunks of a device's memory in pinned host memory, per connection and direction: one
# is copied, one moves on the wire, and one waits, so that neither waits for the other.
STAGING_SLOTS: Final = 3
# Events that `kvwire trace` sees of a process: 400 transfers of 32 layers, 4 MB.
TRACE_EVENTS_MAX: Final = 16_384

assert LANE_TIMEOUT_S < LANE_TIMEOUT_LAST_S < HANDSHAKE_TIMEOUT_S
