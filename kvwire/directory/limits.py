"""Bounds of directories and their records, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import KIB

# A member's record: names, digests and labels, as JSON. A TXT record, a NATS key and a
# Kubernetes annotation have room for more.
RECORD_BYTES_MAX: Final = 4 * KIB
# Labels, cache groups, and terms of a selector.
RECORD_FIELDS_MAX: Final = 64
# The most members that one watcher knows: at most 4 KiB each.
MEMBERS_MAX: Final = 4096
# A member that has not renewed its record for this long has left; it renews three times
# in that time.
MEMBER_LEASE_S: Final = 10.0
