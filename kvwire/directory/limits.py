"""Bounds of directories and their records, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import KIB, MIB

# A member's record: names, digests and labels, as JSON. A TXT record, a NATS key and a
# Kubernetes annotation have room for more.
RECORD_BYTES_MAX: Final = 4 * KIB
# Labels, cache groups, and terms of a selector.
RECORD_FIELDS_MAX: Final = 64
ADDRESS_CHARS_MAX: Final = 256
SELECTOR_CHARS_MAX: Final = 1024
# The most members that one watcher knows: at most 4 KiB each.
MEMBERS_MAX: Final = 4096
# A member that has not renewed its record for this long has left; it renews three times
# in that time.
MEMBER_LEASE_S: Final = 10.0
MEMBER_LEASE_S_MIN: Final = 0.5
MEMBER_LEASE_S_MAX: Final = 3600.0
# A directory that has not listed its members within this time counts as unreachable.
DIRECTORY_LIST_S: Final = 10.0
# An unreachable directory is tried again after a pause that doubles.
DIRECTORY_RETRY_S: Final = 0.1
DIRECTORY_RETRY_S_MAX: Final = 5.0
# How long a close waits for the directory to remove records.
WITHDRAW_TIMEOUT_S: Final = 1.0
# How often a directory that cannot report changes is read: a folder costs one system
# call per member, and a resolver a round trip.
FILE_INTERVAL_S: Final = 0.5
DNS_INTERVAL_S: Final = 5.0
# How often Kubernetes's endpoints are listed again; changes arrive at once.
KUBERNETES_INTERVAL_S: Final = 30.0
# The largest answer of the API server: 1,000 endpoints have half a megabyte.
KUBERNETES_ANSWER_BYTES_MAX: Final = 16 * MIB
