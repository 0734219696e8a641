"""The bounds that several rooms share, with reasons; assertions relate them.

A number from a peer is compared with a bound before it is used. A bound that concerns
only one room is in that room's ``limits.py``. Units are in the names. If users may
change a bound, it is a default of :class:`kvwire.Config`, and the ``_MAX`` beside it is
the largest value that Config accepts.
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

WINDOWS_MAX: Final = 1024
# Of each connection: the windows of the peer that are open, and their readers' caches
# of different shape.
WINDOWS_OPEN_MAX: Final = 1024
WINDOW_VIEWS_MAX: Final = 64
# One frame names this many blocks, with 12 bytes each; their payload is sent as one
# request. A larger get is several of these.
WINDOW_GET_BLOCKS_MAX: Final = 4096
WINDOW_GET_BYTES_MAX: Final = 64 * MIB
# The blocks of a small get come in one frame, gathered in memory of the link; and the
# bytes of such gets that one reader may have asked for at a time.
WINDOW_DATA_BYTES_MAX: Final = 256 * KIB
WINDOW_DATA_ASKED_MAX: Final = 1 * MIB
# The addresses of a window's tensors, 8 bytes for each layer of keys and of values, and
# what a lane needs to read them. Without room for these it is read by messages.
WINDOW_MEMORY_BYTES_MAX: Final = 20 * KIB
WINDOW_ACCESS_BYTES_MAX: Final = 20 * KIB
WINDOW_GEOMETRY_BYTES_MAX: Final = 20 * KIB
# Control bytes queued towards one peer; beyond it the peer is a slow consumer. NATS
# allows 64 MiB, but that is payload.
CONTROL_QUEUE_BYTES_MAX: Final = 4 * MIB
# Connections per listener.
CONNECTIONS_MAX: Final = 4096
# Connections, transfers and calls in a snapshot: a megabyte of JSON at most.
SNAPSHOT_ROWS_MAX: Final = 1000
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
# The kernel's sun_path, with its final zero, on every system that kvwire runs on.
SOCKET_PATH_BYTES: Final = 103
# Memory that may wait to be let go of before new transfers are refused.
QUARANTINE_BYTES: Final = 4 * GIB
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
assert WINDOW_DATA_ASKED_MAX < CONTROL_QUEUE_BYTES_MAX
assert 12 * WINDOW_GET_BLOCKS_MAX + KIB < CONTROL_BODY_BYTES_MAX
assert SPAN_PIECES_MAX * 8 < DESCRIPTOR_BYTES_MAX - KIB
assert DESCRIPTOR_BYTES_MAX + KIB < CONTROL_BODY_BYTES_MAX
assert BOOTSTRAP_BYTES_MAX + KIB < CONTROL_BODY_BYTES_MAX
assert PING_INTERVAL_S * PING_MISSES <= 6.5, "a dead peer is known within 6.5 s"
assert PING_MISSES_MIN <= PING_MISSES <= PING_MISSES_MAX
assert PING_INTERVAL_MIN_S * PINGS_PER_SECOND_MAX >= 2
