"""Bounds of stores and their servers, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import EAGER_BYTES_MAX, EAGER_WINDOW_BYTES, GIB, KIB, MIB, TIB

# A tier's room is cut into slabs, each of blocks of one size: a sixteenth, so that a
# small tier has some for several sizes, up to what holds a dozen blocks of a large
# model.
STORE_SLABS: Final = 16
STORE_SLAB_BYTES: Final = 64 * MIB
STORE_SLAB_BYTES_MIN: Final = 64 * KIB
STORE_SLAB_BYTES_MAX: Final = 16 * GIB
# Slots of one slab, so that tables by slot stay short: 64 KiB each in one of 64 MiB.
STORE_SLOTS_MAX: Final = 1024
STORE_TIER_BYTES_MAX: Final = 1024 * TIB
# SHA-256 has 32; engines put the number of the cache group behind it.
STORE_HASH_BYTES_MAX: Final = 64
# Moved between two looks at what else is to be done: enough to pay for a thread's
# wake-up, and little enough that a get and a put beside it take turns.
STORE_BATCH_BYTES: Final = 16 * MIB
# Kept free of blocks that no other tier has, so that a put rarely waits for a disk.
STORE_HEADROOM_BYTES: Final = 64 * MIB
# Up to here a put writes to a store server without asking first what is there. In vain,
# so much is sent.
STORE_UNASKED_BYTES: Final = 2 * MIB
# Of models, shards and groups that a disk has descriptions of.
STORE_NAMESPACES_MAX: Final = 4096
# Tenants of a store: each is a label's value in metrics, and a byte for each slot.
STORE_TENANTS_MAX: Final = 64
# The share of a tier that may be pinned, of all tenants together: what is pinned makes
# no room, so most of a tier must not be.
STORE_PINNED_SHARE: Final = 4
STORE_TTL_S_MAX: Final = 10 * 365 * 24 * 3600.0
# Blocks that one request names: 64 KiB blocks fill a berth with 256, and what is looked
# up for a prompt of 64 thousand tokens at 16 a block still fits.
STORE_KEYS_MAX: Final = 4096
# The body of a verb by HTTP: 4,096 hashes, or the tokens of half a million.
STORE_ORDER_BYTES_MAX: Final = 4 * MIB
# Of the answer to a verb: a few reasons for each tier, a tier's name for each of them,
# and the nodes of one tier of many.
STORE_REASONS_MAX: Final = 64
STORE_PLACES_MAX: Final = 64
# A verb may move a quarter of a server's memory, at the rate of a disk.
STORE_VERB_TIMEOUT_S: Final = 120.0
# With keys of 80 bytes each, a description, numbers, and images:
STORE_REQUEST_BYTES_MAX: Final = 512 * KIB
# Up to here images are in the request or the answer itself. Not less than what goes at
# once: a put that is refused would leave such a message behind, and the credit for it.
STORE_INLINE_BYTES: Final = EAGER_BYTES_MAX
# Requests of one client at once: they are small, and its transfers wait for a berth.
STORE_REQUESTS_MAX: Final = 64
# Memory of a server for one client's transfers, in berths of as much as a store moves
# at once: one is copied while the other one is on the wire.
STORE_BERTH_BYTES: Final = STORE_BATCH_BYTES
STORE_BERTHS: Final = 2
STORE_BERTHS_MAX: Final = 64
STORE_CLIENTS_MAX: Final = 256
# For the requests of all clients of a server, and the answers that they have not read:
# 256 KiB per client on average, a few small blocks each.
STORE_HELD_BYTES: Final = 64 * MIB
# And of their berths: as many transfers at once as a machine's links can carry.
STORE_BERTHS_BYTES: Final = 1024 * MIB
# The share of a server's memory that may be pinned while it is sent: with a quarter,
# what slow clients do not take costs the others no more than that.
STORE_LENT_SHARE: Final = 4
# Namespaces that a server describes to a new client, for its error messages.
STORE_NAMESPACES_TOLD: Final = 64
# A berth's bytes take 10 s at 1.6 MB/s; who is slower than that does not gain from it.
STORE_TIMEOUT_S: Final = 10.0
STORE_TIMEOUT_S_MAX: Final = 600.0
# Between the end of a transfer and the word that its memory is free, before the link
# that keeps it is ended; likewise for an answer, after its deadline.
STORE_GRACE_S: Final = 1.0
# A server that is gone is asked for again after a pause that doubles. Ten seconds of a
# cold cache after its return are little beside the minutes of its restart.
STORE_REDIAL_S: Final = 0.1
STORE_REDIAL_S_MAX: Final = 10.0
# Servers of one sharded tier: each is a connection, and a round trip of every match.
STORE_NODES_MAX: Final = 256
# A node of many that is slower than that costs a prompt more than its blocks are worth.
STORE_NODE_TIMEOUT_S: Final = 2.0
# What one pipeline to a Redis moves: its answers are in memory twice for a moment.
STORE_PIPELINE_BYTES: Final = 4 * MIB
# Requests of one object tier at once: at 20 ms each, 32 of 2 MiB are 3 GB/s.
STORE_OBJECT_REQUESTS: Final = 32
STORE_OBJECT_REQUESTS_MAX: Final = 1024
# A larger object goes in parts of so much, several at once, as S3's guidelines advise.
STORE_OBJECT_PART_BYTES: Final = 16 * MIB
STORE_OBJECT_PARTS: Final = 4
# Keys of which an object tier remembers whether they are there: 100 bytes each.
STORE_OBJECTS_KNOWN: Final = 256 * 1024
# For so long what others may have put meanwhile is not looked for again: a put asks
# three times whether its blocks are there.
STORE_OBJECT_ABSENT_S: Final = 2.0
# Uses of blocks not yet reported to the server: any beyond this number are lost. A tier
# that fails again this soon after it recovered is not logged again.
STORE_LOG_AGAIN_S: Final = 60.0
STORE_TOUCHES_MAX: Final = 4 * STORE_KEYS_MAX
# Blocks that are read in place are reported so long after the first of them: a server
# with room for the puts of some seconds evicts none of them before.
STORE_TOUCHES_S: Final = 0.2
# Of all recordings in one directory: 10 bytes for each block that is asked for.
STORE_RECORD_BYTES: Final = 1 * GIB
# Matches whose get has not been recorded: an engine has so many prompts waiting.
STORE_RECORD_CHAINS: Final = 256
# Pauses between two looks whether a server's memory is mapped, the first and the last.
STORE_LOOK_S: Final = 0.01
STORE_LOOK_S_MAX: Final = 10.0

assert STORE_KEYS_MAX * (16 + STORE_HASH_BYTES_MAX) < (
    STORE_REQUEST_BYTES_MAX - STORE_INLINE_BYTES - 16 * KIB
)
assert STORE_SLAB_BYTES_MAX < 10_000 * STORE_OBJECT_PART_BYTES, "S3 takes no more parts"
assert STORE_REQUEST_BYTES_MAX <= EAGER_WINDOW_BYTES
