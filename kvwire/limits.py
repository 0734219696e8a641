"""Every bound of kvwire in one place, each with its reason, related by assertions.

A number from a peer is compared with one of these before it is used for anything. Units
are in the names. Those a user may change are defaults of :class:`kvwire.Config`; the
``_MAX`` beside them is as far as they go.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
TIB: Final = 1024 * GIB

# --- frames ---------------------------------------------------------------------------
# Fixed, so that a link can receive a header without knowing anything else.
HEADER_BYTES: Final = 32
# A whole handshake message is 256 bytes: QUIC and TLS fit their first flight in one
# packet as well, and nothing of unknown length is parsed before authentication.
HANDSHAKE_BODY_BYTES: Final = 256 - HEADER_BYTES
# Control bodies carry numbers and names, never payload. NATS allows 4 KiB a control
# line; the offers of a handshake (backend bootstraps, cache specs) need more.
CONTROL_BODY_BYTES_MAX: Final = 64 * KIB
# HMAC-SHA256 truncated to 128 bits, as in RFC 4868.
SEAL_BYTES: Final = 16

# --- payload --------------------------------------------------------------------------
# Field measurements put the knee of every transport between 256 KiB and 1 MiB.
CHUNK_BYTES: Final = 1 * MIB
CHUNK_BYTES_MIN: Final = 64 * KIB
# Keeps a cancel at most one chunk, that is 16 MiB, late.
CHUNK_BYTES_MAX: Final = 16 * MIB
# Up to here a message travels with its header, and the receiver may have to hold it.
EAGER_BYTES: Final = 16 * KIB
# A block of 64 KiB, and what a store says beside it.
EAGER_BYTES_MAX: Final = 72 * KIB
# What the receiver holds for messages nobody has asked for yet, per connection.
EAGER_WINDOW_BYTES: Final = 1 * MIB
EAGER_WINDOW_BYTES_MAX: Final = 64 * MIB
EAGER_WINDOW_MESSAGES: Final = 1024
# Tags of one connection whose messages are dropped; the oldest is forgotten first. Each
# is for the late answer of a cancelled request, which comes soon or never.
DISCARDED_TAGS_MAX: Final = 4096
# One request: the KV cache of one long prompt of a 70B-class model fits.
REQUEST_BYTES_MAX: Final = 64 * GIB
# `recv(tag)` without a buffer allocates at most this, whatever the sender announces.
MESSAGE_BYTES: Final = 256 * MIB
# Bulk bytes that a connection hands to one link before it waits for that link: two
# chunks keep the wire busy, and a third would only delay a more urgent one.
LINK_QUEUE_BYTES: Final = 2 * MIB
# Bytes a link may move in one wake-up of the loop before others get their turn: a chunk
# with what goes before it, in a quarter of a millisecond. 4 MiB are no faster.
WAKEUP_BYTES: Final = CHUNK_BYTES + 64 * KIB

# --- lanes ----------------------------------------------------------------------------
# Data paths beside one control link, which is number 0. Several sockets help while one
# core cannot fill the wire: beyond eight they only share it.
LANES_MAX: Final = 16
# Lanes are numbered for the life of a connection, and a number is never used again: it
# makes the lane's secret, of which 4 bytes are its. One a second lasts for 136 years.
LANE_NUMBER_MAX: Final = 2**32 - 1
# What a lane's other side needs to come up: UCX worker addresses are the longest, a few
# hundred bytes for each device of the host.
BOOTSTRAP_BYTES_MAX: Final = 8 * KIB
# What names a payload to the receiver's lane. Where it lies, on the same host: one
# chunk of 1 MiB in fragments of 512 bytes at 16 bytes each.
DESCRIPTOR_BYTES_MAX: Final = 32 * KIB
# Bytes a lane may move in one wake-up: half a millisecond, since it copies once.
LANE_WAKEUP_BYTES: Final = 4 * MIB
# Payloads that one lane has and the receiver has not taken yet.
LANE_PAYLOADS_MAX: Final = 256
# One payload on a lane where a chunk is smaller: 8 MiB pay for what a payload costs
# beside its bytes. A receiver for a device has STAGING_SLOTS of them in pinned memory.
SPAN_BYTES_MAX: Final = 8 * MIB
# Pieces of such a payload: a descriptor names each in 4 to 8 bytes, and one system call
# takes as many.
SPAN_PIECES_MAX: Final = 1024
# How long a lane may take to come up before the next transport is tried.
LANE_TIMEOUT_S: Final = 2.0
# The same where no other transport is left, and on the side that answers. A first look
# at the devices of a large or busy host takes UCX seconds.
LANE_TIMEOUT_LAST_S: Final = 4.0
# A lane that broke is raised again after a pause, doubling with jitter. What broke has
# hardly recovered within a second, and a try makes a half on both sides: threads and
# registered memory. A minute is a small part of an outage that has lasted one already.
RERAISE_S: Final = 1.0
RERAISE_S_MAX: Final = 60.0

# --- staging --------------------------------------------------------------------------
# Chunks of a device's memory in pinned host memory, per connection and direction: one
# is copied, one moves on the wire, and one waits, so that neither waits for the other.
STAGING_SLOTS: Final = 3

# --- tables ---------------------------------------------------------------------------
# Requests open at once per connection and side.
REQUESTS_MAX: Final = 4096
# Chunks that one link has and has not reported as sent. A get that only waits for that
# is over for the peer, so admitting twice REQUESTS_MAX never refuses an honest one.
LINK_CHUNKS_MAX: Final = REQUESTS_MAX
# Of a transfer: a higher one goes first. One byte on the wire.
PRIORITY_MAX: Final = 255
# Request numbers are 32 bits and never reused within a connection.
REQUEST_ID_MAX: Final = 2**32 - 1
# Rows of tables: a program with more of them open has forgotten to close some.
GRANTS_MAX: Final = 65_536
REGIONS_MAX: Final = 65_536
# Control bytes queued towards one peer; beyond it the peer is a slow consumer. NATS
# allows 64 MiB, but that is payload.
CONTROL_QUEUE_BYTES_MAX: Final = 4 * MIB
# Connections per listener, and handshakes that may be pending on it. At 32 KiB each
# (tests/fault/test_strangers.py), strangers pin at most 8 MiB together.
CONNECTIONS_MAX: Final = 4096
PENDING_HANDSHAKES_MAX: Final = 256
# Six are here; the others are room for those of other distributions.
BACKENDS_MAX: Final = 32
# What CPU_SETSIZE of glibc has room for, and with it os.sched_setaffinity.
CPU_MAX: Final = 1023
# What a side says of itself, in pairs of texts: the spec of one cache has thirteen.
PROFILE_FIELDS_MAX: Final = 256

# --- KV caches ------------------------------------------------------------------------
# What a peer may say about its cache. The widest models of today have 128 layers, 128
# KV heads, heads of 576 elements and 5 groups; tensor parallelism stays below 1024.
KV_LAYERS_MAX: Final = 4096
KV_HEADS_MAX: Final = 4096
KV_HEAD_DIM_MAX: Final = 65_536
# A recurrent state of one layer; those of 2026 have up to 20 MiB.
KV_STATE_BYTES_MAX: Final = 1024 * MIB
KV_BLOCK_TOKENS_MAX: Final = 65_536
KV_SHARDS_MAX: Final = 4096
KV_GROUPS_MAX: Final = 64
# Blocks in the list of one transfer: 10 million tokens at 4 tokens a block fit.
KV_BLOCKS_MAX: Final = 4 * 1024 * 1024

# Segments of one transfer: 80 layers of 800 prefill chunks. What they name of a box.
SEGMENTS_MAX: Final = 65_536
# A longer mark is cut: what a lost link makes us send again is at most one segment.
SEGMENT_BYTES: Final = 16 * MIB
# What a producer may mark at once, unless it is a single granule: cutting into equal
# pieces makes them less than twice as long. The consumer lays out all of it in one go.
SEGMENT_BYTES_MAX: Final = 2 * SEGMENT_BYTES
# Bytes of one transfer that a link has at once: to look up where their fragments lie
# holds the loop of either side for half a millisecond. The wire never waits for more.
AHEAD_BYTES: Final = 4 * SEGMENT_BYTES
# Pieces of this side's memory in one cache group of a transfer, each at 24 bytes of
# tables. A peer's layout decides how many they are: as many as this, or of so many
# bytes on average. The smallest heads of real models have 64 elements of one byte.
KV_PIECES_MAX: Final = 1024 * 1024
KV_PIECE_BYTES: Final = 64
# What follows from two descriptions is kept for transfers of the same sizes, and what
# follows from a range of layers; when there are more, they are computed again.
KV_TEMPLATES_MAX: Final = 64
KV_TEMPLATE_STEPS_MAX: Final = 4096
# Layers smaller than this together travel together: below it a layer costs more to
# announce than its transfer hides.
GROUP_BYTES: Final = 256 * KIB
# Boxes a consumer names as landed when it goes on with another link, each in up to 26
# bytes. Layers that came one after the other are one box.
LANDED_BOXES_MAX: Final = 1000
LANDED_BOX_BYTES: Final = 26
# Ids of transfers that have ended badly, kept to answer those who ask too late.
TOMBSTONES_MAX: Final = 4096
# Segments one SEGMENT_ACK, and the one COMMIT_ACK, may name: 5 bytes each at most.
LANDED_MAX: Final = 1024
SETTLED_MAX: Final = 8192
# Transfers a peer has opened that nobody has matched, with their descriptions.
TRANSFERS_WAITING_MAX: Final = 1024
# Memory for these descriptions and their records, per connection and over all: 8 KiB
# for each that may wait, enough for some hundred groups or a partial redial.
WAITING_BYTES_MAX: Final = 8 * MIB
WAITING_BYTES_ALL_MAX: Final = 64 * MIB
# What one takes beside its description.
WAITING_RECORD_BYTES: Final = 2 * KIB
TRANSFER_ID_BYTES_MAX: Final = 256
DESCRIPTION_BYTES_MAX: Final = 48 * KIB
# A producer's last word waits so long for a frame that it can ride on, with so many
# others: a fraction of what a wake-up of both sides costs a busy loop.
LAST_WORD_DELAY_S: Final = 0.02
LAST_WORDS_MAX: Final = 64
# Segments that one SEGMENT_ACK waits for, as long as a last word does: a frame for each
# would be a third of what a small layer costs. As many small layers at most are under
# way by themselves, before those behind them go together.
SEGMENTS_TOGETHER: Final = 8

# --- stores ---------------------------------------------------------------------------
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
# Of a device's cache through one pinned slot: over PCIe it takes a fifth of a
# millisecond, many times as long as to queue it. Each store pins four of them.
STORE_PIECE_BYTES: Final = 4 * MIB
# Kept free of blocks that no other tier has, so that a put rarely waits for a disk.
STORE_HEADROOM_BYTES: Final = 64 * MIB
# Up to here a get reads from a store server, and a put writes to it, without asking
# first what is there. In vain, room for so much is made, or so much is sent.
STORE_UNASKED_BYTES: Final = 2 * MIB
# Of models, shards and groups that a disk has descriptions of.
STORE_NAMESPACES_MAX: Final = 4096
# Tenants of a store: each is a label's value in metrics, and a byte for each slot.
STORE_TENANTS_MAX: Final = 64
# The share of a tier that may be pinned, of all tenants together: what is pinned makes
# no room, so most of a tier must not be.
STORE_PINNED_SHARE: Final = 4
STORE_TTL_S_MAX: Final = 10 * 365 * 24 * 3600.0

# --- store servers --------------------------------------------------------------------
# Blocks that one request names: 64 KiB blocks fill a berth with 256, and what is looked
# up for a prompt of 64 thousand tokens at 16 a block still fits.
STORE_KEYS_MAX: Final = 4096
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

# --- migration ------------------------------------------------------------------------
# What an engine says of a request besides its KV: a million tokens of 4 bytes.
MIGRATION_STATE_BYTES_MAX: Final = 4 * MIB
# Rounds of copying while the request goes on. A round takes a fraction of the one
# before, so four leave a block or less, unless the wire is slower than the engine.
MIGRATION_ROUNDS: Final = 8
MIGRATION_ROUNDS_MAX: Final = 64
# Requests that one connection brings at once; each may hold blocks of the engine.
MIGRATIONS_MAX: Final = 256
# A prompt of 10 GB takes 10 s at 1 GB/s.
MIGRATION_TIMEOUT_S: Final = 30.0

# --- directories ----------------------------------------------------------------------
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
# A task of a library that has swallowed its cancellation is cancelled again.
CANCEL_AGAIN_S: Final = 0.2
# How often a directory that cannot push is looked at: a folder costs one system call a
# member, and a resolver a round trip.
FILE_INTERVAL_S: Final = 0.5
DNS_INTERVAL_S: Final = 5.0
# How often the endpoints of Kubernetes are listed anew; changes come at once.
KUBERNETES_INTERVAL_S: Final = 30.0
# What its API server may say at once: 1,000 endpoints have half a megabyte.
KUBERNETES_ANSWER_BYTES_MAX: Final = 16 * MIB

# Peers that one communicator knows by name; each may hold a connection.
PEERS_MAX: Final = 4096
# Members that are tried in one round, and the longest pause between two rounds. So a
# directory full of forged records costs 16 attempts a second and no more.
PEER_ATTEMPTS_MAX: Final = 16
PEER_REDIAL_S_MAX: Final = 1.0

# --- the proxy before engines ---------------------------------------------------------
# Requests that have an engine, and that wait for one: 10 KiB each, and what they say.
PROXY_RUNNING_MAX: Final = 1024
PROXY_WAITING_MAX: Final = 1024
# What is under way has so long to end after SIGTERM. Kubernetes kills 30 s after that,
# unless it is told otherwise.
PROXY_STOP_S: Final = 25.0
PROXY_STOP_S_MAX: Final = 86400.0
# The longest wait that a rejected client is asked for.
PROXY_RETRY_AFTER_S_MAX: Final = 60
# Tries beyond each request's first: a fifth of the requests, so that a fleet that fails
# is asked 1.2 times as much and not once for each engine; and as many in reserve, and
# one more a second, so that few requests have some as well.
PROXY_RETRY_SHARE: Final = 0.2
PROXY_RETRY_RESERVE: Final = 20.0
PROXY_RETRY_MAX: Final = 200.0
# Engines that a request may fail on: it may be why they die, and one more would cost a
# fleet half as much again.
PROXY_FAILED_ON_MAX: Final = 2
# Of a client's request: a prompt of a million tokens has 7 MB, pictures are some more.
PROXY_BODY_BYTES_MAX: Final = 64 * MIB
# Of the bodies of all requests under way: each is kept until its answer ends, as bytes
# and decoded, and encoded for two engines while it is sent.
PROXY_BODIES_BYTES_MAX: Final = 512 * MIB
# Values in a body: a number counts 1, an object or a list 8, since each costs 64 bytes
# and more. A prompt of a million tokens uses 1/4 of it.
PROXY_BODY_VALUES_MAX: Final = 4_194_304
# Time for a body to arrive, and a second more for each 64 KiB received.
PROXY_BODY_S: Final = 20.0
PROXY_BODY_BYTES_PER_S: Final = 64 * KIB
# The body of an operator's request: a name or two.
PROXY_ORDER_BYTES_MAX: Final = 64 * KIB
# A request's line, each of its headers, and how many of them: as much as nginx takes.
PROXY_HEADER_BYTES_MAX: Final = 8 * KIB
PROXY_HEADERS_MAX: Final = 100
# A connection that has no request under way is closed after so long, also one that has
# sent half a head. Balancers keep them for 60 s.
PROXY_IDLE_S: Final = 75.0
# Connections beyond those with a request; above it, the oldest idle one is closed.
PROXY_IDLE_MAX: Final = 1024
# A client that reads nothing of its answer for this long is cut.
PROXY_UNREAD_S: Final = 60.0
# Ranks of one engine, as records of a directory say.
PROXY_RANKS_MAX: Final = 64
# What an engine may say at /health: vLLM says nothing but the status.
PROXY_HEALTH_BYTES_MAX: Final = 64 * KIB
# Of a stream's event; the first one lists the prompt's tokens, of which a million are
# 7 MB.
PROXY_EVENT_BYTES_MAX: Final = 16 * MIB
# A request that moves has no token for so long at most; then its engine keeps it.
PROXY_MOVE_S: Final = 10.0
# At once, of one engine that is drained: each costs its target the KV of a prompt.
PROXY_MOVES_MAX: Final = 8
# Blocks of one engine's cache that the proxy knows of, of 200 bytes there: the 141 GB
# of a GPU have some 100,000 of 16 tokens. And one message of them.
KV_EVENT_BLOCKS_MAX: Final = 1_000_000
KV_EVENT_BYTES_MAX: Final = 16 * MIB

# --- strings --------------------------------------------------------------------------
NAME_CHARS_MAX: Final = 128
KEY_ID_BYTES: Final = 16
# SHA-256 of two certificates, the client's and the server's.
BINDING_BYTES: Final = 64
PSK_BYTES_MIN: Final = 32
PSK_BYTES_MAX: Final = 1024
REASON_CHARS_MAX: Final = 200
# websockets truncates what it logs of a peer to 75 characters.
LOG_CHARS_MAX: Final = 75

# --- time -----------------------------------------------------------------------------
# NATS gives 2 s to authenticate and 2 s for TLS; asyncio's 60 s is far too long.
HANDSHAKE_TIMEOUT_S: Final = 5.0
# Servers in the field take 20 s to 2 min. A decode worker holds GPU memory meanwhile,
# so a dead peer is known after 3 missed pings of 2 s.
PING_INTERVAL_S: Final = 2.0
PING_MISSES: Final = 3
# More pings a second would say nothing that fewer do not.
PING_INTERVAL_MIN_S: Final = 0.2
# With one, a silent peer would be dead before it was asked.
PING_MISSES_MIN: Final = 2
# For more patience, set longer intervals.
PING_MISSES_MAX: Final = 10
# Twice what an honest peer sends at the shortest interval; gRPC disconnects a client
# that pings too often as well.
PINGS_PER_SECOND_MAX: Final = 10
# So many may come at once when a wire heals that was silent for ten minutes.
PINGS_SAVED_MAX: Final = 6000
CLOSE_TIMEOUT_S: Final = 5.0
# What the end of a link may take beyond that, on a loop that is busy.
CLOSE_SLACK_S: Final = 1.0
# How long an unmatched or interrupted transfer holds its blocks; vLLM's is 30 s as
# well.
LEASE_S: Final = 30.0
# A peer whose link was reset, or whose port is refused, has ended: it has so long to be
# back with another link. One that lives dials again within a tenth of it.
RESTART_GRACE_S: Final = 1.0
# A transfer that is open for so long is named in the log, once, with what it waits for.
WAITING_LOG_S: Final = 10.0
# How often a host refused for its key is a WARNING; refusals in between are INFO.
REFUSED_LOG_S: Final = 60.0
REFUSED_HOSTS_MAX: Final = 256
# Connections and transfers in a snapshot: a megabyte of JSON at most.
SNAPSHOT_ROWS_MAX: Final = 1000
# Events that `kvwire trace` sees of a process: 400 transfers of 32 layers, 4 MB.
TRACE_EVENTS_MAX: Final = 16_384
# Those who watch one process at a time, and what they may ask in a line.
INSPECT_CLIENTS_MAX: Final = 8
INSPECT_LINE_BYTES_MAX: Final = 4096
# What the process answers in a line: a snapshot or a trace, several times over.
INSPECT_ANSWER_BYTES_MAX: Final = 64 * MIB
# The kernel's sun_path, with its final zero, on every system that kvwire runs on.
SOCKET_PATH_BYTES: Final = 103
# Memory that may wait to be let go of before new transfers are refused.
QUARANTINE_BYTES: Final = 4 * GIB
# Redialling after a lost connection: the first try at once, then doubling with jitter.
REDIAL_S: Final = 0.05
REDIAL_S_MAX: Final = 0.5
# An address of a name has so long to answer before the next is dialled beside it: the
# default of RFC 8305, 5.
DIAL_DELAY_S: Final = 0.25
# An outcome that there was no memory for is tried again after this.
NO_MEMORY_S: Final = 0.1
# How late our own loop may be before we say that we, and not the peer, had stalled.
STALL_TOLERANCE_S: Final = 0.25

assert HEADER_BYTES + HANDSHAKE_BODY_BYTES == 256
assert CHUNK_BYTES_MIN <= CHUNK_BYTES <= CHUNK_BYTES_MAX <= REQUEST_BYTES_MAX
assert EAGER_BYTES <= EAGER_BYTES_MAX <= CHUNK_BYTES
assert EAGER_BYTES_MAX <= EAGER_WINDOW_BYTES <= EAGER_WINDOW_BYTES_MAX
assert MESSAGE_BYTES <= REQUEST_BYTES_MAX
assert DESCRIPTION_BYTES_MAX + TRANSFER_ID_BYTES_MAX < CONTROL_BODY_BYTES_MAX - KIB
assert LANDED_BOX_BYTES * LANDED_BOXES_MAX < DESCRIPTION_BYTES_MAX - 16 * KIB
assert 5 * SETTLED_MAX < CONTROL_BODY_BYTES_MAX - KIB
assert CONTROL_BODY_BYTES_MAX < CONTROL_QUEUE_BYTES_MAX
assert SPAN_PIECES_MAX * 8 < DESCRIPTOR_BYTES_MAX - KIB
assert DESCRIPTOR_BYTES_MAX + KIB < CONTROL_BODY_BYTES_MAX
assert BOOTSTRAP_BYTES_MAX + KIB < CONTROL_BODY_BYTES_MAX
assert LANE_TIMEOUT_S < LANE_TIMEOUT_LAST_S < HANDSHAKE_TIMEOUT_S
assert PING_INTERVAL_S * PING_MISSES <= 6.5, "a dead peer is known within 6.5 s"
assert PING_MISSES_MIN <= PING_MISSES <= PING_MISSES_MAX
assert PING_INTERVAL_MIN_S * PINGS_PER_SECOND_MAX >= 2
assert STORE_KEYS_MAX * (16 + STORE_HASH_BYTES_MAX) < (
    STORE_REQUEST_BYTES_MAX - STORE_INLINE_BYTES - 16 * KIB
)
assert STORE_SLAB_BYTES_MAX < 10_000 * STORE_OBJECT_PART_BYTES, "S3 takes no more parts"
assert STORE_REQUEST_BYTES_MAX <= EAGER_WINDOW_BYTES

# --- benchmarks against a peer --------------------------------------------------------
# A call and its answer: the report of a doctor is the largest, some 20 KiB a host.
BENCH_CALL_BYTES_MAX: Final = 1 * MIB
# Of one work: 4 GiB in fragments of 4 KiB, which are some 32 MiB of addresses.
BENCH_FRAGMENTS_MAX: Final = 1024 * 1024
BENCH_IN_FLIGHT_MAX: Final = 64
# Connections that are served at a time, each with memory of its own.
BENCH_PEERS_MAX: Final = 8
