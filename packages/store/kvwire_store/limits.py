"""Bounds of stores and their servers, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import EAGER_BYTES_MAX, EAGER_WINDOW_BYTES, GIB, KIB, MIB, TIB

# A tier is divided into slabs, each with blocks of one size. A slab is a sixteenth of
# the tier, so that a small tier has slabs for several sizes, but no larger than a dozen
# blocks of a large model.
STORE_SLABS: Final = 16
STORE_SLAB_BYTES: Final = 64 * MIB
STORE_SLAB_BYTES_MIN: Final = 64 * KIB
STORE_SLAB_BYTES_MAX: Final = 16 * GIB
# Slots per slab, so that tables by slot stay short: 16 KiB per slot in a slab of 64
# MiB.
STORE_SLOTS_MAX: Final = 4096
STORE_TIER_BYTES_MAX: Final = 1024 * TIB
# SHA-256 has 32 bytes; engines append the number of the cache group.
STORE_HASH_BYTES_MAX: Final = 64
# Bytes moved before other work gets a turn: enough to pay for a thread's wake-up, and
# little enough that concurrent gets and puts alternate.
STORE_BATCH_BYTES: Final = 16 * MIB
# Memory kept free of blocks that no other tier has, so that a put rarely waits for a
# disk.
STORE_HEADROOM_BYTES: Final = 64 * MIB
# A put of up to this size writes to a store server without first finding out which
# blocks the server has. If the server has them all, this much was sent in vain.
STORE_UNASKED_BYTES: Final = 2 * MIB
# How many models, shards and groups a disk describes at most.
STORE_NAMESPACES_MAX: Final = 4096
# The most tenants of a store: each is a label value in metrics, and its number takes
# one byte per slot.
STORE_TENANTS_MAX: Final = 64
# The share of a tier that all tenants together may pin: pinned blocks cannot be
# evicted, so most of a tier must be unpinned.
STORE_PINNED_SHARE: Final = 4
STORE_TTL_S_MAX: Final = 10 * 365 * 24 * 3600.0
# The most blocks in one request: 256 blocks of 64 KiB fill a berth, and a lookup for a
# prompt of 64 thousand tokens, at 16 tokens per block, still fits.
STORE_KEYS_MAX: Final = 4096
# Limit for the answer to a verb: a few reasons per tier, each with the tier's name.
STORE_REASONS_MAX: Final = 64
# In this time a verb can move a quarter of a server's memory at the rate of a disk.
STORE_VERB_TIMEOUT_S: Final = 120.0
# The longest message: keys of up to 80 bytes, a description, numbers, and images.
STORE_REQUEST_BYTES_MAX: Final = 768 * KIB
# Up to this size images are inside the request or the answer. It is not less than the
# eager limit: a refused put would leave such a message, and its credit, behind.
STORE_INLINE_BYTES: Final = EAGER_BYTES_MAX
# The most concurrent requests of one client: they are small, and its transfers wait for
# a berth.
STORE_REQUESTS_MAX: Final = 64
# A server's memory for one client's transfers, in berths of the size that a store moves
# at once: one is copied while the other is on the wire.
STORE_BERTH_BYTES: Final = STORE_BATCH_BYTES
STORE_BERTHS: Final = 2
STORE_BERTHS_MAX: Final = 64
STORE_CLIENTS_MAX: Final = 256
# Memory for the requests of all clients of a server, and for unread answers: 256 KiB
# per client on average, a few small blocks each.
STORE_HELD_BYTES: Final = 64 * MIB
# Memory for all berths: as many concurrent transfers as a machine's links can carry.
STORE_BERTHS_BYTES: Final = 1024 * MIB
# The share of a server's memory that may be pinned while it is sent: slow clients can
# withhold at most a quarter from the others.
STORE_LENT_SHARE: Final = 4
# Namespaces that a server describes to a new client, for its error messages.
STORE_NAMESPACES_TOLD: Final = 64
# At 1.6 MB/s a berth's bytes take 10 s; a slower client gains nothing from a store.
STORE_TIMEOUT_S: Final = 10.0
STORE_TIMEOUT_S_MAX: Final = 600.0
# How long memory may stay in use after its transfer has ended, or an answer unread
# after its deadline. Then the link that holds it is dropped.
STORE_GRACE_S: Final = 1.0
# An unreachable server is redialled after a pause that doubles, up to 10 s. That much
# of a cold cache matters little after a restart that takes minutes.
STORE_REDIAL_S: Final = 0.1
STORE_REDIAL_S_MAX: Final = 10.0
# The most servers of one sharded tier: each needs a connection, and a round trip for
# every match.
STORE_NODES_MAX: Final = 256
# If one of many nodes takes longer than this, the wait costs a prompt more than the
# node's blocks are worth.
STORE_NODE_TIMEOUT_S: Final = 2.0
# The most bytes in one Redis pipeline: for a moment, its answers are in memory twice.
STORE_PIPELINE_BYTES: Final = 4 * MIB
# Concurrent requests of one object tier: at 20 ms each, 32 of 2 MiB are 3 GB/s.
STORE_OBJECT_REQUESTS: Final = 32
STORE_OBJECT_REQUESTS_MAX: Final = 1024
# A larger object is moved in parts of this size, several at once, as S3's guidelines
# advise.
STORE_OBJECT_PART_BYTES: Final = 16 * MIB
STORE_OBJECT_PARTS: Final = 4
# The most keys whose presence an object tier remembers: 100 bytes each.
STORE_OBJECTS_KNOWN: Final = 256 * 1024
# How long an absent key is not looked up again, although another store may have put it:
# a put looks up its blocks three times.
STORE_OBJECT_ABSENT_S: Final = 2.0
# The most unreported uses of blocks; beyond that, uses are lost. Also: if a tier fails
# again this soon after a recovery, the failure is not logged again.
STORE_LOG_AGAIN_S: Final = 60.0
STORE_TOUCHES_MAX: Final = 4 * STORE_KEYS_MAX
# Reads in place are reported this long after the first of them. A server that has room
# for a few seconds of puts evicts none of these blocks earlier.
STORE_TOUCHES_S: Final = 0.2
# The first and the longest pause between checks whether a server's memory is mapped.
STORE_LOOK_S: Final = 0.01
STORE_LOOK_S_MAX: Final = 10.0

assert STORE_KEYS_MAX * (16 + STORE_HASH_BYTES_MAX) < (
    STORE_REQUEST_BYTES_MAX - STORE_INLINE_BYTES - 16 * KIB
)
assert STORE_SLAB_BYTES_MAX < 10_000 * STORE_OBJECT_PART_BYTES, "S3 takes no more parts"
assert STORE_REQUEST_BYTES_MAX <= EAGER_WINDOW_BYTES
