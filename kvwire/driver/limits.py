"""Bounds of lanes and staging, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import HANDSHAKE_TIMEOUT_S, LANE_TIMEOUT_S

# The limit if no other transport is left to try, and on the answering side. On a large
# or busy host, UCX needs seconds for its first scan of the devices.
LANE_TIMEOUT_LAST_S: Final = 4.0
# A broken lane is reopened after a pause, which doubles, with jitter. Recovery within a
# second is unlikely, and each attempt creates threads and registered memory on both
# sides. After an outage of a minute, another minute is acceptable.
RERAISE_S: Final = 1.0
RERAISE_S_MAX: Final = 60.0
# Slots in pinned memory for a device's chunks, per connection and direction: one is
# copied, one is on the wire, and one waits, so that neither copy nor wire is idle.
STAGING_SLOTS: Final = 3

assert LANE_TIMEOUT_S < LANE_TIMEOUT_LAST_S < HANDSHAKE_TIMEOUT_S
