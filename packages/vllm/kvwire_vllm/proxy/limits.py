"""Bounds of the proxy, each with its reason."""

from __future__ import annotations

from typing import Final

from kvwire.limits import KIB, MIB

# Requests at once, those that wait at an engine included: 10 KiB each, plus their
# bodies. Engines queue them.
PROXY_RUNNING_MAX: Final = 2048
# Running requests may take this long to end after SIGTERM. By default Kubernetes kills
# the process 30 s after that.
PROXY_STOP_S: Final = 25.0
PROXY_STOP_S_MAX: Final = 86400.0
# A request that has failed on this many engines is not retried: it may be the cause. A
# limit of 3 would cost the fleet half as many failures again.
PROXY_FAILED_ON_MAX: Final = 2
# A request that this many engines have refused is not retried, if all had no room, or
# were down, already before. The one with the fewest requests was asked first, so the
# others hardly have more room.
PROXY_REFUSED_BY_MAX: Final = 4
# The body of a client's request: a prompt of a million tokens has 7 MB, pictures some
# more.
PROXY_BODY_BYTES_MAX: Final = 64 * MIB
# Connections beyond those of running requests, for the limit of open files.
PROXY_IDLE_MAX: Final = 1024
# An engine's answer to /health; vLLM sends only a status.
PROXY_HEALTH_BYTES_MAX: Final = 64 * KIB
# One event of a stream; the first one lists the prompt's tokens, and a million of those
# are 7 MB.
PROXY_EVENT_BYTES_MAX: Final = 16 * MIB
# A moving request gets no tokens for at most this time; then it stays at its engine.
PROXY_MOVE_S: Final = 10.0
# Requests moved at once from a drained engine: each costs its target a prompt's KV.
PROXY_MOVES_MAX: Final = 8
