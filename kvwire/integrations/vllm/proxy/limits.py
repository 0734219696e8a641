"""Bounds of the proxy before engines, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import KIB, MIB

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
