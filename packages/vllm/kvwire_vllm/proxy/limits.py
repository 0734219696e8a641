"""Bounds of the proxy, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import KIB, MIB

# Requests at once, those that wait at an engine included: 10 KiB each, plus their
# bodies.
PROXY_RUNNING_MAX: Final = 2048
# Running requests may take this long to end after SIGTERM. By default Kubernetes kills
# the process 30 s after that.
PROXY_STOP_S: Final = 25.0
PROXY_STOP_S_MAX: Final = 86400.0
# Retries may add a fifth to all requests, so that a failing fleet gets 1.2 times the
# work and not a multiple. The reserve is just as large, and grows by one each second,
# so that a proxy with few requests can retry too.
PROXY_RETRY_SHARE: Final = 0.2
PROXY_RETRY_RESERVE: Final = 20.0
PROXY_RETRY_MAX: Final = 200.0
# A request that has failed on this many engines is not retried: it may be the cause. A
# limit of 3 would cost the fleet half as many failures again.
PROXY_FAILED_ON_MAX: Final = 2
# The body of a client's request: a prompt of a million tokens has 7 MB, pictures some
# more.
PROXY_BODY_BYTES_MAX: Final = 64 * MIB
# The bodies of all running requests together. Each is kept until its answer ends, as
# bytes and decoded, and encoded for two engines while it is sent.
PROXY_BODIES_BYTES_MAX: Final = 512 * MIB
# Values in a body: a number counts 1, an object or a list 8, since each costs 64 bytes
# and more. A prompt of a million tokens uses 1/4 of it.
PROXY_BODY_VALUES_MAX: Final = 4_194_304
# The time for a body to arrive; each 64 KiB received add a second.
PROXY_BODY_S: Final = 20.0
PROXY_BODY_BYTES_PER_S: Final = 64 * KIB
# The body of an operator's request: a name or two.
PROXY_ORDER_BYTES_MAX: Final = 64 * KIB
# A request's line, each of its headers, and their number: as much as nginx accepts.
PROXY_HEADER_BYTES_MAX: Final = 8 * KIB
PROXY_HEADERS_MAX: Final = 100
# A connection without a complete request is closed after this time. Load balancers keep
# idle connections for 60 s.
PROXY_IDLE_S: Final = 75.0
# Connections beyond those of running requests; above it, the oldest idle one is closed.
PROXY_IDLE_MAX: Final = 1024
# A client that reads none of its answer for this long is disconnected.
PROXY_UNREAD_S: Final = 60.0
# An engine's answer to /health; vLLM sends only a status.
PROXY_HEALTH_BYTES_MAX: Final = 64 * KIB
# One event of a stream; the first one lists the prompt's tokens, and a million of those
# are 7 MB.
PROXY_EVENT_BYTES_MAX: Final = 16 * MIB
# A moving request gets no tokens for at most this time; then it stays at its engine.
PROXY_MOVE_S: Final = 10.0
# Requests moved at once from a drained engine: each costs its target a prompt's KV.
PROXY_MOVES_MAX: Final = 8
# How long decode has to free a prompt that nobody wants any more, and how many prompts
# it frees at once; beyond these, prefill's lease does.
PROXY_RELEASE_S: Final = 10.0
PROXY_RELEASES_MAX: Final = 256
