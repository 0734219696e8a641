"""The bounds of the protocol and of the settings, with reasons; assertions relate them.

A number from a peer is compared with a bound before it is used. A bound that only one
file uses stands in that file. Units are in the names. If users may change a bound, it
is a default of :class:`kvwire.Config`, and the ``_MAX`` beside it is the largest value
that Config accepts.
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
# Control bodies contain numbers and names, never payload. NATS allows 4 KiB per control
# line; a handshake's offers (backend bootstraps, cache specs) need more.
CONTROL_BODY_BYTES_MAX: Final = 64 * KIB
# HMAC-SHA256 truncated to 128 bits, as in RFC 4868.
SEAL_BYTES: Final = 16

# --- payload --------------------------------------------------------------------------
# Field measurements put the knee of every transport between 256 KiB and 1 MiB.
CHUNK_BYTES: Final = 1 * MIB
CHUNK_BYTES_MIN: Final = 64 * KIB
# A cancel takes effect after at most one chunk, so at most 16 MiB later.
CHUNK_BYTES_MAX: Final = 16 * MIB
# Up to this size a message is sent with its header, and the receiver may have to hold
# it.
EAGER_BYTES: Final = 16 * KIB
# Four blocks of 64 KiB, and a store's own data for them.
EAGER_BYTES_MAX: Final = 264 * KIB
# The most bytes that a receiver holds for unreceived messages, per connection.
EAGER_WINDOW_BYTES: Final = 1 * MIB
EAGER_WINDOW_BYTES_MAX: Final = 64 * MIB
EAGER_WINDOW_MESSAGES: Final = 1024
# A part of a transfer up to this size is copied rather than lent to the link or placed
# by it: 5 us at most, and nothing holds its memory. Copies of larger parts cost more.
SMALL_SEGMENT_BYTES: Final = 64 * KIB
# The size of one request: enough for the KV cache of one long prompt of a 70B-class
# model.
REQUEST_BYTES_MAX: Final = 64 * GIB
# `recv(tag)` without a buffer allocates at most this, whatever the sender announces.
MESSAGE_BYTES: Final = 256 * MIB
# Payload bytes that a connection queues on one link before it waits for the link: two
# chunks keep the wire busy, and a third would only delay a more urgent one.
LINK_QUEUE_BYTES: Final = 2 * MIB
# Bytes that a link may move in one wake-up of the loop before others get their turn: a
# chunk and the frames before it, in a quarter of a millisecond. 4 MiB are no faster.
WAKEUP_BYTES: Final = CHUNK_BYTES + 64 * KIB

# --- lanes ----------------------------------------------------------------------------
# Data paths beside the control link, which is number 0. Several sockets help if one
# core cannot saturate the network; more than eight bring nothing.
LANES_MAX: Final = 16
# Lanes are numbered for the life of a connection, and numbers are never reused, because
# a lane's secret is derived from its number. 4 bytes last 136 years at one lane a
# second.
LANE_NUMBER_MAX: Final = 2**32 - 1
# The bootstrap data of a lane for the other side. UCX worker addresses are the longest:
# a few hundred bytes for each device of the host.
BOOTSTRAP_BYTES_MAX: Final = 8 * KIB
# A payload's descriptor for the receiver's lane. On the same host it lists addresses:
# for one chunk of 1 MiB in fragments of 512 bytes, 16 bytes each.
DESCRIPTOR_BYTES_MAX: Final = 32 * KIB
# Bytes a lane may move in one wake-up: half a millisecond, since it copies once.
LANE_WAKEUP_BYTES: Final = 4 * MIB
# The most payloads on one lane that the receiver has not taken yet.
LANE_PAYLOADS_MAX: Final = 256
# The size of one payload on a lane if chunks are smaller: 8 MiB make the overhead per
# payload negligible. A receiver for a device has STAGING_SLOTS of these in pinned
# memory.
SPAN_BYTES_MAX: Final = 8 * MIB
# The most pieces in such a payload: one system call takes this many, and a descriptor
# needs 4 to 8 bytes for each.
SPAN_PIECES_MAX: Final = 1024
# A lane's share of the time that is left until the connection must be usable, after
# which the next transport is tried, and its share if no other is left, or on the
# answering side: 2 and 4 s by default. On a large or busy host, UCX needs seconds for
# its first scan of the devices.
LANE_TIMEOUT_SHARE: Final = 0.4
LANE_TIMEOUT_SHARE_LAST: Final = 0.8

# --- tables ---------------------------------------------------------------------------
# The most requests open at once per connection and side.
REQUESTS_MAX: Final = 4096
# A transfer's priority: higher ones go first. One byte on the wire.
PRIORITY_MAX: Final = 255

# The most distinct geometries that read the windows of one connection.
WINDOW_VIEWS_MAX: Final = 64
# One frame names at most this many blocks, with 12 bytes each; their payload is sent as
# one request. A larger get needs several frames.
WINDOW_GET_BLOCKS_MAX: Final = 4096
WINDOW_GET_BYTES_MAX: Final = 64 * MIB
# A get up to this size is answered in one frame, gathered in the link's memory. One
# reader may have this many bytes of such gets outstanding.
WINDOW_DATA_BYTES_MAX: Final = 256 * KIB
WINDOW_DATA_ASKED_MAX: Final = 1 * MIB
# The addresses of a window's tensors, 8 bytes for each layer's keys and values, and a
# lane's data for reading them. If they need more room, the window is read by messages.
WINDOW_MEMORY_BYTES_MAX: Final = 20 * KIB
WINDOW_ACCESS_BYTES_MAX: Final = 20 * KIB
WINDOW_GEOMETRY_BYTES_MAX: Final = 20 * KIB
# Control bytes queued for one peer; beyond this the peer is a slow consumer. NATS
# allows 64 MiB, but that includes payload.
CONTROL_QUEUE_BYTES_MAX: Final = 4 * MIB
# Connections per listener.
CONNECTIONS_MAX: Final = 4096
# Connections, transfers and calls in a snapshot: a megabyte of JSON at most.
SNAPSHOT_ROWS_MAX: Final = 1000
# kvwire has six; the rest is room for other distributions.
BACKENDS_MAX: Final = 32
# The limit of glibc's CPU_SETSIZE, and so of os.sched_setaffinity.
CPU_MAX: Final = 1023
# A profile's pairs of texts: the spec of one cache has thirteen.
PROFILE_FIELDS_MAX: Final = 256

# --- KV caches ------------------------------------------------------------------------
# Limits for a peer's description of its cache. Today's largest models have 128 layers
# and 5 groups.
KV_LAYERS_MAX: Final = 4096
KV_BLOCK_TOKENS_MAX: Final = 65_536
KV_GROUPS_MAX: Final = 64
# Blocks in the list of one transfer: 10 million tokens at 4 tokens a block fit.
KV_BLOCKS_MAX: Final = 4 * 1024 * 1024

# The most segments, and marks, of one transfer: 80 layers of 800 prefill chunks.
SEGMENTS_MAX: Final = 65_536
# A longer mark is divided, because a lost link makes us send up to one segment again.
SEGMENT_BYTES: Final = 16 * MIB
# A cache group of a transfer may consist of KV_PIECES_MAX pieces of this side's memory,
# or of more if they have at least KV_PIECE_BYTES on average. The peer's layout
# determines their number, and each needs 24 bytes of tables. The smallest heads of real
# models have 64 elements of one byte.
KV_PIECES_MAX: Final = 1024 * 1024
KV_PIECE_BYTES: Final = 64
# Cached results for pairs of descriptions, and for transfers of the same sizes: a
# server's requests have hundreds of lengths. Beyond this number the oldest is computed
# again.
KV_TEMPLATES_MAX: Final = 1024
# Consecutive layers are sent together up to this size: announcing a smaller layer costs
# more than sending it early gains.
GROUP_BYTES: Final = 256 * KIB
# The most boxes that a consumer reports as landed when it resumes on another link, each
# in up to 26 bytes. Layers that arrived in order form one box.
LANDED_BOXES_MAX: Final = 1000
LANDED_BOX_BYTES: Final = 26
# The most segments that one SEGMENT_ACK or the COMMIT_ACK may name, in up to 5 bytes
# each.
LANDED_MAX: Final = 1024
SETTLED_MAX: Final = 8192
# The most unmatched transfers that a peer has opened, with their descriptions.
TRANSFERS_WAITING_MAX: Final = 1024
TRANSFER_ID_BYTES_MAX: Final = 256
DESCRIPTION_BYTES_MAX: Final = 48 * KIB
# The most FINs of producers that may wait together for a frame that can carry them.
LAST_FINS_MAX: Final = 64
# A SEGMENT_ACK waits for up to this many segments, and no longer than a FIN may wait:
# one frame per segment would be a third of a small layer's cost. Also the most small
# layers that are in flight separately before later ones are joined.
SEGMENTS_TOGETHER: Final = 8

# --- strings --------------------------------------------------------------------------
NAME_CHARS_MAX: Final = 128
KEY_ID_BYTES: Final = 16
REASON_CHARS_MAX: Final = 200

# --- time -----------------------------------------------------------------------------
# NATS gives 2 s to authenticate and 2 s for TLS; asyncio's 60 s is far too long.
HANDSHAKE_TIMEOUT_S: Final = 5.0
# Servers in the field take 20 s to 2 min. A decode worker holds GPU memory meanwhile,
# so a dead peer is known after 3 missed pings of 2 s.
PING_INTERVAL_S: Final = 2.0
PING_MISSES: Final = 3
# More pings a second would not add information.
PING_INTERVAL_MIN_S: Final = 0.2
# With a single miss, a silent peer would be dead before it was pinged.
PING_MISSES_MIN: Final = 2
# For more patience, set longer intervals.
PING_MISSES_MAX: Final = 10
CLOSE_TIMEOUT_S: Final = 5.0
# How much longer the end of a link may take on a busy loop.
CLOSE_SLACK_S: Final = 1.0
# How long an unmatched or interrupted transfer holds its blocks; vLLM's is 30 s as
# well.
LEASE_S: Final = 30.0
# If a peer's link was reset, or its port refuses connections, its process has probably
# ended: it gets this long to return on another link. A live peer dials again within a
# tenth of it.
RESTART_GRACE_S: Final = 1.0
# A transfer that is open this long is logged once, with the reason for its wait.
WAITING_LOG_S: Final = 10.0
# The kernel's sun_path, with its final zero, on every system that kvwire runs on.
SOCKET_PATH_BYTES: Final = 103
# The most memory that may wait for its release before new transfers are refused.
QUARANTINE_BYTES: Final = 4 * GIB
# How long an address of a name may take to answer before the next one is dialled as
# well: the default of RFC 8305, 5.
DIAL_DELAY_S: Final = 0.25
# How late our own loop may be before the stall counts as ours instead of the peer's.
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
