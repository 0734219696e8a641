"""Bounds of directories and their records, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import KIB, MIB

# What a member says of itself: names, digests and labels, as JSON. A TXT record, a key
# of NATS and an annotation of Kubernetes have room for more.
RECORD_BYTES_MAX: Final = 4 * KIB
# Labels, cache groups, and terms of a selector.
RECORD_FIELDS_MAX: Final = 64
ADDRESS_CHARS_MAX: Final = 256
SELECTOR_CHARS_MAX: Final = 1024
# Members that one watcher knows: 4 KiB each at most.
MEMBERS_MAX: Final = 4096
# A member that gives no sign of life for so long has left; it gives three in that time.
MEMBER_LEASE_S: Final = 10.0
MEMBER_LEASE_S_MIN: Final = 0.5
MEMBER_LEASE_S_MAX: Final = 3600.0
# A directory that has not listed its members within this time is away.
DIRECTORY_LIST_S: Final = 10.0
# A directory that is gone is asked for again after a pause that doubles.
DIRECTORY_RETRY_S: Final = 0.1
DIRECTORY_RETRY_S_MAX: Final = 5.0
# How long a close waits for a directory to take its members' records out.
WITHDRAW_TIMEOUT_S: Final = 1.0
# How often a directory that cannot push is looked at: a folder costs one system call a
# member, and a resolver a round trip.
FILE_INTERVAL_S: Final = 0.5
DNS_INTERVAL_S: Final = 5.0
# How often the endpoints of Kubernetes are listed anew; changes come at once.
KUBERNETES_INTERVAL_S: Final = 30.0
# What its API server may say at once: 1,000 endpoints have half a megabyte.
KUBERNETES_ANSWER_BYTES_MAX: Final = 16 * MIB
